"""Tokenizers: loading, exact encoding and decoding, and stop tokens."""

from __future__ import annotations

import copy
import itertools
import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config import ImageSection
from posttrain.data.templates import with_arguments
from posttrain.data.tokenizer_files import (
    BYTE_GENERATION,
    BYTE_TEMPLATE,
    CONFIG,
    COPIED,
    TEMPLATE,
    TOKENIZER_FILES,
    build_byte_tokenizer,
    byte_template,
    config_of,
    end_files,
    end_ids,
    files_of,
    from_pretrained,
    json_bytes,
    new_names,
    portable,
    processor_files,
    refuse_adapter,
)
from posttrain.errors import ConfigError, did_you_mean
from posttrain.runtime.files import digest
from posttrain.runtime.hub import hub_is_reachable, is_hub_id
from posttrain.user_code import missing_path

if TYPE_CHECKING:
    from posttrain.data.images import Grid, ImagePolicy
    from posttrain.data.pictures import Picture, RowPictures
    from posttrain.data.prompt_images import PromptImage

MEDIA = ("<|video_pad|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>")
"""Tokens of other media than images, where a vocabulary has them."""
CONTEXT_TOKENS = 4
"""Tokens before others that decide how these are decoded: one for the space between words, three for the bytes of a
character."""
LONG_TEXT = 1 << 14
"""Characters beyond which a text is encoded as a batch of one, which lets other threads run meanwhile."""
ADD_ROWS = "give the model rows for added tokens: transformers' model.resize_token_embeddings(len(tokenizer))"


FORM = "posttrain_prompts"
"""Key of `tokenizer_config.json` with the form of the prompts that a saved model was trained on."""


