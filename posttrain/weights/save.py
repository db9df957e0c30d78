"""Saving models as checkpoints in Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from posttrain.errors import ConfigError
from posttrain.models import hf
from posttrain.models.decoder import Decoder
from posttrain.runtime.files import whole_folder
from posttrain.weights.files import GENERATION, WEIGHTS, WEIGHTS_INDEX
from posttrain.weights.lora import base_tensors
from posttrain.weights.pieces import Gather
from posttrain.weights.quantize import is_quantized, plain_arrays
from posttrain.weights.state import ModelWeights
from posttrain.weights.tensor_file import Outline, write_tensors

MAX_SHARD_BYTES = 5 * 10**9
"""Maximum size of a weights file, unless one tensor exceeds it."""

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Files that `save_model` may replace."""
MODEL_FOLDERS = ("additional_chat_templates",)

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@runtime_checkable
class SavedTokenizer(Protocol):
    """Tokenizer interface used by `save_model`."""

    @property
    def stop_ids(self) -> Sequence[int]: ...

    def save(self, path: str | Path) -> None: ...


def save_model(model: Decoder, path: str | Path, *, tokenizer: SavedTokenizer | None = None) -> None:
    """Save a folder that transformers loads, with the adapter merged into its base; written atomically.

    Quantized matrices are dequantized to the dtype that the model was loaded in.

    Raises ConfigError if the folder has files that no model folder has, which replacing it would lose.
    """
    target = Path(path).expanduser().resolve()
    _check_replaceable(target)
    with whole_folder(target) as new:
        if tokenizer is not None:
            tokenizer.save(new)
        config = hf.config_to_hf(model.config)
        config["dtype" if "dtype" in config else "torch_dtype"] = model.embed.embedding[...].dtype.name
        ids = {key: config[key] for key in SPECIAL_TOKENS if config.get(key) is not None}
        generation = ids | json.loads(model.config.generation_json)
        # This flag makes transformers use the values of config.json instead.
        generation.pop("_from_model_config", None)
        if tokenizer is not None and tokenizer.stop_ids:
            stops = list(tokenizer.stop_ids)
            generation["eos_token_id"] = stops[0] if len(stops) == 1 else stops
        # transformers fills in a family's default ids for absent ones.
        _write_json(new / "config.json", {key: generation[key] for key in SPECIAL_TOKENS if key in generation} | config)
        _write_json(new / GENERATION, generation)
        _write_weights(new, model)


def hf_tensors(model: Decoder) -> Iterator[tuple[str, np.ndarray]]:
    """Iterate over the model's tensors with Hugging Face names and layout, one at a time on the host.

    Adapters are not included: pass `merged(model)`. Raises ConfigError for a quantized model.
    """
    if is_quantized(model):
        raise ConfigError("hf_tensors: the model is quantized; give merged(model)")
    gather = Gather(ModelWeights(model).read())
    for tensor in base_tensors(model):
        yield tensor.name, gather.tensor(tensor)


def _write_weights(folder: Path, model: Decoder) -> None:
    """Write weights files, holding one tensor at a time on the host."""
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
        # Readers map the file into memory, where values must be aligned to their size.
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
        raise ConfigError(
            f"save_model: {target} is not a model folder, it contains {names}; give a new or empty folder"
        )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
