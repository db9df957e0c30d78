"""MXFP4 tensors of gpt-oss's files: 4-bit floats, a power of two for every 32 of them (OCP MX specification 1.0)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from posttrain.weights.tensor_file import Readable, Region, StoredTensor, Task, assign

BLOCKS, SCALES = "_blocks", "_scales"
"""What the names of the two stored tensors end in."""

GROUP = 32
"""Values that share a scale."""

EXPONENT_BIAS = 127

_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_VALUES = np.asarray([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
PAIRS = _VALUES[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1)]
"""The two values of a byte: the lower half comes first."""


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks [..., groups, 16] and scales [..., groups] as values [..., 32 groups], which bfloat16 holds exactly."""
    assert blocks.shape == (*scales.shape, GROUP // 2), (blocks.shape, scales.shape)
    values = PAIRS[blocks].reshape(*scales.shape, GROUP)
    wide = np.ldexp(values, scales.astype(np.int32)[..., None] - EXPONENT_BIAS)
    return wide.reshape(*scales.shape[:-1], -1).astype(jnp.bfloat16)


class Packed:
    """The tensor [experts, in, out] behind blocks [experts, out, groups, 16] and scales [experts, out, groups]."""

    kind = "BF16"

    def __init__(self, blocks: StoredTensor, scales: StoredTensor):
        experts, out, groups = scales.shape
        self.shape = (experts, groups * GROUP, out)
        self._blocks = replace(blocks, shape=(experts, out, groups * GROUP // 2))
        self._scales = scales

    def reads(self, out: np.ndarray, region: Region) -> Iterator[Task]:
        """Tasks, in any order or at once, that put `tensor[region]` into `out`, converted to its type."""
        for to, expert in enumerate(range(*region[0].indices(self.shape[0]))):
            yield partial(self._read, out[to], expert, *region[1:])

    def _read(self, out: np.ndarray, expert: int, rows: slice, columns: slice) -> None:
        start, stop, step = rows.indices(self.shape[1])
        # Whole groups are read; what was asked for is cut out of them.
        first, last = start // GROUP, -(-stop // GROUP)
        blocks = np.empty((out.shape[1], last - first, GROUP // 2), np.uint8)
        scales = np.empty(blocks.shape[:2], np.uint8)
        for stored, values in ((self._blocks, blocks.reshape(len(blocks), -1)), (self._scales, scales)):
            width = values.shape[1] // (last - first)
            part = slice(expert, expert + 1), columns, slice(first * width, last * width)
            for task in stored.reads(values[None], part):
                task()
        wanted = slice(start - first * GROUP, stop - first * GROUP, step)
        assign(out.T, dequantized(blocks, scales)[:, wanted])


def unpacked(stored: Mapping[str, StoredTensor]) -> dict[str, Readable]:
    """Of a checkpoint's tensors: `X_blocks` and `X_scales` as the tensor X."""
    found: dict[str, Readable] = dict(stored)
    for name, blocks in stored.items():
        base = name.removesuffix(BLOCKS)
        if base != name and base + SCALES in stored:
            found[base] = Packed(blocks, stored[base + SCALES])
            del found[name], found[base + SCALES]
    return found
