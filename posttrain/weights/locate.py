"""Model lookup before loading weights: folder or hub id, `config.json`, identity for resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config import ModelSection
from posttrain.config.yaml_file import did_you_mean_path, find_path, resolve_path
from posttrain.data.sources import FILE_SUFFIXES
from posttrain.errors import ConfigError
from posttrain.models import hf
from posttrain.models.config import ModelConfig
from posttrain.runtime.hub import hub_is_reachable, is_hub_id
from posttrain.user_code import is_object_spec
from posttrain.weights.files import read_json

SAMPLED_BLOCKS = 256
BLOCK_BYTES = 4096
"""Bytes per sampled block of a weights file's digest, evenly spread: different weights differ nearly everywhere."""

RANDOM_WEIGHTS = "model.init"
"""Origin name of a model with random initial weights."""


def local_or_hub(name: str, base_dir: Path) -> str:
    """Resolve a local folder relative to `base_dir`; return a hub id unchanged."""
    found = None if is_hub_id(name) and not path_exists(name, base_dir) else resolve_path(name, base_dir)
    return name if found is None else str(found)


def path_exists(name: str, base_dir: Path) -> bool:
    try:
        resolve_path(name, base_dir)
    except ConfigError:
        return False
    return True


def unreachable(name: str) -> bool:
    """Return True if the name may only exist on the hub and the hub is unreachable."""
    path = Path(name)
    local = name == "bytes" or path.exists() or is_object_spec(name) or path.suffix in FILE_SUFFIXES
    return not local and is_hub_id(name) and not hub_is_reachable()


def refuse_misspelt(field: str, name: str, base_dir: Path) -> None:
    """Raises ConfigError for a hub id that looks like a misspelt local path, when the hub is unreachable.

    That is: the path's parent folder exists, or a similar name does. Ids in the local hub cache are accepted.
    """
    import datasets
    from huggingface_hub import constants

    near = did_you_mean_path(name, base_dir)
    parent = Path(name).parent
    if not near and (parent == Path() or find_path(str(parent), base_dir) is None):
        return
    kept = [Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" for kind in ("model", "dataset")] + [
        Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
    ]
    if not any(folder.is_dir() for folder in kept):
        raise ConfigError(f"{field}: {name} is not a local file or folder, and the hub is unreachable{near}")


def tokenizer_name(section: ModelSection, base_dir: Path) -> str:
    name = section.tokenizer or section.path
    assert name is not None
    try:
        return name if name == "bytes" else local_or_hub(name, base_dir)
    except ConfigError as error:
        raise ConfigError(f"model.{'path' if section.tokenizer is None else 'tokenizer'}: {error}") from error


def read_model_config(section: ModelSection, base_dir: Path, *, vocab_size: int | None) -> ModelConfig | None:
    """Read the run's model configuration; None if it is on the hub and the hub is unreachable.

    `vocab_size`: of the tokenizer, for `init` without one. Registers the family if it has its own file. Raises
    ConfigError.
    """
    add_family(section, base_dir)
    if section.init is not None:
        fields = section.init if vocab_size is None else {"vocab_size": vocab_size, **section.init}
        try:
            return hf.config_from_init(fields)
        except ConfigError as error:
            raise ConfigError(f"model.init: {error}") from error
    assert section.path is not None
    file = _config_file(local_or_hub(section.path, base_dir))
    if file is None:
        return None
    try:
        fields = read_json(file)
    except ConfigError as error:
        raise ConfigError(f"model.path: {error}") from error
    try:
        return hf.config_from_hf(fields, long_context=section.long_context)
    except hf.NoLongContext as error:
        raise ConfigError(f"model.{error}") from error
    except ConfigError as error:
        raise ConfigError(f"model.path: {file}: {error}") from error


def add_family(section: ModelSection, base_dir: Path) -> None:
    """Register the model's family from `model.family`, if set."""
    if section.family is None:
        return
    try:
        hf.add_family(resolve_path(section.family, base_dir))
    except ConfigError as error:
        raise ConfigError(f"model.family: {error}") from error


def read_wrapper(section: ModelSection, base_dir: Path) -> hf.Wrapper | None:
    """Return the multimodal wrapper of the text model, if any; call after `read_model_config`."""
    assert section.path is not None
    file = _config_file(local_or_hub(section.path, base_dir))
    return None if file is None else hf.text_part(read_json(file))[1]


def _config_file(name: str) -> Path | None:
    folder = Path(name)
    if folder.exists():
        if not folder.is_dir():
            raise ConfigError(f"model.path: {folder} is a file; give the folder with config.json")
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
            f"give an existing folder, or check the id{did_you_mean_path(name)}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Identity of a stage's initial model, checked on resume: a checkpoint holds only trained parameters."""

    name: str
    """Folder, hub id, or `model.init`."""
    parts: Mapping[str, str]
    """Digest or value per part, such as files."""


def origin_of_folder(name: str, folder: Path) -> Origin:
    """Origin of a checkpoint folder: digests of its `config.json` and weights files."""
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    files = [folder / "config.json", *sorted(weights)]
    return Origin(name=name, parts={file.name: _digest(file) for file in files})


def origin_of_adapter(folder: Path) -> dict[str, str]:
    """Digests of an adapter's files."""
    return {file.name: _digest(file) for file in sorted(folder.glob("adapter_*")) if file.is_file()}


def origin_of_init(fields: Mapping[str, Any], seed: int) -> Origin:
    """Origin of random weights: config fields and seed."""
    parts = {name: json.dumps(value, sort_keys=True, default=str) for name, value in fields.items()}
    return Origin(name=RANDOM_WEIGHTS, parts={**parts, "seed": str(seed)})


def _digest(file: Path) -> str:
    """Digest of a whole file; for large weights of their size, header and sampled blocks."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as source:
        if file.suffix == ".json" or size <= SAMPLED_BLOCKS * BLOCK_BYTES:
            digest.update(source.read())
        else:
            digest.update(source.read(int.from_bytes(source.read(8), "little")))
            for block in range(SAMPLED_BLOCKS):
                source.seek((size - BLOCK_BYTES) * block // (SAMPLED_BLOCKS - 1))
                digest.update(source.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
