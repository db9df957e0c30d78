"""Files of tokenizers: in folders, on the hub, in a form that every transformers reads; the built-in byte tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config import Locator
from posttrain.errors import ConfigError
from posttrain.runtime.hub import hub_is_reachable
from posttrain.user_code import import_transformers

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
IMAGE_FILES = (PREPROCESSOR, PROCESSOR)
"""Files of a model's image processor; newer models have only the second."""
ADAPTER = "adapter_config.json"
"""File by which a folder is an adapter in PEFT's format."""
COPIED = (
    *TOKENIZER_FILES,
    CONFIG,
    TEMPLATE,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "spiece.model",
)
"""Files that a tokenizer is read from, which `save` copies."""


def refuse_adapter(folder: Path) -> None:
    """ConfigError for a folder that holds an adapter in PEFT's format in place of a model."""
    if (folder / "config.json").exists() or not (folder / ADAPTER).is_file():
        return
    try:
        base = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except ValueError:
        base = None
    raise ConfigError(
        f"{folder} is an adapter in PEFT's format, not a model; give it as model.adapter (adapter=... of "
        f"pt.load_model), and {base or 'its base model'} as model.path"
    )


TEMPLATES = Path(__file__).parent / "chat_templates"
"""Folder of the templates that posttrain brings."""
ANY_CLASS = "PreTrainedTokenizerFast"
"""Tokenizer class that every version of transformers knows."""


@dataclass(frozen=True, kw_only=True)
class NewNames:
    """Names in the files of a new model that takes images."""

    ids: Mapping[str, str]
    """Fields of `config.json` -> tokens of which they hold the id."""
    tokens: Mapping[str, str]
    """Fields of `tokenizer_config.json` -> tokens."""
    image_processor: str
    processor: str


_GEMMA = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
_QWEN = {
    "image_token": "<|image_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "video_token": "<|video_pad|>",
}
_QWEN_IDS = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")
_NEW_QWEN: dict[str, Any] = {
    "ids": dict(zip(_QWEN_IDS, _QWEN.values(), strict=True)),
    "tokens": _QWEN,
    "image_processor": "Qwen2VLImageProcessor",
}

NEW: Mapping[str, NewNames] = {
    "gemma3": NewNames(
        ids={f"{name}_index": token for name, token in _GEMMA.items()},
        tokens=_GEMMA,
        image_processor="Gemma3ImageProcessor",
        processor="Gemma3Processor",
    ),
    "qwen2_5_vl": NewNames(**_NEW_QWEN, processor="Qwen2_5_VLProcessor"),
    "qwen3_vl": NewNames(**_NEW_QWEN, processor="Qwen3VLProcessor"),
}
"""By `model_type`; of other families there are no new models with a tower."""


def new_names(model_type: str) -> NewNames:
    """Names in the files of a new model. ConfigError for other families."""
    if model_type not in NEW:
        raise ConfigError(f"model_type={model_type!r}: a new model with a vision tower is one of {', '.join(NEW)}")
    return NEW[model_type]


def files_of(folder: Path) -> dict[str, bytes]:
    """Read the files of a tokenizer in a folder, by name."""
    return {name: (folder / name).read_bytes() for name in COPIED if (folder / name).is_file()}


def processor_files(name: str) -> dict[str, bytes]:
    """Read the files of a model's image processor. `name`: a folder or a hub id."""
    paths = {file: Path(name) / file if Path(name).is_dir() else _download(name, file) for file in IMAGE_FILES}
    return {file: path.read_bytes() for file, path in paths.items() if path is not None and path.is_file()}


