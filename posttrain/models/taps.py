"""Layers that hand out what they compute: hidden states, and queries, keys and values."""

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

Given = dict[str, Array]
"""Of a layer [B, T, W], by name: `HIDDEN`, what it hands to the next layer; `q`, `k` and `v`, its projections after
their norms and before RoPE, all heads beside each other."""

Features = dict[int, Given]
"""By layer."""


@dataclass(frozen=True, kw_only=True)
class Taps:
    """What is wanted of which layers, by name; they count from 0."""

    layers: Mapping[str, frozenset[int]]


class _Slots:
    """Where the array of each repeat of a block goes: those that are wanted in order, all others to one place after."""

    def __init__(self, wanted: np.ndarray):
        self.repeats = np.flatnonzero(wanted)
        self.of_repeat = np.where(wanted, np.cumsum(wanted) - 1, len(self.repeats)).astype(np.int32)
        self.size = int(self.of_repeat.max()) + 1


class StageTaps:
    """Those of one stage. A scan over its repeats carries one array [n, B, T, W] of all that is wanted of a block, so
    that of the layers between nothing is kept."""

    def __init__(self, taps: Taps, blocks: Sequence[BlockConfig], repeats: int, first: int):
        self._blocks, self._first = blocks, first
        layers = first + np.arange(len(blocks))[:, None] + len(blocks) * np.arange(repeats)
        found = [{name: np.isin(row, list(wanted)) for name, wanted in taps.layers.items()} for row in layers]
        self._slots = [{name: _Slots(w) for name, w in wanted.items() if w.any()} for wanted in found]

    def names(self, index: int) -> tuple[str, ...]:
        """What is wanted of any repeat of a block."""
        return tuple(self._slots[index])

    def empty(self, x: Float[Array, "B T D"]) -> list[Given]:
        """Of each block of the pattern."""
        made = []
        for block, slots in zip(self._blocks, self._slots, strict=True):
            widths = {HIDDEN: x.shape[-1], **{name: n * h for name, (n, h) in block.attention.projections.items()}}
            made.append({name: jnp.zeros((s.size, *x.shape[:2], widths[name]), x.dtype) for name, s in slots.items()})
        return made

    def put(self, taken: list[Given], index: int, repeat: int | Array, given: Given) -> list[Given]:
        """`taken` with what a block has handed out."""
        new = {}
        for name, slots in self._slots[index].items():
            slot = jnp.asarray(slots.of_repeat)[repeat]
            new[name] = jax.lax.dynamic_update_index_in_dim(taken[index][name], given[name], slot, 0)
        return [new if at == index else old for at, old in enumerate(taken)]

    def by_layer(self, taken: list[Given]) -> Features:
        """What the wanted layers have handed out."""
        found: Features = {}
        for index, slots_of in enumerate(self._slots):
            for name, slots in slots_of.items():
                for place, repeat in enumerate(slots.repeats):
                    layer = self._first + index + len(self._slots) * int(repeat)
                    found.setdefault(layer, {})[name] = taken[index][name][place]
        return found
