"""Safetensors files, read and written in pieces without a memory map, so that the host holds only the pieces."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from posttrain.errors import ConfigError

# Format: length of the header (8 bytes, little-endian), header (JSON: type, shape and offsets of each tensor), then the
# tensors' bytes without gaps. https://github.com/huggingface/safetensors

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
        shape = self.shape
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
        width = self.shape[-1]
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
