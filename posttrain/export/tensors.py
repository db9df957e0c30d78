"""Comparison of written tensors with the source checkpoint, by safetensors and numpy alone, without our name tables."""

# What was not trained must be there under the name, in the shape and with the bytes that it came with; what has an
# adapter must be the source with PEFT's rule applied, W + scale B A.

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.export.readers import ProofError

PACKED = re.compile(r"(.*)(_blocks|_scales|_scale_inv)$")
"""Parts of quantised tensors, whose shapes differ from the written tensors."""
NOT_WRITTEN = re.compile(r".*rotary_emb\.inv_freq$")
WIDTH = {"F32": 4, "F16": 2, "BF16": 2}
MERGED_TOLERANCE = {"F32": 1e-5, "F16": 2e-3, "BF16": 1.6e-2}
"""Relative tolerance of a merged matrix by dtype: summation order and rounding."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    file: Path
    offset: int
    kind: str
    shape: tuple[int, ...]

    def content(self) -> bytes:
        with self.file.open("rb") as opened:
            opened.seek(self.offset)
            return opened.read(math.prod(self.shape) * WIDTH[self.kind])

    def values(self) -> np.ndarray:
        """In float32."""
        raw = np.frombuffer(self.content(), {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[self.kind])
        wide = (raw.astype(np.uint32) << 16).view(np.float32) if self.kind == "BF16" else raw.astype(np.float32)
        return wide.reshape(self.shape)


def stored(folder: Path) -> dict[str, Stored]:
    """The headers of all files of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start = 8 + length + entry["data_offsets"][0]
            found[name] = Stored(file=file, offset=start, kind=entry["dtype"], shape=tuple(entry["shape"]))
    return found


def compare_with_source(folder: Path, source: Path, adapter: Path | None, *, trained: bool) -> str:
    """Compare tensors with the source and describe the result. `adapter`: merged PEFT files. `trained`: all changed.

    ProofError for a tensor that is missing, left over, misshapen, changed though nothing trained it, or not its source
    with the adapter added.
    """
    ours, theirs = stored(folder), _expected(source, folder)
    # What an adapter saves whole replaces the source's.
    saved = {} if adapter is None else {_saved_name(n): t for n, t in stored(adapter).items() if ".lora_" not in n}
    theirs |= {name: tensor for name, tensor in saved.items() if name in theirs}
    faults = [f"{name} is missing" for name in sorted(theirs.keys() - ours.keys())]
    faults += [f"{name} is not in the source" for name in sorted(ours.keys() - theirs.keys() - {"score.weight"})]
    both = sorted(ours.keys() & theirs.keys())
    same = [name for name in both if theirs[name] is not None]
    faults += [
        f"{name} has the shape {list(ours[name].shape)}, its source {list(other.shape)}"
        for name in same
        if (other := theirs[name]) is not None and ours[name].shape != other.shape
    ]
    if faults:
        raise ProofError(f"{folder}: {len(faults)} tensors are not those of {source}: {'; '.join(faults)}")
    if trained:
        return f"{len(both)} tensors have the names and shapes of the source"
    deltas = {} if adapter is None else dict(_deltas(adapter, ours))
    added = 0
    for name in same:
        other = theirs[name]
        assert other is not None
        delta = deltas.pop(name.removesuffix(".weight"), None)
        if delta is None and ours[name].kind == other.kind and ours[name].content() != other.content():
            faults.append(f"{name} is changed, though nothing trained it")
        elif delta is not None:
            added += 1
            expected, tolerance = other.values() + delta, MERGED_TOLERANCE[ours[name].kind]
            if not np.abs(ours[name].values() - expected).max() <= tolerance * np.abs(expected).max():
                faults.append(f"{name} is not the source's with the adapter added")
    there = {name.removesuffix(".weight") for name in theirs}
    faults += [f"{name}, which the adapter changes, is not there" for name in sorted(deltas.keys() - there)]
    if faults:
        raise ProofError(f"{folder}: {'; '.join(faults)}")
    return (
        f"{len(both)} tensors have the names and shapes of the source; {added} are it with the adapter added by numpy"
    )


