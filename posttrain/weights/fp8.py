"""FP8 weights of DeepSeek checkpoints: e4m3 values with a float32 scale per 128 x 128 block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from posttrain.weights.tensor_file import CHUNK_BYTES, KINDS, Readable, Region, StoredTensor, Task, assign

KIND = "F8_E4M3"
FACTORS = "_scale_inv"
"""Name suffix of the scales tensor, after the matrix's own name."""

BLOCK = 128
"""Rows and columns per scale; blocks at the edge may be smaller."""


def dequantized(values: np.ndarray, factors: np.ndarray, rows: range, columns: range) -> np.ndarray:
    """Dequantize the given rows and columns to float32."""
    factor = factors[np.asarray(rows) // BLOCK][:, np.asarray(columns) // BLOCK]
    return values.astype(np.float32) * factor


class FP8Matrix:
    """Matrix stored as 8-bit values and block scales, read as BF16."""

    kind = "BF16"

    def __init__(self, values: StoredTensor, factors: Readable):
        self.shape = values.shape
        self._values, self._factors = values, factors

    def reads(self, out: np.ndarray, region: Region) -> Iterator[Task]:
        """Tasks (any order, concurrent) that read `tensor[region]` into `out`, converted to its dtype."""
        rows, columns = (range(*part.indices(size)) for part, size in zip(region, self.shape, strict=True))
        at_once = max(1, CHUNK_BYTES // (4 * self.shape[1] * rows.step))
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once]
            yield partial(self._read, out[start : start + len(some)], some, columns)

    def _read(self, out: np.ndarray, rows: range, columns: range) -> None:
        values = np.empty((len(rows), len(columns)), KINDS[KIND])
        factors = np.empty(self._factors.shape, np.float32)
        whole = tuple(slice(0, size) for size in factors.shape)
        part = slice(rows.start, rows.stop, rows.step), slice(columns.start, columns.stop, columns.step)
        for task in (*self._values.reads(values, part), *self._factors.reads(factors, whole)):
            task()
        assign(out, dequantized(values, factors, rows, columns))


def split_fp8(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, Readable]]:
    """Split a checkpoint's tensors into those not in FP8 and the FP8 matrices."""
    rest, matrices = dict(stored), dict[str, Readable]()
    for name, values in stored.items():
        factors = stored.get(name + FACTORS)
        if factors is None or values.kind != KIND or len(values.shape) != 2:
            continue
        if factors.kind == "F32" and factors.shape == tuple(-(-size // BLOCK) for size in values.shape):
            matrices[name] = FP8Matrix(values, factors)
            del rest[name], rest[name + FACTORS]
    return rest, matrices