@dataclass(frozen=True)
class PromptForm:
    """Form of the prompts that a model was trained on, the default of prompts for it."""

    chat: bool
    """Rendered with the chat template, or plain text."""
    system: str | None = None
    """System message with which all of them began."""


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Transformers fast tokenizer with explicit stop tokens.

    `encode` parses control tokens in its text; user messages go through `Renderer`, which does not.
    """

    hf: Any
    """Wrapped `transformers.PreTrainedTokenizerFast`."""
    name: str
    generation: Mapping[str, Any]
    """Content of `generation_config.json`, with the `eos_token_id` of `config.json` too; empty without the files."""
    files: Mapping[str, bytes]
    """Files that it was read from, by name."""
    num_rows: int | None = None
    """Number of rows of the model's embedding; None: unknown model, no check."""
    clock: datetime | None = None
    """Time that a chat template with today's date sees; None: the present."""
    vision: tuple[Mapping[str, Any], ImageSection] | None = None
    """Fields of a model's `config.json`, and the settings of its images; None: unknown model."""
    tower: bool = True
    """The model is loaded with its vision tower, if it has one."""
    form: PromptForm | None = None
    """Form of the prompts that the model was trained on; None: not known."""

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Stop tokens: the tokenizer's `eos_token`, then those of `generation_config.json` and `config.json`.

        The first one is appended to plain completions and texts; empty if no source has one.
        """
        own = [] if self.hf.eos_token_id is None else [self.hf.eos_token_id]
        return tuple(i for i in dict.fromkeys([*own, *end_ids(self.generation)]) if 0 <= i < self.num_ids)

    @cached_property
    def identity(self) -> Mapping[str, str]:
        """Digest of each part that decides what tokens a text has; the time that a chat template sees is none."""
        parts = {
            "vocabulary": self.hf.backend_tokenizer.to_str(),
            "special tokens": json.dumps(self.hf.special_tokens_map, sort_keys=True, default=str),
            "stop tokens": str(self.stop_ids),
            "chat template": json.dumps(self.hf.chat_template, sort_keys=True),
        }
        if self.sees:
            parts["images"] = f"{self.images.model_type} {self.images.settings}"
        return {name: digest(text) for name, text in parts.items()}

    @cached_property
    def end_id(self) -> int:
        """First of `stop_ids`. Raises `ConfigError` if there is none."""
        if not self.stop_ids:
            raise ConfigError(
                f"tokenizer {self.name} names no end-of-sequence token; "
                "set eos_token in its tokenizer_config.json or eos_token_id in its generation_config.json"
            )
        return self.stop_ids[0]

    def with_stop_tokens(self, texts: Sequence[str]) -> Tokenizer:
        """Copy of the tokenizer with additional stop tokens, such as `<s>`; `save` writes them too."""
        vocabulary = self.hf.get_vocab()
        for text in texts:
            if text not in vocabulary:
                raise ConfigError(f"stop_tokens: {self.name} has no token {text!r}{did_you_mean(text, vocabulary)}")
        return self.with_stop_ids([vocabulary[text] for text in texts])

    def with_stop_ids(self, ids: Sequence[int]) -> Tokenizer:
        """Copy of the tokenizer with additional stop tokens, such as those of a model; `save` writes them too."""
        if not ids:
            return self
        stops = dict.fromkeys([*self.stop_ids, *ids])
        return replace(self, generation={**self.generation, "eos_token_id": list(stops)})

    def with_chat_template(self, file: Path | None) -> Tokenizer:
        """Copy of the tokenizer with the chat template of a file, which then renders prompts; `save` writes it too."""
        return self if file is None else self._with_templates(file.read_text(encoding="utf-8")).with_form(None)

    def with_template_args(self, args: Mapping[str, Any]) -> Tokenizer:
        """Copy of the tokenizer whose chat template has values for its variables; `save` writes them into it."""
        if not args:
            return self
        templates = self.hf.chat_template
        if not templates:
            raise ConfigError(
                f"chat_template_args: tokenizer {self.name} has no chat template; set model.chat_template"
            )
        if isinstance(templates, str):
            return self._with_templates(with_arguments(templates, args, self.name))
        return self._with_templates({name: with_arguments(one, args, self.name) for name, one in templates.items()})

    def _with_templates(self, templates: str | dict[str, str]) -> Tokenizer:
        hf = copy.copy(self.hf)
        hf.chat_template = templates
        several = [{"name": n, "template": t} for n, t in templates.items()] if isinstance(templates, dict) else None
        config = {**config_of(self.files), "chat_template": several or templates}
        files = {name: content for name, content in self.files.items() if name != TEMPLATE}
        return replace(self, hf=hf, files={**files, CONFIG: json_bytes(config)})

    def with_form(self, form: PromptForm | None) -> Tokenizer:
        """Copy of the tokenizer of a model trained on prompts of this form; `save` writes it too."""
        return replace(self, form=form)

    @property
    def chats(self) -> bool:
        """True if prompts are rendered with the chat template where nothing else is said: as the model was trained, or
        with the template that there is."""
        return self.chat_template is not None and (self.form is None or self.form.chat)

    @property
    def system(self) -> str | None:
        """System message of prompts that bring none, where nothing else is said: that of all that the model was
        trained on."""
        return self.form.system if self.chats and self.form is not None else None

    def at(self, clock: datetime | None) -> Tokenizer:
        """Copy of the tokenizer whose chat template sees a fixed time, such as the start of a run."""
        return replace(self, clock=clock)

    def for_model(self, num_rows: int) -> Tokenizer:
        """Copy of the tokenizer for a model with `num_rows` embedding rows: `known` refuses tokens beyond them."""
        return replace(self, num_rows=num_rows)

    def for_images(
        self, model: Mapping[str, Any], name: str | None, section: ImageSection, *, tower: bool = True
    ) -> Tokenizer:
        """Copy of the tokenizer for the images of a model, whose processor `save` writes too. ConfigError for what is
        not supported.

        `model`: fields of its `config.json`; `name`: its folder or hub id, None: a new model; `tower`: it is loaded
        with its tower, else rows with pictures are refused.
        """
        from posttrain.data.images import new_processor

        sized = replace(self, vision=(model, section), tower=tower)
        if not tower:
            return sized
        files = new_processor(model) if name is None else processor_files(name)
        sized = replace(sized, files={**self.files, **files})
        return replace(sized, files=sized.images.saved(sized.files))

    def for_new_images(self, model_type: str) -> Tokenizer:
        """Copy of the tokenizer for a new model of a family that takes images, with its image tokens where they are
        missing; the template of the byte tokenizer then writes images. ConfigError for other families."""
        from posttrain.data.images import FAMILIES

        names, layout = new_names(model_type), FAMILIES[model_type].layout
        texts = dict.fromkeys([*layout.texts, *names.ids.values()])
        missing = [text for text in texts if text not in self.hf.get_vocab()]
        sized = self._with_special_tokens(missing) if missing else self
        sized = replace(sized, files={**sized.files, CONFIG: json_bytes({**config_of(sized.files), **names.tokens})})
        is_plain = self.hf.chat_template == BYTE_TEMPLATE
        return sized._with_templates(byte_template(layout.written)) if is_plain else sized

    def _with_special_tokens(self, texts: Sequence[str]) -> Tokenizer:
        from tokenizers import AddedToken

        hf = copy.deepcopy(self.hf)
        hf.add_tokens([AddedToken(text, special=True, normalized=False) for text in texts], special_tokens=True)
        with tempfile.TemporaryDirectory() as written:
            hf.save_pretrained(written)
            return replace(self, hf=hf, files=files_of(Path(written)))

    @cached_property
    def images(self) -> ImagePolicy:
        """Policy of the model's images. ConfigError for a model without any, and for a vocabulary without their
        tokens."""
        from posttrain.data.images import policy_of

        model, section = self.vision or ({}, ImageSection())
        policy = policy_of(model, self.files, section, self.name)
        if missing := [text for text in policy.family.layout.texts if text not in self.hf.get_vocab()]:
            raise ConfigError(f"images: tokenizer {self.name} has no token {', '.join(missing)}")
        return policy

    @property
    def has_images(self) -> bool:
        """Tell whether the model takes images."""
        if self.vision is None or not self.vision[0].get("vision_config"):
            return False
        from posttrain.data.images import takes_images

        return takes_images(self.vision[0])

    @property
    def sees(self) -> bool:
        """True for a model that is loaded with its vision tower."""
        return self.has_images and self.tower

    def picture_reader(self) -> RowPictures | None:
        """Reader of pictures in messages that come without a row; None for a model that does not see."""
        from posttrain.data.pictures import RowPictures

        return RowPictures({}, Path()) if self.sees else None

    @cached_property
    def image_ids(self) -> list[int]:
        """Special tokens of and around images, which never have loss."""
        return list(self.hf.convert_tokens_to_ids(list(self.images.family.layout.texts)))

    @property
    def unsampled_ids(self) -> tuple[int, ...]:
        """Special tokens of and around images, and of other media, which a sample never has."""
        vocabulary = self.hf.get_vocab()
        return tuple(sorted({*self.image_ids, *(vocabulary[text] for text in MEDIA if text in vocabulary)}))

    @cached_property
    def image_id(self) -> int:
        """Token whose embedding an image feature replaces."""
        return int(self.hf.convert_tokens_to_ids(self.images.family.layout.token))

    def image_of(self, picture: Picture) -> PromptImage:
        """Image that a picture is to the model. PictureError for one that cannot be read or resized."""
        from posttrain.data.prompt_images import PromptImage

        return PromptImage.of(picture, self.images)

    def image_tokens(self, grid: Grid) -> list[int]:
        """Tokens of an image, without the texts around it."""
        return list(self.hf.convert_tokens_to_ids(self.images.family.layout.tokens(grid)))

    def known(self, tokens: list[int]) -> list[int]:
        """Return `tokens`. Raises `ConfigError` for tokens without a row in the model's embedding."""
        if self.num_rows is not None and tokens and max(tokens) >= self.num_rows:
            token = max(tokens)
            raise ConfigError(
                f"token {self.hf.convert_ids_to_tokens(token)!r} has id {token}, but the model's embedding has only "
                f"{self.num_rows} rows; leave the text out, or {ADD_ROWS}"
            )
        return tokens

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """Tokens that the tokenizer puts before a plain text, such as `<s>` or `[gMASK]<sop>`."""
        bare, whole = self.encode("a"), self.hf.backend_tokenizer.encode("a", add_special_tokens=True).ids
        starts = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return tuple(whole[: next(starts, 0)])

    def with_prefix(self, tokens: list[int]) -> list[int]:
        """Tokens of a plain text after `prefix_ids`; of a prefix that the text begins with, only the rest is added."""
        prefix, counts = list(self.prefix_ids), range(len(self.prefix_ids), -1, -1)
        there = next(n for n in counts if tokens[:n] in (prefix[:n], prefix[len(prefix) - n :]))
        return [*prefix, *tokens[there:]]

    @property
    def chat_template(self) -> str | None:
        """Chat template for conversations without tools; None without one. ConfigError for several without default."""
        if isinstance(self.hf.chat_template, dict) and "default" not in self.hf.chat_template:
            names = ", ".join(self.hf.chat_template)
            raise ConfigError(
                f"tokenizer {self.name} has the chat templates {names}, no default; set model.chat_template"
            )
        return self.hf.get_chat_template() if self.hf.chat_template else None

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including added tokens."""
        return len(self.hf)

    @cached_property
    def num_ids(self) -> int:
        """Largest token id plus 1; more than `vocab_size` if ids have gaps."""
        return max(self.hf.get_vocab().values()) + 1

    @cached_property
    def max_token_bytes(self) -> int:
        """Upper bound of the bytes of text that one token stands for. A normalizer composes characters: up to a
        quarter of the bytes are left."""
        longest = max(len(text.encode()) for text in self.hf.get_vocab())
        return longest if self.hf.backend_tokenizer.normalizer is None else 4 * longest

    @cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """Texts of the special tokens, longest first."""
        return tuple(sorted(self.control_ids, key=lambda text: (-len(text), text)))

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without begin and end tokens."""
        return _encoded(self.hf.backend_tokenizer, text).ids

    @cached_property
    def control_ids(self) -> Mapping[str, int]:
        """Id of each special token, by its text."""
        return {token.content: number for number, token in self.hf.added_tokens_decoder.items() if token.special}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True, *, after: Sequence[int] = ()) -> str:
        """Text of tokens, which with the text of the tokens `after` which they come makes the text of both.

        By themselves SentencePiece tokens lose their first space, and the rest of a character is none.
        """
        return self.decode_each([(after, tokens)], skip_special_tokens)[0]

    def decode_each(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], skip_special_tokens: bool = True
    ) -> list[str]:
        """Texts of several pairs (tokens before, tokens), see `decode`."""
        skipped = frozenset(self.control_ids.values()) if skip_special_tokens else frozenset[int]()
        contexts = [_last(before, CONTEXT_TOKENS, skipped) for before, _ in pairs]
        shown = [[token for token in tokens if token not in skipped] for _, tokens in pairs]
        both = [[*context, *tokens] for context, tokens in zip(contexts, shown, strict=True)]
        texts = self.hf.backend_tokenizer.decode_batch(
            [self._whole_characters(tokens) for tokens in (*contexts, *both)], skip_special_tokens=False
        )
        # Half a character at the end of the context becomes whole with the tokens, and then counts as theirs.
        return [
            text[_num_common(context, text) :]
            for context, text in zip(texts[: len(pairs)], texts[len(pairs) :], strict=True)
        ]

    def _whole_characters(self, tokens: list[int]) -> list[int]:
        """Tokens with those of the replacement character for bytes that are no character, where bytes are tokens: a
        single one of them would spoil the characters beside it."""
        if self.byte_of.keys().isdisjoint(tokens):
            return tokens
        whole: list[int] = []
        for is_byte, run in itertools.groupby(tokens, self.byte_of.__contains__):
            if is_byte:
                text = bytes(self.byte_of[token] for token in run).decode(errors="replace")
                whole += [self._byte_ids[byte] for byte in text.encode()]
            else:
                whole += run
        return whole

    @cached_property
    def _byte_ids(self) -> list[int]:
        """Token of each byte, where bytes are the fallback of a vocabulary of texts; empty elsewhere."""
        if '"ByteFallback"' not in str(self.hf.backend_tokenizer.decoder.__getstate__()):
            return []
        vocabulary = self.hf.get_vocab()
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        return [vocabulary[name] for name in names] if set(names) <= vocabulary.keys() else []

    @cached_property
    def byte_of(self) -> Mapping[int, int]:
        """Byte of each token that is one, where bytes are the fallback of a vocabulary of texts."""
        return {token: byte for byte, token in enumerate(self._byte_ids)}

    def split_stops(self, stops: Sequence[str], skip_special_tokens: bool) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Stop strings to look for in the text, and stop tokens: those strings that are a special token.

        ValueError for a string with a special token inside, which text without special tokens never has.
        """
        for stop in stops:
            inside = next((text for text in self.control_tokens if text in stop and text != stop), None)
            if skip_special_tokens and inside is not None:
                raise ValueError(
                    f"sampling.stop={stop!r}: contains the special token {inside}, which is not in the text; stop at "
                    f"{inside} alone, or set skip_special_tokens to false"
                )
        return (
            tuple(stop for stop in stops if stop not in self.control_ids),
            tuple(self.control_ids[stop] for stop in stops if stop in self.control_ids),
        )

    def encode_spans(
        self, text: str, *, continues: bool = False, literal: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a text and their character spans.

        `continues`: the text follows another text, so no space is prepended by tokenizers that do so.
        `literal`: control tokens in the text are ordinary characters.
        """
        backend = self._literal_backend if literal else self.hf.backend_tokenizer
        if continues:
            shifted = _encoded(backend, f"\n{text}")
            pairs = [pair for pair in zip(shifted.ids, shifted.offsets, strict=True) if pair[1][1] > 1]
            if all(start >= 1 for _, (start, _) in pairs):
                return [token for token, _ in pairs], [(start - 1, stop - 1) for _, (start, stop) in pairs]
        encoding = _encoded(backend, text)
        return encoding.ids, encoding.offsets

    def encode_after(self, prompt: str, text: str) -> tuple[list[int], list[int]]:
        """Tokens of a prompt tokenized alone, and of the text that continues it."""
        alone = self.encode(prompt)
        joint = self.encode(prompt + text)
        if joint[: len(alone)] == alone:
            return alone, joint[len(alone) :]
        return alone, self.encode_spans(text, continues=True)[0]

    def save(self, path: str | Path) -> None:
        """Write a folder that transformers 4 and 5 and `load_tokenizer` read, including stop tokens.

        Files are those that the tokenizer was read from; only what one of both versions cannot read is written anew.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        files = portable(self.files)
        if self.form is not None or FORM in config_of(files):
            config = {key: value for key, value in config_of(files).items() if key != FORM}
            files[CONFIG] = json_bytes(config | ({} if self.form is None else {FORM: asdict(self.form)}))
        if (
            self.vision is not None
            and self.tower
            and isinstance(template := config_of(files).get("chat_template"), str)
        ):
            files[TEMPLATE] = template.encode()  # of the processor, which reads no other
        for name, content in files.items():
            (Path(path) / name).write_bytes(content)
        generation = dict(self.generation)
        if self.stop_ids:
            generation["eos_token_id"] = self.stop_ids[0] if len(self.stop_ids) == 1 else list(self.stop_ids)
        if generation:
            text = json.dumps(generation, indent=2) + "\n"
            (Path(path) / "generation_config.json").write_text(text, encoding="utf-8")

    @cached_property
    def _literal_backend(self) -> Any:
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(self.hf.backend_tokenizer.to_str())
        backend.encode_special_tokens = True
        return backend


def _encoded(backend: Any, text: str) -> Any:
    """Encode a text. Raises ConfigError for half of a surrogate pair, which no UTF-8 text can hold."""
    try:
        if len(text) > LONG_TEXT:
            return backend.encode_batch([text], add_special_tokens=False)[0]
        return backend.encode(text, add_special_tokens=False)
    except TypeError as error:
        lone = next((at for at, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
        if lone is None:
            raise
        near = ascii(text[max(lone - 20, 0) : lone + 1])
        raise ConfigError(f"the text holds half of a surrogate pair, {near}; remove it, or repair the text") from error


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Load a tokenizer from a local folder or hub id; `bytes`: the built-in byte tokenizer.

    Raises `ConfigError` if the folder or the hub repository has no readable fast tokenizer.
    """
    if name == "bytes":
        hf = build_byte_tokenizer()
        with tempfile.TemporaryDirectory() as written:
            hf.save_pretrained(written)
            return _wrap(hf, "bytes", files_of(Path(written)), BYTE_GENERATION, {})
    folder = Path(name).expanduser()
    if folder.exists():
        return _load_folder(folder)
    if isinstance(name, Path) or not is_hub_id(name):
        raise ConfigError(f"tokenizer: {missing_path(folder)}; give a folder, a hub id or 'bytes'")
    return _load_hub(name)