def _expected(source: Path, folder: Path) -> dict[str, Stored | None]:
    """Tensors that must be written; None: of a shape that depends on quantised parts."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found: dict[str, Stored | None] = {}
    for name, tensor in stored(source).items():
        packed = PACKED.match(name)
        if packed:
            found[packed[1]] = None
        elif not NOT_WRITTEN.match(name) and found.get(name, tensor) is not None:
            found[name] = None if tensor.kind not in WIDTH else tensor
    layers = config.get("num_hidden_layers", math.inf)
    found = {n: t for n, t in found.items() if not (m := re.search(r"\.layers\.(\d+)\.", n)) or int(m[1]) < layers}
    scores = any("SequenceClassification" in name for name in config.get("architectures") or [])
    if config.get("tie_word_embeddings") or scores:
        found.pop("lm_head.weight", None)
    return found


def _saved_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _deltas(adapter: Path, written: Mapping[str, Stored]) -> Iterator[tuple[str, np.ndarray]]:
    """PEFT's change of each module's weight [out, in]: scale B A, the scale by its patterns."""
    config: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    targets = tuple(f".{target}" for target in config.get("target_parameters") or ())
    tensors = stored(adapter)
    for name, a in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_(embedding_)?A(\.weight)?", name)
        if match is None:
            continue
        b = tensors[name.replace("lora_embedding_A", "lora_embedding_B").replace("lora_A", "lora_B")]
        module = match[1].replace(".base_layer", "")
        if targets and module.endswith(".experts"):
            # The adapter of a module's last parameter is stored as that of the module, those before it within.
            found = [p for p in ("gate_up_proj", "down_proj") if f".{module}.{p}".endswith(targets)]
            param = f"{module}.{found[len(found) - 1 - match[1].count('.base_layer')]}"
            yield from _expert_deltas(param, a.values(), b.values(), config, written)
            continue
        named = f"{module}.weight" if f".{module}.weight".endswith(targets) else module
        if f"{module}.weight" not in written:
            # A router of Mixtral has another name in transformers.
            module = module.replace(".mlp.", ".block_sparse_moe.")
        delta = _scale(config, named, a.shape[0]) * (b.values() @ a.values())
        yield module, delta.T if match[2] else delta


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    patterns = config.get("alpha_pattern") or {}
    alpha = next((patterns[p] for p in patterns if re.fullmatch(rf"(.*\.)?({p})", name)), config["lora_alpha"])
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _expert_deltas(
    param: str, a: np.ndarray, b: np.ndarray, config: Mapping[str, Any], written: Mapping[str, Stored]
) -> Iterator[tuple[str, np.ndarray]]:
    """Adapter deltas of all experts of a layer, stored as one tensor or one by one."""
    stem = param.rpartition(".")[0]
    stem = stem if any(name.startswith(stem) for name in written) else stem.replace(".mlp.", ".block_sparse_moe.")
    kinds = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
    words = next((w for w in kinds[param.rpartition(".")[2]] if f"{stem}.0.{w[0]}.weight" in written), None)
    if words is None:
        num = written[param].shape[0]
    else:
        num = sum(re.fullmatch(rf"{re.escape(stem)}\.\d+\.{words[0]}\.weight", name) is not None for name in written)
    a, b = a.reshape(num, -1, a.shape[-1]), b.reshape(b.shape[0], -1, num)
    deltas = _scale(config, param, a.shape[1]) * np.einsum("ore,eri->eoi", b, a)
    if words is None:
        # Of gpt-oss alone the matrices are [in, out].
        yield param, deltas.swapaxes(1, 2) if f"{param}_bias" in written else deltas
    for expert, delta in enumerate(deltas if words is not None else ()):
        for word, part in zip(words or (), np.split(delta, len(words or "1")), strict=True):
            yield f"{stem}.{expert}.{word}", part
