"""Activation taps: collect hidden states, queries, keys and values of selected layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from posttrain.models.config import BlockConfig

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
