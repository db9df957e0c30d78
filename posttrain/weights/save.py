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
from posttrain.runtime import processes
from posttrain.runtime.files import check_local, file_digest, whole_folder
from posttrain.weights.files import DIGESTS, GENERATION, WEIGHTS, WEIGHTS_INDEX
from posttrain.weights.lora import base_tensors
from posttrain.weights.pieces import Gather
from posttrain.weights.quantize import plain_arrays
from posttrain.weights.state import ModelWeights, is_quantized
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
    """Save a folder that transformers loads, with the adapter merged into its base; written atomically. Of a model with
    a block drafter, which it was frozen beside, the drafter alone.

    All processes of a run must call it: the first one writes what the others help to gather. Quantized matrices are
    dequantized to the dtype that the model was loaded in.

    Raises ConfigError if the folder has files that no model folder has, which replacing it would lose.
    """
    if model.drafter is not None:
        from posttrain.weights.drafter import save_drafter

        save_drafter(model, path)
        return
    files = _Files(model)
    if not processes.writes():
        files.gather()
        return
    target = Path(check_local(path)).expanduser().resolve()
    _check_replaceable(target)
    with whole_folder(target) as new:
        for name, text in () if model.config.vision is None else model.config.vision.files:
            (new / name).write_text(text, encoding="utf-8")
        # A run's tokenizer has the processor's files with the settings of the run.
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
        files.write(new)
        _write_json(new / DIGESTS, {file.name: file_digest(file) for file in sorted(new.glob("*.safetensors"))})


def hf_tensors(model: Decoder) -> Iterator[tuple[str, np.ndarray]]:
    """Iterate over the model's tensors with Hugging Face names and layout, one at a time on the host.

    Adapters are not included: pass `merged(model)`. Raises ConfigError for a quantized model.
    """
    if is_quantized(model):
        raise ConfigError("hf_tensors: the model is quantized; give merged(model)")
    gather = Gather(ModelWeights(model).read())
    for tensor in base_tensors(model):
        yield hf.stored_name(model.config, tensor.name), gather.tensor(tensor)


class _Files:
    """Weights files of a model, of which the host holds one tensor at a time, in the same order in every process."""

    def __init__(self, model: Decoder) -> None:
        weights = plain_arrays(model)
        self._gather = Gather(weights)
        self._tensors = {hf.stored_name(model.config, tensor.name): tensor for tensor in base_tensors(model)}
        self._shards: list[list[Outline]] = [[]]
        for name, tensor in self._tensors.items():
            outline = Outline(name, weights[tensor.parts[0].param].dtype, tensor.shape)
            if self._shards[-1] and sum(o.nbytes for o in self._shards[-1]) + outline.nbytes > MAX_SHARD_BYTES:
                self._shards.append([])
            self._shards[-1].append(outline)
        for shard in self._shards:
            # Readers map the file into memory, where values must be aligned to their size.
            shard.sort(key=lambda outline: -outline.dtype.itemsize)

    def gather(self) -> None:
        """Take part in the gathers of the process that writes."""
        for shard in self._shards:
            for _ in self._arrays(shard):
                pass

    def write(self, folder: Path) -> None:
        count = len(self._shards)
        names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for name, shard in zip(names, self._shards, strict=True):
            write_tensors(folder / name, shard, self._arrays(shard))
        if count > 1:
            places = {o.name: name for name, shard in zip(names, self._shards, strict=True) for o in shard}
            size = sum(outline.nbytes for shard in self._shards for outline in shard)
            _write_json(folder / WEIGHTS_INDEX, {"metadata": {"total_size": size}, "weight_map": places})

    def _arrays(self, shard: Sequence[Outline]) -> Iterator[np.ndarray]:
        return (self._gather.tensor(self._tensors[outline.name]) for outline in shard)


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
