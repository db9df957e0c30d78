"""Safetensors files, read and written in pieces without a memory map; FP8 and MXFP4 tensors are read as BF16."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from posttrain.errors import ConfigError

# The host holds only the pieces. Format: length of the header (8 bytes, little-endian), header (JSON: type, shape and
# offsets of each tensor), then the tensors' bytes without gaps. https://github.com/huggingface/safetensors

KINDS: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
}
"""Supported types by their name in the format."""

CHUNK_BYTES = 4 << 20
"""Bytes per read task."""
BLOCK_ROWS = 128
"""Rows per block of a transposing copy, so that cache lines are reused for the next column."""

Region = tuple[slice, ...]
Task = Callable[[], None]


@runtime_checkable
class Readable(Protocol):
    """CheckpointTensor with readable regions."""

    @property
    def kind(self) -> str:
        """Type name in the safetensors format."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def reads(self, out: np.ndarray, region: Region) -> Iterator[Task]:
        """Tasks (any order, concurrent) that read `tensor[region]` into `out`, converted to its dtype."""
        ...


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    file: int
    """Open file descriptor."""
    kind: str
    shape: tuple[int, ...]
    offset: int

    def reads(self, out: np.ndarray, region: Region) -> Iterator[Task]:
        """Tasks (any order, concurrent) that read `tensor[region]` into `out`, converted to its dtype."""
        shape = self.shape or (1,)  # a number is a vector of one
        if len(shape) == 1:
            out, region, shape = out[None], (slice(0, 1), *region), (1, *shape)
        *outer, wanted = (range(*part.indices(size)) for part, size in zip(region[:-1], shape, strict=False))
        at_once = max(1, CHUNK_BYTES // (shape[-1] * KINDS[self.kind].itemsize * wanted.step))
        for place in product(*(enumerate(numbers) for numbers in outer)):
            first = sum(number * math.prod(shape[dim + 1 : -1]) for dim, (_, number) in enumerate(place))
            target = out[tuple(i for i, _ in place)]
            for start in range(0, len(wanted), at_once):
                some = wanted[start : start + at_once]
                rows_out = target[start : start + len(some)]
                yield partial(self._read_rows, rows_out, first + some[0], some[-1] + 1 - some[0], some.step, region[-1])

    def _read_rows(self, out: np.ndarray, first: int, count: int, stride: int, columns: slice) -> None:
        width = self.shape[-1] if self.shape else 1
        if out.shape == (count, width) and out.dtype == KINDS[self.kind] and out.flags.c_contiguous:
            self._read(out, first * width)
            return
        rows = np.empty((count, width), KINDS[self.kind])
        self._read(rows, first * width)
        assign(out, rows[::stride, columns])

    def _read(self, out: np.ndarray, first: int) -> None:
        """Fill an array with the values from index `first` on."""
        into = out.reshape(-1).view(np.uint8).data
        place = self.offset + first * out.itemsize
        while into:
            count = os.preadv(self.file, [into], place)
            if count == 0:
                raise OSError("the file was truncated while it was read")
            into, place = into[count:], place + count


def assign(out: np.ndarray, values: np.ndarray) -> None:
    """out[...] = values, where either may be transposed."""
    if out.dtype == values.dtype:
        # Copies of plain integers release the GIL.
        plain = np.dtype(f"u{out.itemsize}")
        out, values = out.view(plain), values.view(plain)
    if out.ndim > 2:
        for inner, inner_values in zip(out, values, strict=True):
            assign(inner, inner_values)
        return
    for start in range(0, len(out), BLOCK_ROWS):
        out[start : start + BLOCK_ROWS] = values[start : start + BLOCK_ROWS]


def open_tensors(path: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    """Open a file's tensors until `stack` closes. Raises ConfigError if it is damaged or incomplete."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    stack.callback(os.close, file)
    size = os.fstat(file).st_size
    try:
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        if length > size - 8:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(os.pread(file, length, 8))
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, 8 + length, size, entry) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"{8 + length + end} bytes expected, {size} found")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: damaged or incomplete ({error}); copy it again") from error
    return tensors


def _stored(file: int, base: int, size: int, entry: Mapping[str, Any]) -> StoredTensor:
    (start, stop), shape, kind = entry["data_offsets"], tuple(entry["shape"]), entry["dtype"]
    if kind in KINDS and stop - start != math.prod(shape) * KINDS[kind].itemsize:
        raise ValueError(f"{stop - start} bytes for the shape {shape} of {kind}")
    if base + stop > size:
        raise ValueError(f"{base + stop} bytes expected, {size} found")
    return StoredTensor(file=file, kind=kind, shape=shape, offset=base + start)


@dataclass(frozen=True)
class Outline:
    """Header entry of a tensor to write."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, outlines: Sequence[Outline], arrays: Iterable[np.ndarray]) -> None:
    """Write a file of tensors given one at a time, in the order of their outlines."""
    kinds = {dtype: kind for kind, dtype in KINDS.items()}
    # transformers rejects a file without this entry.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for outline in outlines:
        place = [end, end + outline.nbytes]
        header[outline.name] = {"dtype": kinds[outline.dtype], "shape": list(outline.shape), "data_offsets": place}
        end = place[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for outline, array in zip(outlines, arrays, strict=True):
            assert (array.shape, array.dtype) == (outline.shape, outline.dtype), outline
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


# FP8 of DeepSeek checkpoints: e4m3 values with a float32 scale per 128 x 128 block.
FP8 = "F8_E4M3"
FP8_FACTORS = "_scale_inv"
"""Name suffix of the scales tensor, after the matrix's own name."""

FP8_BLOCK = 128
"""Rows and columns per scale; blocks at the edge may be smaller."""


def dequantize_fp8(values: np.ndarray, factors: np.ndarray, rows: range, columns: range) -> np.ndarray:
    """Dequantize the given rows and columns to float32."""
    factor = factors[np.asarray(rows) // FP8_BLOCK][:, np.asarray(columns) // FP8_BLOCK]
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
        values = np.empty((len(rows), len(columns)), KINDS[FP8])
        factors = np.empty(self._factors.shape, np.float32)
        whole = tuple(slice(0, size) for size in factors.shape)
        part = slice(rows.start, rows.stop, rows.step), slice(columns.start, columns.stop, columns.step)
        for task in (*self._values.reads(values, part), *self._factors.reads(factors, whole)):
            task()
        assign(out, dequantize_fp8(values, factors, rows, columns))


def split_fp8(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, Readable]]:
    """Split a checkpoint's tensors into those not in FP8 and the FP8 matrices."""
    rest, matrices = dict(stored), dict[str, Readable]()
    for name, values in stored.items():
        factors = stored.get(name + FP8_FACTORS)
        if factors is None or values.kind != FP8 or len(values.shape) != 2:
            continue
        if factors.kind == "F32" and factors.shape == tuple(-(-size // FP8_BLOCK) for size in values.shape):
            matrices[name] = FP8Matrix(values, factors)
            del rest[name], rest[name + FP8_FACTORS]
    return rest, matrices


# MXFP4 of gpt-oss checkpoints: 4-bit floats with a power-of-two scale per 32 values (OCP MX 1.0).
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""Name suffixes of the two stored tensors."""

MXFP4_GROUP = 32
"""Values per scale."""

MXFP4_BIAS = 127

_MXFP4_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_MXFP4_VALUES = np.asarray([*_MXFP4_POSITIVE, *(-value for value in _MXFP4_POSITIVE)], np.float32)
MXFP4_PAIRS = _MXFP4_VALUES[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1)]
"""The two values of each byte: lower half first."""


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize blocks [..., groups, 16] with scales [..., groups] to values [..., 32 groups], exact in bfloat16."""
    assert blocks.shape == (*scales.shape, MXFP4_GROUP // 2), (blocks.shape, scales.shape)
    values = MXFP4_PAIRS[blocks].reshape(*scales.shape, MXFP4_GROUP)
    wide = np.ldexp(values, scales.astype(np.int32)[..., None] - MXFP4_BIAS)
    return wide.reshape(*scales.shape[:-1], -1).astype(jnp.bfloat16)


class MXFP4Tensor:
    """Tensor [experts, in, out] stored as blocks [experts, out, groups, 16] and scales [experts, out, groups]."""

    kind = "BF16"

    def __init__(self, blocks: StoredTensor, scales: StoredTensor):
        experts, out, groups = scales.shape
        self.shape = (experts, groups * MXFP4_GROUP, out)
        self._blocks = replace(blocks, shape=(experts, out, groups * MXFP4_GROUP // 2))
        self._scales = scales

    def reads(self, out: np.ndarray, region: Region) -> Iterator[Task]:
        """Tasks (any order, concurrent) that read `tensor[region]` into `out`, converted to its dtype."""
        for to, expert in enumerate(range(*region[0].indices(self.shape[0]))):
            yield partial(self._read, out[to], expert, *region[1:])

    def _read(self, out: np.ndarray, expert: int, rows: slice, columns: slice) -> None:
        start, stop, step = rows.indices(self.shape[1])
        # Whole groups are read, then sliced.
        first, last = start // MXFP4_GROUP, -(-stop // MXFP4_GROUP)
        blocks = np.empty((out.shape[1], last - first, MXFP4_GROUP // 2), np.uint8)
        scales = np.empty(blocks.shape[:2], np.uint8)
        for stored, values in ((self._blocks, blocks.reshape(len(blocks), -1)), (self._scales, scales)):
            width = values.shape[1] // (last - first)
            part = slice(expert, expert + 1), columns, slice(first * width, last * width)
            for task in stored.reads(values[None], part):
                task()
        selected = slice(start - first * MXFP4_GROUP, stop - first * MXFP4_GROUP, step)
        assign(out.T, dequantize_mxfp4(blocks, scales)[:, selected])


def merge_mxfp4(stored: Mapping[str, StoredTensor]) -> dict[str, Readable]:
    """Replace the tensors `X_blocks` and `X_scales` of a checkpoint by the tensor X."""
    tensors: dict[str, Readable] = dict(stored)
    for name, blocks in stored.items():
        base = name.removesuffix(MXFP4_BLOCKS)
        if base != name and base + MXFP4_SCALES in stored:
            tensors[base] = MXFP4Tensor(blocks, stored[base + MXFP4_SCALES])
            del tensors[name], tensors[base + MXFP4_SCALES]
    return tensors
