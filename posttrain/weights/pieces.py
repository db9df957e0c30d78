"""Parameter transfer between checkpoint files and devices in pieces, with bounded host memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int

from posttrain.models.names import CheckpointTensor, ParamSlice
from posttrain.runtime import processes
from posttrain.weights.files import Checkpoint
from posttrain.weights.tensor_file import Region, assign

MAX_PIECE_BYTES = 64 << 20
MIN_PIECE_BYTES = 4 << 20
MAX_THREADS = 8

Sources = Mapping[tuple[int, ...], tuple[CheckpointTensor, ParamSlice]]
"""Index into a parameter's leading dimensions -> source tensor and slice."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Pieces of a sharded parameter. Each covers the same block of every device's shard, so none moves between
    devices."""

    shape: tuple[int, ...]
    parts: tuple[int, ...]
    """Number of shards along each dimension."""
    block: tuple[int, ...]
    """Shape of a piece within one shard."""

    @classmethod
    def cut(cls, shape: tuple[int, ...], parts: Sequence[int], order: Sequence[int], *, max_size: int) -> Pieces:
        """Cut into pieces of at most `max_size` elements, unless the last dimension of `order` alone exceeds it.

        `order`: dimensions from outer to inner in the checkpoint's layout.
        """
        block = [size // n for size, n in zip(shape, parts, strict=True)]
        for dim in order[:-1]:
            rest = math.prod(b * n for b, n in zip(block, parts, strict=True)) // block[dim]
            if rest * block[dim] <= max_size:
                break
            steps = -(-block[dim] // max(1, max_size // rest))
            block[dim] = -(-block[dim] // steps)
        return cls(shape=shape, parts=tuple(parts), block=tuple(block))

    @property
    def piece_shape(self) -> tuple[int, ...]:
        return tuple(b * n for b, n in zip(self.block, self.parts, strict=True))

    def starts(self) -> Iterator[tuple[int, ...]]:
        """Start of each piece within a shard; the last ones overlap others, so that all have one shape."""
        sizes = [size // n for size, n in zip(self.shape, self.parts, strict=True)]
        return product(
            *([min(i, size - b) for i in range(0, size, b)] for size, b in zip(sizes, self.block, strict=True))
        )

    def bands(self, start: tuple[int, ...]) -> Iterator[tuple[tuple[slice, slice], ...]]:
        """Contiguous blocks of a piece: for each dimension the slice of the piece and the slice of the parameter."""
        bands = []
        for size, n, b, first in zip(self.shape, self.parts, self.block, start, strict=True):
            part = size // n
            if b == part:
                bands.append([(slice(0, size), slice(0, size))])
            else:
                bounds = [(k * b, k * part + first) for k in range(n)]
                bands.append([(slice(to, to + b), slice(at, at + b)) for to, at in bounds])
        return product(*bands)


def stored_order(sources: Sources, ndim: int) -> list[int]:
    """Dimensions of a parameter in the checkpoint's order."""
    index, (tensor, _) = next(iter(sources.items()))
    order = list(range(ndim))
    if tensor.transpose and ndim - len(index) >= 2:
        order[-2:] = order[:-3:-1]
    return order


def stored_blocks(
    piece: np.ndarray, pieces: Pieces, start: tuple[int, ...], sources: Sources
) -> Iterator[tuple[CheckpointTensor, Region, np.ndarray]]:
    """Sources of a piece: tensor, its region as stored, and the view of `piece` to fill."""
    lead = len(next(iter(sources)))
    for bands in pieces.bands(start):
        places = [zip(range(to.start, to.stop), range(at.start, at.stop), strict=True) for to, at in bands[:lead]]
        for place in product(*places):
            tensor, part = sources[tuple(at for _, at in place)]
            view = piece[tuple(to for to, _ in place)][tuple(to for to, _ in bands[lead:])]
            if part.fill is not None:
                view[...] = part.fill
                continue
            region = [at for _, at in bands[lead:]]
            region[-1] = _within(part.columns, region[-1])
            if tensor.transpose:
                view = view.swapaxes(-1, -2)
                region[-2:] = region[:-3:-1]
            yield tensor, tuple(region), view


def _within(columns: slice, inner: slice) -> slice:
    """Compose slices: columns[inner]."""
    step = columns.step or 1
    return slice(columns.start + inner.start * step, columns.start + (inner.stop - 1) * step + 1, step)


