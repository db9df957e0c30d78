"""Model lookup before loading weights: folder or hub id, `config.json`, identity for resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.config import Locator, ModelSection, Upscale, Vision
from posttrain.data.files import file_kind
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.data.tokenizer_files import (
    TOKENIZER_FILES,
    end_ids,
    model_end_ids,
    new_names,
    refuse_adapter,
    shipped_templates,
)
from posttrain.errors import ConfigError, placed
from posttrain.models import hf
from posttrain.models.config import ModelConfig
from posttrain.runtime.files import content_digest, typed_text
from posttrain.runtime.hub import hub_is_reachable, is_hub_id
from posttrain.user_code import is_object_spec
from posttrain.weights.files import find_folder, read_json
from posttrain.weights.upscale import upscaled_config

RANDOM_WEIGHTS = "model.init"
"""Origin name of a model with random initial weights."""


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Description of a model without its weights, read once per run and passed on."""

    path: str | None
    """Absolute folder in Hugging Face layout, or hub id; None: random weights."""
    hf_json: Mapping[str, Any] | None
    """Fields of its `config.json`; None if it is on the hub and the hub is unreachable."""
    config: ModelConfig | None
    """Configuration; None like `hf_json`, or if it depends on a tokenizer that is not there."""
    tokenizer: Tokenizer | None = None
    """Tokenizer; None if it is not needed, or on the hub and the hub is unreachable."""

    @property
    def local(self) -> Path | None:
        """Absolute folder; None for a hub id and for random weights."""
        return None if self.path is None or not Path(self.path).is_dir() else Path(self.path)

    @property
    def wrapper(self) -> hf.Wrapper | None:
        """Multimodal wrapper of the text model, if any."""
        return None if self.hf_json is None else hf.text_part(self.hf_json)[1]


def read_model_files(path: str, *, long_context: bool = False, vision: Vision = "none") -> ModelFiles:
    """Read `config.json` of a folder or hub id. Raises ConfigError that begins with `model.path`."""
    file = _config_file(path)
    if file is None:
        return ModelFiles(path=path, hf_json=None, config=None)
    with placed("model.path: "):
        fields = read_json(file)
    try:
        config = hf.config_from_hf(fields, long_context=long_context, vision=vision)
    except hf.NoLongContext as error:
        raise ConfigError(f"model.{error}") from error
    except ConfigError as error:
        raise ConfigError(f"model.path: {file}: {error}") from error
    return ModelFiles(path=path, hf_json=fields, config=config)


def trained_model_files(section: ModelSection, tokenizer: Tokenizer | None) -> ModelFiles:
    """Describe the run's model, and register its family if it has its own file. Raises ConfigError.

    `tokenizer`: its size is the default vocabulary of `init`.
    """
    add_family_file(section)
    if section.path is not None:
        with placed("model.path: "):
            path = section.path.resolved
        options: dict[str, Any] = {"long_context": section.long_context, "vision": section.vision}
        files = read_model_files(path, **options)
        if section.upscale is not None and files.config is not None:
            with placed("model."):
                files = replace(files, config=upscaled_config(files.config, section.upscale))
        if tokenizer is None or files.hf_json is None:
            return replace(files, tokenizer=tokenizer)
        tower = section.vision != "none"
        return replace(files, tokenizer=tokenizer.for_images(files.hf_json, path, section.image, tower=tower))
    assert section.init is not None
    with placed("model.init: "):
        return _new_model_files(section, section.init, tokenizer)


def _new_model_files(section: ModelSection, init: Mapping[str, Any], tokenizer: Tokenizer | None) -> ModelFiles:
    if tokenizer is None and not is_sized(init):
        return ModelFiles(path=None, hf_json=init, config=None)
    if section.vision == "none" or tokenizer is None:
        fields = init if tokenizer is None else init_fields(init, tokenizer)
        config = hf.config_from_init(fields, vision=section.vision)
        return ModelFiles(path=None, hf_json=fields, config=config, tokenizer=tokenizer)
    tokenizer = tokenizer.for_new_images(str(init.get("model_type")))
    config = hf.config_from_init(init_fields(init, tokenizer), vision=section.vision)
    whole = hf.config_to_hf(config)
    return ModelFiles(
        path=None, hf_json=whole, config=config, tokenizer=tokenizer.for_images(whole, None, section.image)
    )


def is_sized(init: Mapping[str, Any]) -> bool:
    """Tell whether the fields of a new model give its vocabulary a size, which is else the tokenizer's."""
    return "vocab_size" in init or "vocab_size" in (init.get("text_config") or {})


