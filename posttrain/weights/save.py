"""Checkpoints in Hugging Face layout, out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from posttrain.errors import ConfigError
from posttrain.models import hf
from posttrain.models.decoder import Decoder
from posttrain.weights.files import GENERATION, WEIGHTS, WEIGHTS_INDEX
from posttrain.weights.lora import base_tensors
from posttrain.weights.pieces import Gather
from posttrain.weights.quantize import is_quantized, plain_arrays
from posttrain.weights.state import ModelWeights
from posttrain.weights.tensor_file import Outline, write_tensors

MAX_SHARD_BYTES = 5 * 10**9
"""Size that no file of weights exceeds, unless one tensor does."""

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""What a folder may hold that `save_model` replaces."""
MODEL_FOLDERS = ("additional_chat_templates",)

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@runtime_checkable
class SavedTokenizer(Protocol):
    """What `save_model` needs of a tokenizer."""

    @property
    def stop_ids(self) -> Sequence[int]: ...

    def save(self, path: str | Path) -> None: ...


def save_model(model: Decoder, path: str | Path, *, tokenizer: SavedTokenizer | None = None) -> None:
    """Write a folder that transformers loads, an adapter merged into its base; the folder appears whole or not at all.

    Quantised matrices are written as what the model computes with: plain ones in the type that it was loaded in.

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
        ids = {key: config[key] for key in SPECIAL_TOKENS if config.get(key) is not None}
        generation = ids | json.loads(model.config.generation_json)
        # It tells transformers to take the values of config.json instead.
        generation.pop("_from_model_config", None)
        if tokenizer is not None and tokenizer.stop_ids:
            stops = list(tokenizer.stop_ids)
            generation["eos_token_id"] = stops[0] if len(stops) == 1 else stops
        # transformers fills in a family's usual ids where there are none.
        _write_json(new / "config.json", {key: generation[key] for key in SPECIAL_TOKENS if key in generation} | config)
        _write_json(new / GENERATION, generation)
        _write_weights(new, model)
        if target.exists():
            target.rename(Path(temporary) / "old")
        new.rename(target)


def hf_tensors(model: Decoder) -> Iterator[tuple[str, np.ndarray]]:
    """The model's tensors under their Hugging Face names and in their layout, one after the other on the host.

    An adapter is not part of them: give `merged(model)`. ConfigError for a quantised model.
    """
    if is_quantized(model):
        raise ConfigError("hf_tensors: the model is quantized; give merged(model)")
    gather = Gather(ModelWeights(model).read())
    for tensor in base_tensors(model):
        yield tensor.name, gather.tensor(tensor)


def _write_weights(folder: Path, model: Decoder) -> None:
    """Files of weights, of which the host holds one tensor at a time."""
    weights = plain_arrays(model)
    gather = Gather(weights)
    stored = {t.name: (t, Outline(t.name, weights[t.parts[0].param].dtype, t.shape)) for t in base_tensors(model)}
    shards: list[list[Outline]] = [[]]
    for _, outline in stored.values():
        if shards[-1] and sum(o.nbytes for o in shards[-1]) + outline.nbytes > MAX_SHARD_BYTES:
            shards.append([])
        shards[-1].append(outline)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = [WEIGHTS]
    for file, shard in zip(files, shards, strict=True):
        # Readers map the file into memory, where a number must stand at a multiple of its size.
        shard.sort(key=lambda outline: -outline.dtype.itemsize)
        write_tensors(folder / file, shard, (gather.tensor(stored[o.name][0]) for o in shard))
    if len(shards) > 1:
        places = {o.name: file for file, shard in zip(files, shards, strict=True) for o in shard}
        size = sum(outline.nbytes for _, outline in stored.values())
        _write_json(folder / WEIGHTS_INDEX, {"metadata": {"total_size": size}, "weight_map": places})


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"save_model: {target} is a file; give a folder")
    entries = sorted(target.iterdir())
    foreign = [e.name for e in entries if not any(e.match(p) for p in (MODEL_FOLDERS if e.is_dir() else MODEL_FILES))]
    if foreign or (entries and not (target / "config.json").is_file()):
        names = ", ".join(foreign or [e.name for e in entries])
        raise ConfigError(f"save_model: {target} is not a model's folder, it holds {names}; give a new or empty folder")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