def _load_folder(folder: Path) -> Tokenizer:
    if not folder.is_dir():
        raise ConfigError(f"tokenizer: {folder} is a file; give the folder that holds tokenizer.json")
    names = sorted(entry.name for entry in folder.iterdir())
    if not set(names) & set(TOKENIZER_FILES):
        refuse_adapter(folder)
        listing = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ConfigError(
            f"tokenizer: {folder} has no tokenizer.json; it holds {listing or 'nothing'}; "
            "give a folder with tokenizer files, a hub id or 'bytes'"
        )
    hf = from_pretrained(str(folder), local_files_only=True)
    return _wrap(hf, str(folder), files_of(folder), *end_files(str(folder)))


def _load_hub(name: str) -> Tokenizer:
    from huggingface_hub import try_to_load_from_cache

    hf = from_pretrained(name, local_files_only=not hub_is_reachable())
    cached = {file: try_to_load_from_cache(name, file) for file in COPIED}
    files = {file: Path(path).read_bytes() for file, path in cached.items() if isinstance(path, str)}
    return _wrap(hf, name, files, *end_files(name))


def _last(tokens: Sequence[int], count: int, skipped: Collection[int]) -> list[int]:
    """Last `count` tokens without those that are skipped."""
    plain = (token for token in reversed(tokens) if token not in skipped)
    return list(itertools.islice(plain, count))[::-1]


def _num_common(one: str, other: str) -> int:
    """Number of characters at the beginning that two texts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _wrap(
    hf: Any, name: str, files: Mapping[str, bytes], generation: Mapping[str, Any], config: Mapping[str, Any]
) -> Tokenizer:
    if not hf.is_fast:
        raise ConfigError(f"tokenizer: {name} has no fast tokenizer; convert it to tokenizer.json")
    # Files may hold truncation and padding settings of another use; rows here are as long as their text.
    hf.backend_tokenizer.no_truncation()
    hf.backend_tokenizer.no_padding()
    saved = config_of(files).get(FORM)
    form = None if saved is None else PromptForm(**saved)
    return Tokenizer(hf, name, generation, files, form=form).with_stop_ids(end_ids(config))