class ParameterReader:
    """Parameter reader: reads several tensors at once while the previous piece is transferred to the devices."""

    def __init__(self, checkpoint: Checkpoint, advance: Callable[[int], None]):
        self._checkpoint = checkpoint
        self._advance = advance
        self._pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
        self._pending: Array | None = None
        self._bytes = 0.0

    def __enter__(self) -> ParameterReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding | None, sources: Sources) -> Array:
        """Read a parameter to its devices: in one transfer if it fits a piece, else piece by piece into place."""
        local = shape if sharding is None else sharding.shard_shape(shape)
        parts = [size // part for size, part in zip(shape, local, strict=True)]
        order = stored_order(sources, len(shape))
        pieces = Pieces.cut(shape, parts, order, max_size=self._max_size(dtype))
        starts = list(pieces.starts())
        share = math.prod(shape) * dtype.itemsize / len(starts)
        if len(starts) == 1:
            self._count(share)
            return self._put(pieces, starts[0], dtype, sharding, sources)
        array = jnp.zeros(shape, dtype, device=sharding)
        for start in starts:
            piece = self._put(pieces, start, dtype, sharding, sources)
            self._pending = array = write(array, piece, np.asarray(start, np.int32), sharding)
            self._count(share)
        return array

    def _count(self, num_bytes: float) -> None:
        before, self._bytes = self._bytes, self._bytes + num_bytes
        self._advance(int(self._bytes // 10**6 - before // 10**6))

    def _max_size(self, dtype: np.dtype) -> int:
        """Elements per piece: two pieces on the host, and two on the devices if these are the host, are at most the
        largest tensor."""
        largest = self._checkpoint.largest * dtype.itemsize // 4
        return min(MAX_PIECE_BYTES, max(MIN_PIECE_BYTES, largest)) // dtype.itemsize

    def _put(
        self,
        pieces: Pieces,
        start: tuple[int, ...],
        dtype: np.dtype,
        sharding: NamedSharding | None,
        sources: Sources,
    ) -> Array:
        values = np.empty(pieces.piece_shape, dtype)
        blocks = stored_blocks(values, pieces, start, sources)
        tasks = [task for tensor, region, view in blocks for task in self._checkpoint.reads(tensor, view, region)]
        for _ in self._pool.map(lambda task: task(), tasks):
            pass
        # Reading may be at most one piece ahead of the devices.
        jax.block_until_ready(self._pending)
        if sharding is None:
            return jax.device_put(values)
        piece: Array = processes.on_devices(values, sharding)
        return piece


@partial(jax.jit, donate_argnums=0, static_argnames="sharding")
def write(array: Array, piece: Array, start: Int[Array, " N"], sharding: NamedSharding | None) -> Array:
    """Write a piece into every device's shard at `start`, in place."""

    def local(array: Array, piece: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice(array, piece, tuple(start))

    if sharding is None:
        return local(array, piece, start)
    spec = sharding.spec
    into = jax.shard_map(local, mesh=sharding.mesh, in_specs=(spec, spec, PartitionSpec()), out_specs=spec)
    return into(array, piece, start)


@runtime_checkable
class Lazy(Protocol):
    """Lazily computed parameter, by layer or expert."""

    dtype: np.dtype
    nbytes: int

    def part(self, index: tuple[int, ...]) -> Array: ...


class Gather:
    """Host copies of a model's parameters in checkpoint layout, one tensor at a time."""

    def __init__(self, weights: Mapping[str, Array | Lazy]):
        self._weights = weights
        self._held: dict[str, tuple[tuple[int, ...], np.ndarray]] = {}

    def tensor(self, tensor: CheckpointTensor) -> np.ndarray:
        """Return a tensor. In the order of `names.tensors`, each layer or expert of a parameter is fetched once; small
        ones together."""
        self._held = {part.param: self._held[part.param] for part in tensor.parts if part.param in self._held}
        values = [self._values(part) for part in tensor.parts]
        if len(values) == 1 and not tensor.transpose:
            return np.ascontiguousarray(values[0]).reshape(tensor.shape)
        out = np.empty(tensor.shape, values[0].dtype)
        view = out.swapaxes(-1, -2) if tensor.transpose else out
        for part, value in zip(tensor.parts, values, strict=True):
            assign(view[..., part.columns], value)
        return out

    def _values(self, part: ParamSlice) -> np.ndarray:
        array = self._weights[part.param]
        place = part.index[: _depth(array, len(part.index))]
        if part.param not in self._held or self._held[part.param][0] != place:
            self._held.pop(part.param, None)
            self._held[part.param] = (
                place,
                _on_host(_slice(array, place) if isinstance(array, Array) else array.part(place)),
            )
        return self._held[part.param][1][part.index[len(place) :]]


def _depth(array: Array | Lazy, most: int) -> int:
    """Number of leading dimensions to index on the device so that a piece fits host memory."""
    if not isinstance(array, Array):
        return most
    return next((n for n in range(most) if array.nbytes <= MAX_PIECE_BYTES * math.prod(array.shape[:n])), most)


@jax.jit
def _slice(array: Array, place: tuple[int | Array, ...]) -> Array:
    for index in place:
        array = jax.lax.dynamic_index_in_dim(array, index, keepdims=False)
    return array


def _on_host(array: Array) -> np.ndarray:
    if not array.is_fully_addressable:
        whole: np.ndarray = processes.on_host(array)
        return whole
    # Copy through a new array over the same buffers: JAX caches the host copy as long as the requested array lives.
    parts = [shard.data for shard in array.addressable_shards]
    return np.asarray(jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts))
