"""CheckpointTensor names of Hugging Face checkpoints and their location in our stacked parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from posttrain.models.config import ModelConfig


@dataclass(frozen=True)
class Name:
    """CheckpointTensor name in the checkpoint; `{layer}` and `{expert}` are indices."""

    hf: str
    transpose: bool = False
    """Stored as [out, in]; ours is [in, out]."""
    fused: tuple[str, ...] = ()
    """Our parameters fused in the tensor along its output dimension, in order; empty: only this one."""
    alternating: bool = False
    """Fused parameters are interleaved along the output dimension instead of concatenated."""


Names = Mapping[str, Name]
"""Parameter path (within its block for block parameters) -> tensor name."""


def linear(path: str, hf: str) -> dict[str, Name]:
    return {f"{path}.kernel": Name(f"{hf}.weight", transpose=True), f"{path}.bias": Name(f"{hf}.bias")}


def fused(hf: str, *paths: str) -> dict[str, Name]:
    """Names of linear layers that are fused in the checkpoint."""
    kernels, biases = (tuple(f"{path}.{kind}" for path in paths) for kind in ("kernel", "bias"))
    return {path: Name(f"{hf}.weight", transpose=True, fused=kernels) for path in kernels} | {
        path: Name(f"{hf}.bias", fused=biases) for path in biases
    }


LAYER = "model.layers.{layer}"

DECODER_NAMES: Names = {
    "embed.embedding": Name("model.embed_tokens.weight"),
    "attention_norm.scale": Name(f"{LAYER}.input_layernorm.weight"),
    **linear("attention.q", f"{LAYER}.self_attn.q_proj"),
    **linear("attention.k", f"{LAYER}.self_attn.k_proj"),
    **linear("attention.v", f"{LAYER}.self_attn.v_proj"),
    **linear("attention.o", f"{LAYER}.self_attn.o_proj"),
    "attention.q_norm.scale": Name(f"{LAYER}.self_attn.q_norm.weight"),
    "attention.k_norm.scale": Name(f"{LAYER}.self_attn.k_norm.weight"),
    "mlp_norm.scale": Name(f"{LAYER}.post_attention_layernorm.weight"),
    **linear("mlp.gate", f"{LAYER}.mlp.gate_proj"),
    **linear("mlp.up", f"{LAYER}.mlp.up_proj"),
    **linear("mlp.down", f"{LAYER}.mlp.down_proj"),
    "final_norm.scale": Name("model.norm.weight"),
    "head.kernel": Name("lm_head.weight", transpose=True),
    "score.kernel": Name("score.weight", transpose=True),
}
"""Names of a Llama-like decoder."""


@dataclass(frozen=True, kw_only=True)
class ParamSlice:
    """Slice of a checkpoint tensor that belongs to one of our parameters."""

    param: str
    """Our dotted path."""
    index: tuple[int, ...]
    """Index into the parameter's leading dimensions: (), (repeat,) or (repeat, expert)."""
    columns: slice
    """Columns of the tensor's output dimension."""
    fill: float | None = None
    """Value of all its elements in place of the tensor's; None: the tensor's."""


@dataclass(frozen=True, kw_only=True)
class CheckpointTensor:
    """Checkpoint tensor with the slices of our stacked parameters that it holds."""

    name: str
    shape: tuple[int, ...]
    """Shape as stored in the checkpoint."""
    transpose: bool
    """Last two dimensions are swapped in the checkpoint."""
    parts: tuple[ParamSlice, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


TOWER = "tower."
"""Beginning of the paths of the vision tower's parameters, which are stored as in the checkpoint."""

_BLOCK_PATH = re.compile(r"stages\.(\d+)\.blocks\.(\d+)\.(.+)")


def tensors(
    config: ModelConfig,
    names: Names,
    params: Iterable[tuple[str, tuple[str, ...], tuple[int, ...]]],
    sources: Sequence[int] | None = None,
) -> list[CheckpointTensor]:
    """List the checkpoint tensors of our parameters (path, dimension names, shape), in the same order.

    `sources`: layer of the checkpoint from which each layer is read; by default its own.
    """
    shapes = {path: shape for path, _, shape in params}
    tower = {} if config.vision is None else {f"{TOWER}{key}": t for key, t in config.vision.tensors().items()}
    by_name: dict[str, CheckpointTensor] = {}
    for path, dims, shape in params:
        prefix, key, stacked = layers_of(config, path)
        layers = [sources[layer] for layer in stacked] if sources is not None and prefix else stacked
        name = Name(tower[path].name) if path in tower else names[key]
        fused = [prefix + other for other in name.fused or (key,)]
        stop = sum(shapes[other][-1] for other in fused)
        if name.alternating:
            columns = slice(fused.index(path), stop, len(fused))
        else:
            start = sum(shapes[other][-1] for other in fused[: fused.index(path)])
            columns = slice(start, start + shape[-1])
        lead = _lead(dims, name)
        for index, values in _indices(layers, shape[: len(lead)], lead):
            stored = (*shape[len(lead) : -1], stop)
            if path in tower and not tower[path].shape:
                stored = ()  # a number, which is a vector of one here
            tensor = CheckpointTensor(
                name=name.hf.format(**values),
                shape=(*stored[:-2], stored[-1], stored[-2]) if name.transpose else stored,
                transpose=name.transpose,
                parts=(ParamSlice(param=path, index=index, columns=columns),),
            )
            if earlier := by_name.get(tensor.name):
                tensor = CheckpointTensor(**{**vars(earlier), "parts": earlier.parts + tensor.parts})
            by_name[tensor.name] = tensor
    return list(by_name.values())


def _lead(dims: tuple[str, ...], name: Name) -> tuple[str, ...]:
    """Leading dimensions with one checkpoint tensor per index."""
    lead = dims[:1] if dims[0] == "layers" else ()
    return (*lead, "expert") if "{expert}" in name.hf else lead


def _indices(
    layers: Sequence[int], sizes: tuple[int, ...], lead: tuple[str, ...]
) -> Iterable[tuple[tuple[int, ...], dict[str, int]]]:
    """Indices into the leading dimensions with the values to format into the name."""
    if not lead:
        return [((), {})]
    if len(lead) == 1:
        return [((i,), {"layer": layer}) for i, layer in enumerate(layers)]
    return [
        ((i, expert), {"layer": layer, "expert": expert})
        for i, layer in enumerate(layers)
        for expert in range(sizes[1])
    ]


def layers_of(config: ModelConfig, path: str) -> tuple[str, str, range]:
    """Split a path into its block prefix and the rest, with the layers that the parameter stacks."""
    match = _BLOCK_PATH.fullmatch(path)
    if match is None:
        depth = config.vision.depth if config.vision is not None and path.startswith(f"{TOWER}layers.") else 1
        return "", path, range(depth)
    stage, block = int(match[1]), int(match[2])
    first = sum(s.num_layers for s in config.stages[:stage]) + block
    period, repeats = len(config.stages[stage].blocks), config.stages[stage].repeats
    return path[: -len(match[3])], match[3], range(first, first + period * repeats, period)
