"""KV caches: one row per sequence, or pages of a shared pool addressed by a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Float, Int, Shaped

from posttrain.config import ROW_AXES, CacheDtype
from posttrain.errors import ConfigError
from posttrain.kernels.attention.joined import HeadLanes, NewHeads
from posttrain.kernels.attention.paged import ragged_refusal
from posttrain.kernels.platform import platform_of
from posttrain.models.config import AttentionConfig, BlockConfig, LatentAttentionConfig, ModelConfig
from posttrain.models.quant import packed, unpacked
from posttrain.tree import pytree, replace, static

PageLayout = Literal["gather", "ragged", "joined"]

KERNELS = ("ragged", "joined")
"""Layouts that a TPU kernel reads in place."""


@pytree
class KVCache:
    """KV cache: keys [R, B, K, H, S] and values [R, B, K, S, H] per block of the stages' patterns and its R repeats.

    Position p of row b is stored at index p of S. This layout is the fastest to read on CPU. None: the block reuses
    another's keys and values, or its values are part of its keys (latent attention), stored as [R, B, K, S, H].

    Each position is written before it is read, so stale values of an earlier sequence are never visible.
    """

    keys: tuple[Float[Array, "_R B _K _1 _2"] | None, ...]
    values: tuple[Float[Array, "_R B _K S _H"] | None, ...]
    kind: CacheDtype = static(default="compute")
    """Numbers that keys and values are rounded to; they are stored as they are computed with."""
    fresh: bool = static(default=False)
    """Prefill from position 0 in every row: attention uses the new keys and values only, and padding may be written,
    since each position is overwritten before it is read."""

    def rounded(
        self, keys: Float[Array, "B K T H"], values: Float[Array, "B K T Hv"]
    ) -> tuple[Float[Array, "B K T H"], Float[Array, "B K T Hv"]]:
        """New keys and values as a pool keeps them, so that those of this dispatch are as those of the ones before."""
        if self.kind == "compute":
            return keys, values
        rounded = [unpacked(packed(x, self.kind), self.kind, x.dtype) for x in (keys, values)]
        return rounded[0], rounded[1]

    @property
    def width(self) -> int:
        """Positions per row; attention reads all of them."""
        return next(array for array in (*self.values, *self.keys) if array is not None).shape[3]

    def write(
        self,
        slot: int,
        repeat: int | Int[Array, ""],
        keys: Float[Array, "B K T H"],
        values: Float[Array, "B K T Hv"] | None,
        positions: Int[Array, "B T"],
    ) -> KVCache:
        def put(stored: tuple[Array | None, ...], new: Array, *, last: bool) -> tuple[Array | None, ...]:
            array = stored[slot]
            assert array is not None
            if self.fresh:  # all positions of the layer
                padded = jnp.pad(new, [(0, 0)] * 2 + [(0, self.width - new.shape[2]), (0, 0)]).astype(array.dtype)
                changed = array.at[repeat].set(padded.swapaxes(2, 3) if last else padded)
            else:
                new, places = self._places(new, positions)
                # Row by row: with row numbers among the indices, XLA would gather all rows on every device.
                place = partial(row, last=last)
                changed = jax.vmap(place, in_axes=(1, 0, 0), out_axes=1)(array, new.swapaxes(1, 2), places)
            return (*stored[:slot], changed, *stored[slot + 1 :])

        def row(array: Array, new: Array, positions: Array, *, last: bool) -> Array:
            places = array.at[repeat, :, :, positions] if last else array.at[repeat, :, positions]
            return places.set(new.astype(array.dtype), mode="drop")

        if values is None:
            return replace(self, keys=put(self.keys, keys, last=False))
        return replace(self, keys=put(self.keys, keys, last=True), values=put(self.values, values, last=False))

    def _places(
        self, new: Float[Array, "B K T H"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B K _T H"], Int[Array, "B _T"]]:
        """Heads and their places. A single one gets a second out of range: XLA:CPU would merge the update of one place
        with what reads the cache, and copy the cache for each."""
        if positions.size > 1 or platform_of(None) != "cpu":
            return new, positions
        none = jnp.full_like(positions, self.width)
        return jnp.concatenate([new, new], axis=2), jnp.concatenate([positions, none], axis=1)

    def read(
        self, slot: int, repeat: int | Int[Array, ""]
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"] | None]:
        keys, values = self.keys[slot], self.values[slot]
        assert keys is not None
        return (keys[repeat], None) if values is None else (keys[repeat].swapaxes(2, 3), values[repeat])


def empty_cache(config: ModelConfig, rows: int, length: int, dtype: np.dtype, *, fresh: bool = False) -> KVCache:
    """Allocate zeros for `rows` sequences of up to `length` tokens."""

    keys: list[Array | None] = []
    values: list[Array | None] = []
    for stage in config.stages:
        for block in stage.blocks:
            key, value = _key_size(block), _value_size(block)
            lead = stage.repeats, rows, block.attention.num_kv_heads
            by_position = (length, key) if value is None else (key, length)
            keys.append(None if key is None else jnp.zeros((*lead, *by_position), dtype))
            values.append(None if value is None else jnp.zeros((*lead, length, value), dtype))
    return KVCache(keys=tuple(keys), values=tuple(values), fresh=fresh)


def _key_size(block: BlockConfig) -> int | None:
    attention = block.attention
    if isinstance(attention, LatentAttentionConfig):
        return attention.kv_rank + attention.rope_dim
    return None if attention.reuses is not None else attention.head_dim


def _value_size(block: BlockConfig) -> int | None:
    attention = block.attention
    if isinstance(attention, LatentAttentionConfig) or attention.reuses is not None:
        return None
    return attention.head_dim


@pytree
class PagedCache:
    """Paged variant of `KVCache`: a pool of R repeats x D lanes x P pages shared by the rows of each lane. Layers with
    a window may have fewer pages, under G = 2 numbers: those of all positions, then those of the window.

    `gather`: keys and values [R, D, P, page, K, H]. `ragged`: [R, D, P, page, 2 K, H] in `keys`, the key and value of a
    head interleaved, as ragged paged attention reads them. `joined`: [R, D, P, K, page, Hp] in `keys`, with the lanes
    of `HeadLanes`.
    """

    keys: tuple[Shaped[Array, "_R D _P *_page"] | None, ...]
    values: tuple[Shaped[Array, "_R D _P S _K _H"] | None, ...]
    tables: Int[Array, "D n G W"]
    """Page tables of each row, from its start."""
    first: Int[Array, "D n"]
    """Table index of the first writable page."""
    targets: Int[Array, "D n G M"]
    """Writable pages from `first` on; P or more: none."""
    windowed: tuple[bool, ...] = static()
    """Blocks of the pattern with pages for a window."""
    layout: PageLayout = static()
    kind: CacheDtype = static(default="compute")
    """Type of the numbers in the pages, see `packed`."""
    mesh: Mesh | None = static()
    """Mesh that the pool is sharded over."""
    dtype: np.dtype = static()
    """Type of the keys and values that are read."""

    @property
    def page(self) -> int:
        shape = next(keys for keys in self.keys if keys is not None).shape
        return shape[4] if self.layout == "joined" else shape[3]

    @property
    def width(self) -> int:
        """Positions that a row's pages can hold."""
        return self.tables.shape[3] * self.page

    def table(self, slot: int) -> Int[Array, "D n W"]:
        """Page table of each row in a block of the pattern."""
        return self.tables[:, :, int(self.windowed[slot])]

    def write(
        self,
        slot: int,
        repeat: int | Int[Array, ""],
        keys: Float[Array, "B K T H"],
        values: Float[Array, "B K T Hv"] | None,
        positions: Int[Array, "B T"],
    ) -> PagedCache:
        if self.layout == "ragged":
            keys, values = combined(keys, values, self.layout), None
        keys_now = self._put(self.keys, slot, repeat, keys, positions)
        if values is None:
            return replace(self, keys=keys_now)
        return replace(self, keys=keys_now, values=self._put(self.values, slot, repeat, values, positions))

    def joined(
        self,
        slot: int,
        keys: Float[Array, "B K T H"],
        values: Float[Array, "B K T Hv"] | None,
        positions: Int[Array, "B T"],
    ) -> NewHeads:
        """Heads that the kernel of joined heads writes before it attends: heads [B, K, T, Hp] and flags [B, T]."""
        pages = self.keys[slot]
        assert self.layout == "joined" and pages is not None
        new = combined(keys, values, self.layout).astype(pages.dtype)
        padded = jnp.pad(new, [(0, 0)] * 3 + [(0, pages.shape[-1] - new.shape[-1])])
        targets = self._targets(slot, positions, pages.shape[2])
        return NewHeads(padded, targets.reshape(positions.shape) < pages.shape[2])

    def with_pages(self, slot: int, pages: Float[Array, "R D P *page"]) -> PagedCache:
        return replace(self, keys=(*self.keys[:slot], pages, *self.keys[slot + 1 :]))

    def _targets(self, slot: int, positions: Int[Array, "B T"], none: int) -> Int[Array, "D n T"]:
        """Pages that these positions are written to; `none` or more where they may not be."""
        targets = self.targets[:, :, int(self.windowed[slot])]
        index = positions.reshape(*targets.shape[:2], -1) // self.page - self.first[:, :, None]
        targets = jnp.take_along_axis(targets, index, axis=2, mode="fill", fill_value=none)
        return jnp.where(index >= 0, targets, none)

    def _put(
        self,
        stored: tuple[Array | None, ...],
        slot: int,
        repeat: int | Int[Array, ""],
        new: Float[Array, "B K T H"],
        positions: Int[Array, "B T"],
    ) -> tuple[Array | None, ...]:
        array = stored[slot]
        assert array is not None
        lanes, rows, *_ = self.targets.shape
        if self.kind != "compute":
            new = packed(new, self.kind)
        targets = self._targets(slot, positions, array.shape[2])
        padded = jnp.pad(new.swapaxes(1, 2), [(0, 0)] * 3 + [(0, array.shape[-1] - new.shape[3])])
        new = padded.reshape(lanes, rows, *padded.shape[1:]).astype(array.dtype)

        def lane(array: Array, new: Array, targets: Array, offsets: Array) -> Array:
            return array.at[repeat, 0, targets[0], offsets[0]].set(new[0], mode="drop")

        offsets = positions.reshape(lanes, rows, -1) % self.page
        changed = self._by_lane(lane, array)(array, new, targets, offsets)
        return (*stored[:slot], changed, *stored[slot + 1 :])

    def _by_lane(self, function: Callable[..., Array], array: Array) -> Callable[..., Array]:
        """Map a function of pages, new heads [D, n, T, K, H] and integers [D, n, T] over lanes and heads, so that no
        page travels."""
        if self.mesh is None:
            return function  # one lane
        spec = page_spec(array.shape, self.mesh, self.layout)
        by_lane = PartitionSpec(ROW_AXES)
        heads = PartitionSpec(ROW_AXES, None, None, "tensor" if "tensor" in spec else None)
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=(spec, heads, by_lane, by_lane), out_specs=spec, check_vma=False
        )

    def read(
        self, slot: int, repeat: int | Int[Array, ""]
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"] | None]:
        """Gather all pages of every row: a copy."""
        assert self.layout == "gather", "kernels read pages in place"
        keys, values = self.keys[slot], self.values[slot]
        assert keys is not None
        table = self.table(slot)
        return self._rows(keys, repeat, table), None if values is None else self._rows(values, repeat, table)

    def _rows(self, array: Array, repeat: int | Int[Array, ""], table: Int[Array, "D n W"]) -> Float[Array, "B K S H"]:
        def lane(array: Array, table: Array) -> Array:
            return array[repeat, table]

        pages = jax.vmap(lane, in_axes=(1, 0))(array, table)
        rows = pages.reshape(-1, self.width, *array.shape[4:]).swapaxes(1, 2)
        return rows if self.kind == "compute" else unpacked(rows, self.kind, self.dtype)


def page_spec(shape: Sequence[int], mesh: Mesh | AbstractMesh, layout: PageLayout) -> PartitionSpec:
    """Sharding of a pool of pages: lanes over the data axes, heads over `tensor` where it divides them."""
    dim = 3 if layout == "joined" else 4
    heads = shape[dim] // (2 if layout == "ragged" else 1)
    lead = None, ROW_AXES, *[None] * (dim - 2)
    return PartitionSpec(*lead, "tensor") if heads % mesh.shape["tensor"] == 0 else PartitionSpec(*lead)


def combined(
    keys: Float[Array, "*B K T H"], values: Float[Array, "*B K T Hv"] | None, layout: PageLayout
) -> Float[Array, "*B _K T _H"]:
    """Keys and values of each head as a kernel's pages have them, without padding: interleaved, or values behind the
    keys."""
    if layout == "joined":
        return keys if values is None else jnp.concatenate([keys, values], axis=-1)
    assert values is not None
    both = jnp.stack([keys, values], axis=-3)
    return both.reshape(*both.shape[:-4], -1, *both.shape[-2:])


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    """Window of each block of the stages' patterns; None where all positions are read, by it or by another block that
    reuses its keys."""
    attentions = [block.attention for stage in config.stages for block in stage.blocks]
    return tuple(None if isinstance(c, AttentionConfig) and c.keeps is not None else c.window for c in attentions)


def head_lanes(attention: AttentionConfig | LatentAttentionConfig) -> HeadLanes:
    """Lanes of a head in a page of `joined`."""
    if isinstance(attention, LatentAttentionConfig):
        return HeadLanes(keys=attention.kv_rank + attention.rope_dim, start=0, values=attention.kv_rank)
    size = attention.head_dim
    return HeadLanes(keys=size, start=size, values=size)


def check_decode_kernel(layout: str, config: ModelConfig, dtype: np.dtype, shards: int) -> None:
    """Raise ConfigError if the kernel of this layout does not serve the model with its heads split over `shards`."""
    if layout in KERNELS and (refusal := refusal_of_kernel(layout, config, dtype, shards)) is not None:
        others = [kernel for kernel in KERNELS if refusal_of_kernel(kernel, config, dtype, shards) is None]
        raise ConfigError(
            f"model.decode_attention: {layout!r} {refusal}; use {', '.join(['auto', *others, 'rows'])} or gather"
        )


def refusal_of_kernel(layout: str, config: ModelConfig, dtype: np.dtype, shards: int) -> str | None:
    """Return why the kernel of this layout does not serve the model with its heads split over `shards`; None where it
    does."""
    for c in (block.attention for block in config.blocks):
        if isinstance(c, AttentionConfig) and (c.keeps is not None or c.reuses is not None):
            return f"does not know the shared keys of {config.model_type}"
        if layout == "joined":
            continue
        if isinstance(c, LatentAttentionConfig):
            return f"does not know the latent attention of {config.model_type}"
        if c.sinks:
            return f"does not know the sinks of {config.model_type}"
        if (refusal := ragged_refusal(c.num_kv_heads, c.head_dim, dtype.itemsize, shards)) is not None:
            return refusal
    return None
