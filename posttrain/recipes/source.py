"""The configuration's model before its weights: where it lies, and what its `config.json` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.config import ConfigError, ModelSection
from posttrain.config_file import resolve_path
from posttrain.data.hub import hub_is_reachable, is_hub_id
from posttrain.models import hf
from posttrain.models.config import ModelConfig


def local_or_hub(name: str, base_dir: Path) -> str:
    """The folder that the configuration means, or the hub id as it stands."""
    found = None if is_hub_id(name) and not path_exists(name, base_dir) else resolve_path(name, base_dir)
    return name if found is None else str(found)


def path_exists(name: str, base_dir: Path) -> bool:
    try:
        resolve_path(name, base_dir)
    except ConfigError:
        return False
    return True


def tokenizer_name(section: ModelSection, base_dir: Path) -> str:
    name = section.tokenizer or section.path
    assert name is not None
    return name if name == "bytes" else local_or_hub(name, base_dir)


def read_model_config(section: ModelSection, base_dir: Path, *, vocab_size: int | None) -> ModelConfig | None:
    """The description of the run's model; None where only the hub has it and the hub cannot be asked.

    `vocab_size`: of the tokenizer, for `init` without one. ConfigError where the description cannot be read.
    """
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
        read: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"model.path: {file}: no such file; give the folder of a checkpoint in Hugging Face layout"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {file}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"model.path: {file}: must hold a JSON object")
    try:
        return hf.config_from_hf(read)
    except ConfigError as error:
        raise ConfigError(f"model.path: {file}: {error}") from error


def _config_file(name: str) -> Path | None:
    folder = Path(name)
    if folder.exists():
        if not folder.is_dir():
            raise ConfigError(f"model.path: {folder} is a file; give the folder that holds config.json")
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
            f"model.path: {name} is no local folder, and the Hugging Face hub has no config.json of it ({reason}); "
            "give an existing folder, or check the id"
        ) from error
