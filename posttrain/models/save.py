"""Checkpoints in Hugging Face layout, out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from safetensors.numpy import save_file

from posttrain.config import ConfigError
from posttrain.models import hf
from posttrain.models.decoder import Decoder
from posttrain.models.files import WEIGHTS, WEIGHTS_INDEX
from posttrain.models.lora import has_lora, merged
from posttrain.models.names import Tensor, tensors
from posttrain.models.weights import ModelWeights, Weights

MAX_SHARD_BYTES = 5 * 10**9
"""Size that no file of weights exceeds, unless one tensor does."""

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""What a folder may hold that `save_model` replaces."""

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@runtime_checkable
class SavedTokenizer(Protocol):
    """What `save_model` needs of a tokenizer."""

    @property
    def stop_ids(self) -> Sequence[int]: ...

    def save(self, path: str | Path) -> None: ...


def save_model(model: Decoder, path: str | Path, *, tokenizer: SavedTokenizer | None = None) -> None:
    """Write a folder that transformers loads, an adapter merged into its base; the folder appears whole or not at all.

    ConfigError where the folder holds something that no model folder has, which replacing it would lose.
    """
    target = Path(path).expanduser().resolve()
    _check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        if tokenizer is not None:
            tokenizer.save(new)
        config = hf.config_to_hf(model.config)
        config["dtype" if "dtype" in config else "torch_dtype"] = model.embed.embedding[...].dtype.name
        generation = {key: config[key] for key in SPECIAL_TOKENS if config.get(key) is not None}
        if tokenizer is not None and tokenizer.stop_ids:
            ids = list(tokenizer.stop_ids)
            generation["eos_token_id"] = ids[0] if len(ids) == 1 else ids
        # transformers fills in a family's usual ids where there are none.
        _write_json(new / "config.json", generation | config)
        _write_json(new / "generation_config.json", generation)
        _write_weights(new, merged(model) if has_lora(model) else model)
        if target.exists():
            target.rename(Path(temporary) / "old")
        new.rename(target)


def hf_tensors(model: Decoder) -> Iterator[tuple[str, np.ndarray]]:
    """The model's tensors under their Hugging Face names and in their layout, one after the other on the host.

    An adapter is not part of them: give `merged(model)`.
    """
    weights = ModelWeights(model).read()
    for tensor in _tensors(model):
        yield tensor.name, _to_host(weights, tensor)


def _tensors(model: Decoder) -> list[Tensor]:
    shapes = [shape for shape in ModelWeights(model).shapes() if ".lora_" not in shape[0]]
    return tensors(model.config, hf.family(model.config.model_type).NAMES, shapes)


def _to_host(weights: Weights, tensor: Tensor) -> np.ndarray:
    """The tensor as the checkpoint stores it."""
    values = {part.param: np.asarray(weights[part.param][part.index]) for part in tensor.parts}
    first = next(iter(values.values()))
    if len(values) == 1:
        joined = first
    else:
        stored = (*tensor.shape[:-2], *tensor.shape[:-3:-1]) if tensor.transpose else tensor.shape
        joined = np.empty(stored, first.dtype)
        for part in tensor.parts:
            joined[..., part.columns] = values[part.param]
    return np.ascontiguousarray(joined.swapaxes(-1, -2) if tensor.transpose else joined)


def _write_weights(folder: Path, model: Decoder) -> None:
    weights = ModelWeights(model).read()
    shards: list[list[Tensor]] = [[]]
    sizes = {t.name: t.size * weights[t.parts[0].param].dtype.itemsize for t in _tensors(model)}
    for tensor in _tensors(model):
        if shards[-1] and sum(sizes[t.name] for t in shards[-1]) + sizes[tensor.name] > MAX_SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = [WEIGHTS]
    for file, shard in zip(files, shards, strict=True):
        # transformers refuses a file without this entry.
        save_file({t.name: _to_host(weights, t) for t in shard}, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        places = {t.name: file for file, shard in zip(files, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        _write_json(folder / WEIGHTS_INDEX, index)


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"save_model: {target} is a file; give a folder")
    entries = sorted(target.iterdir())
    foreign = [e.name for e in entries if e.is_dir() or not any(e.match(pattern) for pattern in MODEL_FILES)]
    if foreign or (entries and not (target / "config.json").is_file()):
        names = ", ".join(foreign or [e.name for e in entries])
        raise ConfigError(f"save_model: {target} is not a model's folder, it holds {names}; give a new or empty folder")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
