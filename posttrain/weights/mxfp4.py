"""MXFP4 weights of gpt-oss checkpoints: 4-bit floats with a power-of-two scale per 32 values (OCP MX 1.0)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from posttrain.weights.tensor_file import Readable, Region, StoredTensor, Task, assign

BLOCKS, SCALES = "_blocks", "_scales"
"""Name suffixes of the two stored tensors."""

GROUP = 32
"""Values per scale."""

EXPONENT_BIAS = 127

_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_VALUES = np.asarray([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
PAIRS = _VALUES[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1)]
"""The two values of each byte: lower half first."""


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize blocks [..., groups, 16] with scales [..., groups] to values [..., 32 groups], exact in bfloat16."""
    assert blocks.shape == (*scales.shape, GROUP // 2), (blocks.shape, scales.shape)
    values = PAIRS[blocks].reshape(*scales.shape, GROUP)
    wide = np.ldexp(values, scales.astype(np.int32)[..., None] - EXPONENT_BIAS)
    return wide.reshape(*scales.shape[:-1], -1).astype(jnp.bfloat16)


class MXFP4Tensor:
    """CheckpointTensor [experts, in, out] stored as blocks [experts, out, groups, 16] and scales [experts, out,
    groups]."""

    kind = "BF16"

    def __init__(self, blocks: StoredTensor, scales: StoredTensor):
        experts, out, groups = scales.shape
        self.shape = (experts, groups * GROUP, out)
        self._blocks = replace(blocks, shape=(experts, out, groups * GROUP // 2))
        self._scales = scales

    def reads(self, out: np.ndarray, region: Region) -> Iterator[Task]:
        """Tasks (any order, concurrent) that read `tensor[region]` into `out`, converted to its dtype."""
        for to, expert in enumerate(range(*region[0].indices(self.shape[0]))):
            yield partial(self._read, out[to], expert, *region[1:])

    def _read(self, out: np.ndarray, expert: int, rows: slice, columns: slice) -> None:
        start, stop, step = rows.indices(self.shape[1])
        # Whole groups are read, then sliced.
        first, last = start // GROUP, -(-stop // GROUP)
        blocks = np.empty((out.shape[1], last - first, GROUP // 2), np.uint8)
        scales = np.empty(blocks.shape[:2], np.uint8)
        for stored, values in ((self._blocks, blocks.reshape(len(blocks), -1)), (self._scales, scales)):
            width = values.shape[1] // (last - first)
            part = slice(expert, expert + 1), columns, slice(first * width, last * width)
            for task in stored.reads(values[None], part):
                task()
        selected = slice(start - first * GROUP, stop - first * GROUP, step)
        assign(out.T, dequantized(blocks, scales)[:, selected])


def merge_mxfp4(stored: Mapping[str, StoredTensor]) -> dict[str, Readable]:
    """Replace the tensors `X_blocks` and `X_scales` of a checkpoint by the tensor X."""
    tensors: dict[str, Readable] = dict(stored)
    for name, blocks in stored.items():
        base = name.removesuffix(BLOCKS)
        if base != name and base + SCALES in stored:
            tensors[base] = MXFP4Tensor(blocks, stored[base + SCALES])
            del tensors[name], tensors[base + SCALES]
    return tensors
