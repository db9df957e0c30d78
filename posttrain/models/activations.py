"""Activations: the sharding of the residual stream, and taps that collect what layers compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from posttrain.mesh import HEAD_AXIS, TOKEN_AXIS, row_axes, row_shards
from posttrain.models.config import BlockConfig

Axes = tuple[str, ...]
SPLIT: Axes = (TOKEN_AXIS, HEAD_AXIS)
"""Mesh axes of tokens in the residual stream (sequence parallelism, arXiv:2205.05198): sums over `tensor` become a
reduce-scatter, inputs of products an all-gather."""
GATHERED: Axes = (TOKEN_AXIS,)
"""Inputs of products whose outputs `tensor` splits, and gradients of what such products add up to."""


def split_tokens(x: Float[Array, "B T D"], mesh: Mesh | None) -> Float[Array, "B T D"]:
    """Outputs of a layer in the residual stream: tokens over `context` and, where they divide, `tensor`."""
    return _laid_out(x, mesh, SPLIT, GATHERED)


def product_inputs(x: Float[Array, "B T D"], mesh: Mesh | None) -> Float[Array, "B T D"]:
    """Inputs of a layer: tokens over `context` only."""
    return _laid_out(x, mesh, GATHERED, SPLIT)


def whole_rows(x: Float[Array, "B T D"], mesh: Mesh | None) -> Float[Array, "B T D"]:
    """Hidden states of whole rows on each device."""
    return _laid_out(x, mesh, (), SPLIT)


def _laid_out(x: Array, mesh: Mesh | None, forward: Axes, backward: Axes) -> Array:
    """Unchanged on a mesh that splits no tokens, and where its axes do not divide the rows."""
    if mesh is None or x.shape[0] % row_shards(mesh) or all(mesh.shape[axis] == 1 for axis in SPLIT):
        return x
    return _with_gradient(x, mesh, forward, backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _with_gradient(x: Array, mesh: Mesh, forward: Axes, backward: Axes) -> Array:
    """Layouts of values and gradients differ: one that is given by the other's would move weights or hidden widths."""
    return _constrained(x, mesh, forward)


def _forward(x: Array, mesh: Mesh, forward: Axes, backward: Axes) -> tuple[Array, None]:
    return _constrained(x, mesh, forward), None


def _backward(mesh: Mesh, forward: Axes, backward: Axes, saved: None, gradient: Array) -> tuple[Array]:
    return (_constrained(gradient, mesh, backward),)


_with_gradient.defvjp(_forward, _backward)


def _constrained(x: Array, mesh: Mesh, axes: Axes) -> Array:
    while axes and x.shape[1] % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(row_axes(mesh), axes)))


HIDDEN = "hidden"

TapArrays = dict[str, Array]
"""Activations [B, T, W] of one layer by name: `HIDDEN`, the layer's output; `q`, `k` and `v`, projections after their
norms and before RoPE, all heads concatenated."""

Features = dict[int, TapArrays]
"""Collected activations by layer."""


@dataclass(frozen=True, kw_only=True)
class Taps:
    """Layers to collect, by activation name; counted from 0."""

    layers: Mapping[str, frozenset[int]]


class _Slots:
    """Slot of each repeat's array: requested repeats in order, all others share one slot after them."""

    def __init__(self, requested: np.ndarray):
        self.repeats = np.flatnonzero(requested)
        self.slot_of_repeat = np.where(requested, np.cumsum(requested) - 1, len(self.repeats)).astype(np.int32)
        self.size = int(self.slot_of_repeat.max()) + 1


class StageTaps:
    """Taps of one stage. The scan over repeats carries one array [n, B, T, W] per requested activation, so nothing is
    saved for other layers."""

    def __init__(self, taps: Taps, blocks: Sequence[BlockConfig], repeats: int, first: int):
        self._blocks, self._first = blocks, first
        layers = first + np.arange(len(blocks))[:, None] + len(blocks) * np.arange(repeats)
        result = [{name: np.isin(row, list(requested)) for name, requested in taps.layers.items()} for row in layers]
        self._slots = [{name: _Slots(w) for name, w in requested.items() if w.any()} for requested in result]

    def names(self, index: int) -> tuple[str, ...]:
        """Names requested of any repeat of a block."""
        return tuple(self._slots[index])

    def empty(self, x: Float[Array, "B T D"]) -> list[TapArrays]:
        """Allocate the arrays of each block in the pattern."""
        arrays = []
        for block, slots in zip(self._blocks, self._slots, strict=True):
            widths = {HIDDEN: x.shape[-1], **{name: n * h for name, (n, h) in block.attention.projections.items()}}
            arrays.append({name: jnp.zeros((s.size, *x.shape[:2], widths[name]), x.dtype) for name, s in slots.items()})
        return arrays

    def put(self, collected: list[TapArrays], index: int, repeat: int | Array, tapped: TapArrays) -> list[TapArrays]:
        """Store a block's activations."""
        new = {}
        for name, slots in self._slots[index].items():
            slot = jnp.asarray(slots.slot_of_repeat)[repeat]
            new[name] = jax.lax.dynamic_update_index_in_dim(collected[index][name], tapped[name], slot, 0)
        return [new if at == index else old for at, old in enumerate(collected)]

    def by_layer(self, collected: list[TapArrays]) -> Features:
        """Collected activations by layer."""
        result: Features = {}
        for index, block_slots in enumerate(self._slots):
            for name, slots in block_slots.items():
                for place, repeat in enumerate(slots.repeats):
                    layer = self._first + index + len(self._slots) * int(repeat)
                    result.setdefault(layer, {})[name] = collected[index][name][place]
        return result
