"""The files of a checkpoint in Hugging Face layout: where they are, and what is in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from posttrain.config import ConfigError
from posttrain.models.config import ModelConfig
from posttrain.models.names import Names, Part, Tensor

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"


def find_folder(path: str | Path) -> Path:
    """The folder of a checkpoint: a local one, or a hub repository's, downloaded once."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"model {path}: is a file; give the folder that holds config.json")
    if isinstance(path, Path) or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigError(f"model {path}: there is no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"model {path}: is no local folder, and the Hugging Face hub did not give it ({reason}); give an existing "
            "folder, or check the id and the network"
        ) from error


class Checkpoint:
    """The open safetensors files of a folder. `text_name`: our part's own name of a tensor, None: not our part."""

    def __init__(self, folder: Path, stack: ExitStack, text_name: Callable[[str], str | None] = lambda name: name):
        self._folder = folder
        self._tensors: dict[str, tuple[Any, str]] = {}
        for file in _weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(file, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{file}: is damaged or incomplete ({error}); copy it anew") from error
            for stored in handle.keys():
                name = text_name(stored)
                if name is not None:
                    self._tensors[name] = handle, stored

    @property
    def dtype(self) -> np.dtype:
        """bfloat16 where every tensor is, else float32, which holds the rest exactly."""
        kinds = {file.get_slice(stored).get_dtype() for file, stored in self._tensors.values()}
        if unknown := kinds - {"F32", "F16", "BF16"}:
            raise ConfigError(f"{self._folder}: tensors of type {', '.join(sorted(unknown))} are not supported")
        return jnp.dtype(jnp.bfloat16 if kinds == {"BF16"} else jnp.float32)

    def check(self, tensors: Sequence[Tensor], config: ModelConfig, names: Names) -> None:
        """One ConfigError with every tensor that is missing, unknown or of another shape."""
        expected = {tensor.name: tensor for tensor in tensors}
        extra = {name for name in self._tensors if name not in expected and not name.endswith("rotary_emb.inv_freq")}
        faults = [f"missing {name}" for name in expected if name not in self._tensors]
        if config.tie_embeddings:
            embedding, head = names["embed.embedding"].hf, names["head.kernel"].hf
            if head in extra and embedding in self._tensors:
                extra.remove(head)
                if not np.array_equal(self._get(head), self._get(embedding)):
                    faults.append(f"{head} differs from {embedding}, although tie_word_embeddings is true")
        faults += [f"unknown {name}" for name in sorted(extra)]
        for name, tensor in expected.items():
            if name in self._tensors:
                file, stored = self._tensors[name]
                shape = tuple(file.get_slice(stored).get_shape())
                if shape != tensor.shape:
                    faults.append(f"{name} is {shape}, config.json says {tensor.shape}")
        if faults:
            raise ConfigError(f"{self._folder}: the tensors do not fit config.json: {'; '.join(faults)}")

    def read(self, tensor: Tensor, part: Part) -> np.ndarray:
        """What a tensor gives to one of our parameters, in our layout."""
        array = self._get(tensor.name)
        return (array.swapaxes(-1, -2) if tensor.transpose else array)[..., part.columns]

    def _get(self, name: str) -> np.ndarray:
        file, stored = self._tensors[name]
        return file.get_tensor(stored)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / WEIGHTS_INDEX
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise ConfigError(f"{index}: must have weight_map, the file of each tensor")
        files = [folder / name for name in sorted(set(names.values()))]
    else:
        raise ConfigError(f"{folder}: has neither {WEIGHTS} nor {WEIGHTS_INDEX}")
    if absent := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{folder}: {', '.join(absent)} of {index.name} not there")
    return files


def read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; give the folder of a checkpoint in Hugging Face layout") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is no JSON ({error})") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return read
