"""Parameters to their devices and back piece by piece, so that the host never holds much of them."""

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

from posttrain.models.names import Part, Tensor
from posttrain.weights.files import Checkpoint
from posttrain.weights.tensor_file import Region, assign

MAX_PIECE_BYTES = 64 << 20
MIN_PIECE_BYTES = 4 << 20
MAX_THREADS = 8

Sources = Mapping[tuple[int, ...], tuple[Tensor, Part]]
"""Place in a parameter's leading dimensions -> where its values come from."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A parameter cut into pieces. Each holds the same block of every device's part: none moves between devices."""

    shape: tuple[int, ...]
    parts: tuple[int, ...]
    """Number of the devices' parts along each dimension."""
    block: tuple[int, ...]
    """Shape of a piece in one device's part."""

    @classmethod
    def cut(cls, shape: tuple[int, ...], parts: Sequence[int], order: Sequence[int], *, max_size: int) -> Pieces:
        """Pieces of at most `max_size` numbers, where the last dimension of `order` alone does not have more.

        `order`: the dimensions from outer to inner, as they lie in the checkpoint.
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
        """Where the pieces begin in each device's part; the last ones overlap others, so that all are alike."""
        sizes = [size // n for size, n in zip(self.shape, self.parts, strict=True)]
        return product(
            *([min(i, size - b) for i in range(0, size, b)] for size, b in zip(sizes, self.block, strict=True))
        )

    def bands(self, start: tuple[int, ...]) -> Iterator[tuple[tuple[slice, slice], ...]]:
        """The parts of a piece that are one block of the parameter: for each dimension where in the piece, and where
        in the parameter."""
        found = []
        for size, n, b, first in zip(self.shape, self.parts, self.block, start, strict=True):
            part = size // n
            if b == part:
                found.append([(slice(0, size), slice(0, size))])
            else:
                bounds = [(k * b, k * part + first) for k in range(n)]
                found.append([(slice(to, to + b), slice(at, at + b)) for to, at in bounds])
        return product(*found)


def stored_order(sources: Sources, ndim: int) -> list[int]:
    """A parameter's dimensions in the order in which the checkpoint has them."""
    index, (tensor, _) = next(iter(sources.items()))
    order = list(range(ndim))
    if tensor.transpose and ndim - len(index) >= 2:
        order[-2:] = order[:-3:-1]
    return order


def stored_blocks(
    piece: np.ndarray, pieces: Pieces, start: tuple[int, ...], sources: Sources
) -> Iterator[tuple[Tensor, Region, np.ndarray]]:
    """What fills a piece: a tensor, a region of it as stored, and the view of `piece` that this region belongs to."""
    lead = len(next(iter(sources)))
    for bands in pieces.bands(start):
        places = [zip(range(to.start, to.stop), range(at.start, at.stop), strict=True) for to, at in bands[:lead]]
        for place in product(*places):
            tensor, part = sources[tuple(at for _, at in place)]
            view = piece[tuple(to for to, _ in place)][tuple(to for to, _ in bands[lead:])]
            region = [at for _, at in bands[lead:]]
            region[-1] = _within(part.columns, region[-1])
            if tensor.transpose:
                view = view.swapaxes(-1, -2)
                region[-2:] = region[:-3:-1]
            yield tensor, tuple(region), view


def _within(columns: slice, inner: slice) -> slice:
    """columns[inner]"""
    step = columns.step or 1
    return slice(columns.start + inner.start * step, columns.start + (inner.stop - 1) * step + 1, step)


class Reader:
    """Reads parameters of a checkpoint, several tensors at once, while the piece before goes to the devices."""

    def __init__(self, checkpoint: Checkpoint, advance: Callable[[int], None]):
        self._checkpoint = checkpoint
        self._advance = advance
        self._pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
        self._pending: Array | None = None
        self._bytes = 0.0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding | None, sources: Sources) -> Array:
        """A parameter on its devices. One that fits a piece is put there as it is, others are written into place."""
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
        """Two pieces on the host, and two on the devices where these are the host, are at most the largest tensor."""
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
        # Reading may run ahead of the devices by one piece.
        jax.block_until_ready(self._pending)
        if sharding is None:
            return jax.device_put(values)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


@partial(jax.jit, donate_argnums=0, static_argnames="sharding")
def write(array: Array, piece: Array, start: Int[Array, " N"], sharding: NamedSharding | None) -> Array:
    """The array, in place, with a piece in every device's part at `start`."""

    def local(array: Array, piece: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice(array, piece, tuple(start))

    if sharding is None:
        return local(array, piece, start)
    spec = sharding.spec
    into = jax.shard_map(local, mesh=sharding.mesh, in_specs=(spec, spec, PartitionSpec()), out_specs=spec)
    return into(array, piece, start)


@runtime_checkable
class Lazy(Protocol):
    """A parameter of which a layer, or an expert of one, is computed when it is asked for."""

    dtype: np.dtype
    nbytes: int

    def part(self, index: tuple[int, ...]) -> Array: ...


class Gather:
    """A model's parameters on the host as a checkpoint stores them, one tensor after the other."""

    def __init__(self, weights: Mapping[str, Array | Lazy]):
        self._weights = weights
        self._held: dict[str, tuple[tuple[int, ...], np.ndarray]] = {}

    def tensor(self, tensor: Tensor) -> np.ndarray:
        """In the order of `names.tensors` each layer or expert of a parameter is fetched once; small ones together."""
        self._held = {part.param: self._held[part.param] for part in tensor.parts if part.param in self._held}
        values = [self._values(part) for part in tensor.parts]
        if len(values) == 1 and not tensor.transpose:
            return np.ascontiguousarray(values[0])
        out = np.empty(tensor.shape, values[0].dtype)
        view = out.swapaxes(-1, -2) if tensor.transpose else out
        for part, value in zip(tensor.parts, values, strict=True):
            assign(view[..., part.columns], value)
        return out

    def _values(self, part: Part) -> np.ndarray:
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
    """How many leading dimensions are indexed on the device, for a piece that the host may hold."""
    if not isinstance(array, Array):
        return most
    return next((n for n in range(most) if array.nbytes <= MAX_PIECE_BYTES * math.prod(array.shape[:n])), most)


@jax.jit
def _slice(array: Array, place: tuple[int | Array, ...]) -> Array:
    for index in place:
        array = jax.lax.dynamic_index_in_dim(array, index, keepdims=False)
    return array


def _on_host(array: Array) -> np.ndarray:
    # Through a new array over the same buffers: JAX keeps the copy on the host as long as the array that was asked.
    parts = [shard.data for shard in array.addressable_shards]
    return np.asarray(jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts))
