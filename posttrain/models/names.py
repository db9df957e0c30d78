"""The names of tensors in Hugging Face checkpoints, and where each stands in our stacked parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from posttrain.models.config import ModelConfig


@dataclass(frozen=True)
class Name:
    """A tensor's name in the checkpoint; `{layer}` and `{expert}` are indices."""

    hf: str
    transpose: bool = False
    """Stored as [out, in], where ours is [in, out]."""
    fused: tuple[str, ...] = ()
    """Our parameters that the tensor holds along its output dimension, in order; empty: this one alone."""
    alternating: bool = False
    """The fused parameters take turns along the output dimension, instead of following one another."""


Names = Mapping[str, Name]
"""Our parameter path, within its block for what a block holds -> the tensor's name."""


def linear(path: str, hf: str) -> dict[str, Name]:
    return {f"{path}.kernel": Name(f"{hf}.weight", transpose=True), f"{path}.bias": Name(f"{hf}.bias")}


def fused(hf: str, *paths: str) -> dict[str, Name]:
    """Linear layers that are one in the checkpoint."""
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
class Part:
    """What a tensor of a checkpoint gives to one of our parameters."""

    param: str
    """Our dotted path."""
    index: tuple[int, ...]
    """Place in the parameter's leading dimensions: (), (repeat,) or (repeat, expert)."""
    columns: slice
    """Of the tensor's output dimension."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a checkpoint, and the parts of our stacked parameters that it holds."""

    name: str
    shape: tuple[int, ...]
    """As stored in the checkpoint."""
    transpose: bool
    """The last two dimensions are stored the other way round."""
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


_BLOCK_PATH = re.compile(r"stages\.(\d+)\.blocks\.(\d+)\.(.+)")


def tensors(
    config: ModelConfig, names: Names, params: Iterable[tuple[str, tuple[str, ...], tuple[int, ...]]]
) -> list[Tensor]:
    """The checkpoint's tensors behind our parameters (path, names of dimensions, shape), in the same order."""
    shapes = {path: shape for path, _, shape in params}
    found: dict[str, Tensor] = {}
    for path, dims, shape in params:
        prefix, key, layers = _layers(config, path)
        name = names[key]
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
            tensor = Tensor(
                name=name.hf.format(**values),
                shape=(*stored[:-2], stored[-1], stored[-2]) if name.transpose else stored,
                transpose=name.transpose,
                parts=(Part(param=path, index=index, columns=columns),),
            )
            if earlier := found.get(tensor.name):
                tensor = Tensor(**{**vars(earlier), "parts": earlier.parts + tensor.parts})
            found[tensor.name] = tensor
    return list(found.values())


def _lead(dims: tuple[str, ...], name: Name) -> tuple[str, ...]:
    """The leading dimensions that the checkpoint has one tensor each for."""
    lead = dims[:1] if dims[0] == "layers" else ()
    return (*lead, "expert") if "{expert}" in name.hf else lead


def _indices(
    layers: range, sizes: tuple[int, ...], lead: tuple[str, ...]
) -> Iterable[tuple[tuple[int, ...], dict[str, int]]]:
    """Places in the leading dimensions, and what to put into the name for each."""
    if not lead:
        return [((), {})]
    if len(lead) == 1:
        return [((i,), {"layer": layer}) for i, layer in enumerate(layers)]
    return [
        ((i, expert), {"layer": layer, "expert": expert})
        for i, layer in enumerate(layers)
        for expert in range(sizes[1])
    ]


def _layers(config: ModelConfig, path: str) -> tuple[str, str, range]:
    """What stands before the block's own part of a path, that part, and the layers that the parameter holds."""
    match = _BLOCK_PATH.fullmatch(path)
    if match is None:
        return "", path, range(1)
    stage, block = int(match[1]), int(match[2])
    first = sum(s.num_layers for s in config.stages[:stage]) + block
    period, repeats = len(config.stages[stage].blocks), config.stages[stage].repeats
    return path[: -len(match[3])], match[3], range(first, first + period * repeats, period)