def init_fields(init: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Fields of a new model with those that its tokenizer decides. ConfigError for ids of other tokens."""
    if "vision_config" not in init:
        return {"vocab_size": tokenizer.vocab_size, **init}
    own = {key: tokenizer.hf.get_vocab()[text] for key, text in new_names(str(init.get("model_type"))).ids.items()}
    for key, number in own.items():
        if init.get(key, number) != number:
            raise ConfigError(f"{key}={init[key]}: the tokenizer has {number}; remove the field")
    text = init.get("text_config")
    if not isinstance(text, Mapping):
        return {**init, **own}
    ids = {key: getattr(tokenizer.hf, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {**init, **own, "text_config": {"vocab_size": tokenizer.vocab_size, **ids, **text}}


def unreachable(name: str) -> bool:
    """Return True if the name may only exist on the hub and the hub is unreachable."""
    path = Path(name)
    local = name == "bytes" or path.exists() or is_object_spec(name) or file_kind(path) is not None
    return not local and is_hub_id(name) and not hub_is_reachable()


def refuse_misspelt(field: str, name: Locator) -> None:
    """Raises ConfigError for a hub id that looks like a misspelt local path, when the hub is unreachable.

    That is: the path's parent folder exists, or a similar name does. Ids in the local hub cache are accepted.
    """
    import datasets
    from huggingface_hub import constants

    near = name.suggestion
    parent = Path(name).parent
    if not near and (parent == Path() or name.beside(str(parent)).found is None):
        return
    cached = [Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" for kind in ("model", "dataset")] + [
        Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
    ]
    if not any(folder.is_dir() for folder in cached):
        raise ConfigError(f"{field}: {name} is not a local file or folder, and the hub is unreachable{near}")


def tokenizer_name(section: ModelSection) -> str:
    """Absolute folder or hub id of the tokenizer, or `bytes`; the adapter's own, if its folder has one."""
    field, name = ("path", section.path) if section.tokenizer is None else ("tokenizer", section.tokenizer)
    assert name is not None
    with placed(f"model.{field}: "):
        resolved = "bytes" if name == "bytes" else name.resolved
    if section.tokenizer is None and section.adapter is not None:
        with placed("model.adapter: "):
            return str(own_tokenizer(section.adapter.resolved) or resolved)
    return resolved


def own_tokenizer(adapter: str) -> Path | None:
    """Folder of a PEFT adapter that has a tokenizer, such as one with added tokens; None without one."""
    folder = None if unreachable(adapter) else find_folder(adapter)
    there = folder is not None and any((folder / file).is_file() for file in TOKENIZER_FILES)
    return folder if there else None


def check_added_tokens(tokenizer: Tokenizer, adapter: str, base_rows: int, rows: int, *, named: bool) -> None:
    """Raises ConfigError unless a tokenizer has the tokens for which an adapter resized its base's embedding.

    `named`: the user chose the tokenizer.
    """
    ids = tokenizer.num_ids
    known = named or ids == rows or own_tokenizer(adapter) is not None
    if not known or ids > rows or rows > base_rows >= ids:
        raise ConfigError(
            f"{adapter}: added tokens gave the embedding {rows} rows in place of the base's {base_rows}, and the "
            f"tokenizer {tokenizer.name} has {ids} ids; set model.tokenizer to the one that the adapter was trained "
            "with, or put its files into the adapter's folder"
        )


def run_tokenizer(name: str | Path, section: ModelSection) -> Tokenizer:
    """Load a tokenizer with the stop tokens of its model, and the chat template and stop tokens of a configuration."""
    tokenizer = load_tokenizer(name).with_stop_ids(_end_ids(section))
    if section.chat_template is not None:
        tokenizer = with_template(tokenizer, section.chat_template, "model.chat_template")
    with placed("model."):
        tokenizer = tokenizer.with_template_args(section.chat_template_args)
    return tokenizer.with_stop_tokens(section.stop_tokens)


def with_template(tokenizer: Tokenizer, template: Locator, field: str) -> Tokenizer:
    """Copy of a tokenizer with the chat template of a file, or with one that posttrain brings. `field`: for errors."""
    shipped = shipped_templates()
    try:
        file = shipped.get(template) or template.file
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}; give a file, or one of {', '.join(shipped)}") from error
    return tokenizer.with_chat_template(file)


def _end_ids(section: ModelSection) -> list[int]:
    """Stop tokens that the model names where the tokenizer is not from its folder; a tokenizer reads its own folder's.

    Empty for a model on a hub that cannot be reached.
    """
    if section.init is not None:
        return end_ids(section.init)
    if section.path is None or (section.tokenizer is None and section.adapter is None):
        return []
    try:
        path = section.path.resolved
        return [] if unreachable(path) else model_end_ids(path)
    except ConfigError as error:
        raise ConfigError(f"model.path: {str(error).removeprefix('tokenizer: ')}") from error


def add_family_file(section: ModelSection) -> None:
    """Register the model's family from `model.family`, if set."""
    if section.family is None:
        return
    with placed("model.family: "):
        hf.add_family(section.family.file)


def family_digest(section: ModelSection) -> str | None:
    """Digest of the file with the model's family, on which all that its models say depends; None without one."""
    return None if section.family is None else content_digest(section.family.file)


def _config_file(name: str) -> Path | None:
    folder = Path(name)
    if folder.exists():
        if not folder.is_dir():
            raise ConfigError(f"model.path: {folder} is a file; give the folder with config.json")
        with placed("model.path: "):
            refuse_adapter(folder)
        return folder / "config.json"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=not hub_is_reachable()))
    except LocalEntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"model.path: {name} is not a local folder, and the Hugging Face hub has no config.json for it ({reason}); "
            f"give an existing folder, or check the id{Locator(name).suggestion}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Identity of a stage's initial model, checked on resume: a checkpoint holds only trained parameters."""

    name: str
    """Folder, hub id, or `model.init`."""
    parts: Mapping[str, str]
    """Digest or value per part, such as files."""


def origin_of_folder(name: str, folder: Path, upscale: Upscale | None = None) -> Origin:
    """Origin of a checkpoint folder: digests of its `config.json` and weights files, and what is made of it."""
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    files = [folder / "config.json", *sorted(weights)]
    grown = {} if upscale is None else {"model.upscale": str(upscale)}
    return Origin(name=name, parts={**{file.name: content_digest(file) for file in files}, **grown})


def origin_of_adapter(folder: Path) -> dict[str, str]:
    """Digests of an adapter's files."""
    return {file.name: content_digest(file) for file in sorted(folder.glob("adapter_*")) if file.is_file()}


def origin_of_init(fields: Mapping[str, Any], seed: int) -> Origin:
    """Origin of random weights: config fields and seed."""
    parts = {name: typed_text(value) for name, value in fields.items()}
    return Origin(name=RANDOM_WEIGHTS, parts={**parts, "seed": str(seed)})