def processor_fields(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Fields of a model's image processor; empty without its files."""
    if PREPROCESSOR in files:
        return dict(json.loads(files[PREPROCESSOR]))
    return dict(json.loads(files.get(PROCESSOR, b"{}")).get("image_processor", {}))


def portable(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Tokenizer files in the form that both transformers 4 and 5 read; files of other code are left out.

    transformers 5 writes a class that 4 does not know, lists where 4 takes mappings, and the template apart.
    """
    original = config_of(files)
    config = {key: value for key, value in original.items() if key not in ("auto_map", "backend", "is_local")}
    extra = config.pop("extra_special_tokens", None)
    if isinstance(extra, list):
        config["additional_special_tokens"] = [*config.get("additional_special_tokens", []), *extra]
    named = config.pop("model_specific_special_tokens", extra if isinstance(extra, dict) else None)
    if named:
        config["extra_special_tokens"] = named
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = ANY_CLASS
    if CONFIG in files and original == config:
        return dict(files)
    if TEMPLATE in files:
        config["chat_template"] = files[TEMPLATE].decode()
    return {**{name: content for name, content in files.items() if name != TEMPLATE}, CONFIG: json_bytes(config)}


def config_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Content of `tokenizer_config.json`."""
    config: dict[str, Any] = json.loads(files[CONFIG]) if CONFIG in files else {"tokenizer_class": ANY_CLASS}
    return config


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """JSON as the files of a tokenizer hold it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def from_pretrained(name: str, *, local_files_only: bool) -> Any:
    """Load a transformers tokenizer without running code of its repository. Raises ConfigError if it cannot be read."""
    transformers = import_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(
            name, local_files_only=local_files_only, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(_unreadable(name, error, local_files_only=local_files_only)) from error
    except Exception as error:
        # The Rust reader raises bare `Exception` for a tokenizer.json that it cannot parse.
        if type(error) is not Exception:
            raise
        raise ConfigError(_unreadable(name, error, local_files_only=local_files_only)) from error


def _unreadable(name: str, error: Exception, *, local_files_only: bool) -> str:
    reason = " ".join(str(error).split())
    reason = reason if len(reason) <= 200 else f"{reason[:200]}..."
    if "custom code" in reason:
        return f"tokenizer: {name} needs Python code of its repository, which is not run; convert it to tokenizer.json"
    if (Path(name) / "tokenizer.model").is_file() and not (Path(name) / "tokenizer.json").is_file():
        return (
            f"tokenizer: {name} has tokenizer.model but no tokenizer.json, and it cannot be converted here; "
            "pip install sentencepiece protobuf, or give a folder with tokenizer.json"
        )
    if Path(name).is_dir():
        return f"tokenizer: the files in {name} cannot be read ({type(error).__name__}: {reason}); copy them anew"
    if local_files_only:
        return (
            f"tokenizer: no folder {name}; and the hub cannot be reached, nor is {name} in the local cache; "
            f"give an existing folder, connect to the network, or use 'bytes'{Locator(name).suggestion}"
        )
    near = Locator(name).suggestion
    return f"tokenizer: neither a folder {name} nor a readable tokenizer {name} on the hub ({reason}){near}"


def model_end_ids(name: str) -> list[int]:
    """Stop tokens that the files of a model name. `name`: a folder or a hub id."""
    return end_ids(*end_files(name))


def end_files(name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Content of `generation_config.json` and `config.json`; empty for a missing one."""
    generation, config = (_read(name, file) for file in ("generation_config.json", "config.json"))
    return generation, config


def end_ids(*configs: Mapping[str, Any]) -> list[int]:
    """Ids under `eos_token_id` of configuration files, also of the text part of a multimodal model; each once."""
    parts = [part for one in configs for part in (one, one.get("text_config")) if isinstance(part, Mapping)]
    named = [part.get("eos_token_id") for part in parts]
    ids = [i for one in named for i in (one if isinstance(one, list | tuple) else [one])]
    return list(dict.fromkeys(i for i in ids if i is not None))


def _read(name: str, file: str) -> Mapping[str, Any]:
    path = Path(name) / file if Path(name).is_dir() else _download(name, file)
    if path is None or not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"tokenizer: {path}:{error.lineno} is not JSON: {error.msg}") from error
    if not isinstance(fields, Mapping):
        raise ConfigError(f"tokenizer: {path} must hold a JSON object; it holds a {type(fields).__name__}")
    return fields


def _download(name: str, file: str) -> Path | None:
    """Path of a file of a hub repository; None if the repository has none."""
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file, local_files_only=not hub_is_reachable()))
    except LocalEntryNotFoundError as error:
        if try_to_load_from_cache(name, file) is _CACHED_NO_EXIST:
            return None
        raise ConfigError(
            f"tokenizer: the hub cannot be reached, and {file} of {name}, which says where a sequence ends, is not in "
            "the local cache; connect once, or give a folder"
        ) from error
    except EntryNotFoundError:
        return None


BYTE_CONTROLS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
FIRST_CONTROL_ID = 256

BYTE_GENERATION = {"eos_token_id": [FIRST_CONTROL_ID + 2, FIRST_CONTROL_ID + 4]}
"""Stop tokens: plain text ends with `<eos>`, a chat turn with `<|im_end|>`."""

BYTE_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def byte_template(image: str) -> str:
    """Chat template of the byte tokenizer for messages with images, each written as a text."""
    content = "message['content']"
    parts = f"{content} | map(attribute='text', default={json.dumps(image)}) | join"
    before, between, after = BYTE_TEMPLATE.split(content)
    return f"{before}{content}{between}({content} if {content} is string else {parts}){after}"


def byte_characters() -> list[str]:
    """Printable character of each byte in byte-level vocabularies: itself, or the next free one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code) for code in range(256, 512))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def build_byte_tokenizer() -> Any:
    """Build a `PreTrainedTokenizerFast` whose token ids are bytes; decoding reproduces any UTF-8 text exactly."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in BYTE_CONTROLS])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", FIRST_CONTROL_ID + 1)]
    )
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=BYTE_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def shipped_templates() -> dict[str, Path]:
    """Files of the templates that posttrain brings, by name; they keep earlier turns and mark the assistant's."""
    return {file.stem: file for file in sorted(TEMPLATES.glob("*.jinja"))}
