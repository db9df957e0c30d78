"""The paged cache on the device: blocks that decoding reads in place, or copies into rows for a dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Float, Int, Shaped

from posttrain.config import ROW_AXES, CacheDtype, DecodeAttention
from posttrain.errors import ConfigError
from posttrain.kernels.attention.joined import HeadLanes, padded
from posttrain.kernels.platform import platform_of
from posttrain.mesh import head_shards, row_shards
from posttrain.models.cache import (
    KERNELS,
    KVCache,
    PagedCache,
    PageLayout,
    check_decode_kernel,
    combined,
    empty_cache,
    head_lanes,
    page_spec,
    refusal_of_kernel,
    windows_of,
)
from posttrain.models.config import Compute, LatentAttentionConfig, ModelConfig
from posttrain.models.quant import EXPONENT_BYTES, packed, unpacked
from posttrain.rollout.blocks import BLOCK
from posttrain.tree import pytree, replace, static

Layout = Literal["rows"] | PageLayout
"""Cache layout for decoding. `rows`: rows copied out of the blocks once per dispatch. `gather`: each layer gathers its
blocks at every token. `ragged` and `joined`: in place, by a TPU kernel."""


@pytree
class Pool:
    """P blocks of keys and values in each of D lanes: [R, D, P, *block]. For `rows` a block is what `KVCache` has of a
    row, with its order of dimensions; for `gather` it is [BLOCK, K, H]; for the others `keys` holds both, [BLOCK, 2 K,
    Hp] for `ragged` and [K, BLOCK, Hp] for `joined`. A lane is a shard of the data axes: its rows use its blocks only,
    so that decoding needs no communication between lanes. `windowed` layers may have fewer blocks, with numbers of
    their own: G = 2 tables for each row, that of all positions and that of the window.

    Other fields as in `KVCache`.
    """

    keys: tuple[Shaped[Array, "_R D _P *_block"] | None, ...]
    values: tuple[Shaped[Array, "_R D _P _1 _2 _H"] | None, ...]
    layout: Layout = static()
    heads: tuple[HeadLanes | None, ...] = static()
    """Sizes of a head, without padding."""
    kind: CacheDtype = static()
    """Type of the numbers in the blocks, see `packed`."""
    dtype: jnp.dtype = static()
    """Type of the keys and values of rows."""
    windowed: tuple[bool, ...] = static()
    """Blocks of the pattern that only keep a window."""

    def gather(self, tables: Int[Array, "D n G W"]) -> KVCache:
        """Rows of W blocks each. Attention reads every row whole at every token: blocks next to each other cost a
        copy now and nothing then."""

        def gathered(stored: Array, table: Int[Array, "D n W"], last: bool | None = False) -> Array:
            def lane(blocks: Array, table: Array) -> Array:
                return self._rows(blocks[:, table], last=bool(last))

            rows = jax.vmap(lane, in_axes=(1, 0), out_axes=1)(stored, table)
            rows = rows.reshape(stored.shape[0], -1, *rows.shape[3:])
            if self.kind == "compute":
                return rows
            return _along(-2 if last else -1, lambda x: unpacked(x, self.kind, self.dtype), rows)

        each = self._of_each(tables)
        if self.layout in KERNELS:
            pairs = [
                (None, None) if keys is None or head is None else _split(gathered(keys, table), head, self.layout)
                for keys, head, table in zip(self.keys, self.heads, each, strict=True)
            ]
            return KVCache(keys=tuple(keys for keys, _ in pairs), values=tuple(values for _, values in pairs))
        keys = _mapped(gathered, self.keys, each, self._last)
        return KVCache(keys=keys, values=_mapped(gathered, self.values, each), kind=self.kind)

    def _of_each(self, both: Int[Array, "D n G *M"]) -> list[Int[Array, "D n *M"]]:
        """Numbers that each block of the pattern goes by."""
        return [both[:, :, int(windowed)] for windowed in self.windowed]

    @property
    def _last(self) -> tuple[bool | None, ...]:
        """Keys that `KVCache` stores with positions last."""
        return tuple(None if k is None else v is not None for k, v in zip(self.keys, self.values, strict=True))

    def scatter(
        self, rows: KVCache, first: Int[Array, "D n"], targets: Int[Array, "D n G M"], mesh: Mesh | None
    ) -> Pool:
        """Blocks `first`, `first` + 1, ... of each row into the blocks `targets`, which differ within a lane; what is
        out of range is left out."""
        lanes, per_lane, _, count = targets.shape
        indices = first[:, :, None] + jnp.arange(count)[None, None]

        def scattered(stored: Array, new: Array, targets: Int[Array, "D n M"], last: bool | None = False) -> Array:
            def lane(rows: Array, indices: Array) -> Array:
                axis = 4 if last else 3
                split = rows.reshape(*rows.shape[:axis], -1, BLOCK, *rows.shape[axis + 1 :])
                places = jnp.minimum(indices, split.shape[axis] - 1)
                take = jax.vmap(lambda row, places: jnp.take(row, places, axis=axis - 1), in_axes=(1, 0), out_axes=1)
                chosen = take(split, places)
                if self.kind != "compute":
                    chosen = _along(-3 if last else -1, lambda x: packed(x, self.kind), chosen)
                return self._blocks(chosen, last=bool(last))

            new = new.reshape(new.shape[0], lanes, per_lane, *new.shape[2:])
            new = jax.vmap(lane, in_axes=(1, 0), out_axes=1)(new, indices)
            if self.layout != "rows":
                new = new.reshape(*new.shape[:2], -1, *new.shape[4:])
                return self._written(stored, new.astype(stored.dtype), targets.reshape(lanes, -1), mesh)
            put = jax.vmap(lambda blocks, new, targets: blocks.at[:, targets].set(new, mode="drop"), (1, 1, 0), 1)
            return put(stored, new, targets)

        def both(stored: Array, keys: Array, values: Array | None, targets: Int[Array, "D n M"]) -> Array:
            assert self.layout != "rows"
            new = combined(keys if values is None else keys.swapaxes(3, 4), values, self.layout)
            return scattered(stored, jnp.pad(new, [(0, 0)] * 4 + [(0, stored.shape[-1] - new.shape[-1])]), targets)

        each = self._of_each(targets)
        if self.layout in KERNELS:
            return replace(self, keys=_mapped(both, self.keys, rows.keys, rows.values, each))
        return replace(
            self,
            keys=_mapped(scattered, self.keys, rows.keys, each, self._last),
            values=_mapped(scattered, self.values, rows.values, each),
        )

    def opened(
        self,
        context: Int[Array, "D n G W"],
        first: Int[Array, "D n"],
        targets: Int[Array, "D n G M"],
        mesh: Mesh | None,
    ) -> KVCache | PagedCache:
        """Open the cache for decoding: rows of the blocks `context`; block `first` and later ones are written to the
        blocks `targets`."""
        if (layout := self.layout) == "rows":
            return self.gather(context)
        targets = targets[:, :, : context.shape[2]]
        places = first[:, :, None, None] + jnp.arange(targets.shape[3])[None, None, None]
        places = jnp.where(targets < self._sizes(context.shape[2])[None, None], places, context.shape[3])
        put = jax.vmap(jax.vmap(jax.vmap(lambda row, places, new: row.at[places].set(new, mode="drop"))))
        # A row writes on in a block of its own, whose beginning others may share.
        shared = jnp.take_along_axis(context, first[:, :, None, None], axis=3)[..., 0]

        def copied(stored: Array, old: Int[Array, "D n"], new: Int[Array, "D n"]) -> Array:
            return self._copied(stored, old, new, mesh)

        moved = self._of_each(shared), self._of_each(targets[..., 0])
        return PagedCache(
            keys=_mapped(copied, self.keys, *moved),
            values=_mapped(copied, self.values, *moved),
            tables=put(context, places, targets),
            first=first,
            targets=targets,
            windowed=self.windowed,
            layout=layout,
            kind=self.kind,
            dtype=self.dtype,
            mesh=mesh,
        )

    def _sizes(self, count: int) -> Int[np.ndarray, "G 1"]:
        """Blocks in a lane, by the table that they are in."""
        sizes = np.zeros((count, 1), np.int32)
        for keys, windowed in zip(self.keys, self.windowed, strict=True):
            if keys is not None:
                sizes[int(windowed)] = keys.shape[2]
        return sizes

    def _copied(self, stored: Array, old: Int[Array, "D n"], new: Int[Array, "D n"], mesh: Mesh | None) -> Array:
        """Copy blocks `old` to `new` where these are others and in range."""
        platform = platform_of(mesh)

        def lane(stored: Array, old: Int[Array, "1 n"], new: Int[Array, "1 n"]) -> Array:
            return _placed(stored, None, old[0], jnp.where(old[0] == new[0], stored.shape[2], new[0]), platform)

        return self._by_lane(lane, stored, mesh, old, new)

    def _written(self, stored: Array, blocks: Array, targets: Int[Array, "D n"], mesh: Mesh | None) -> Array:
        """Write blocks [R, D, n, *block] to `targets` in range."""
        platform = platform_of(mesh)

        def lane(stored: Array, targets: Int[Array, "1 n"], blocks: Array) -> Array:
            return _placed(stored, blocks, jnp.arange(blocks.shape[2]), targets[0], platform)

        return self._by_lane(lane, stored, mesh, targets, blocks=blocks)

    def _by_lane(
        self,
        function: Callable[..., Array],
        stored: Array,
        mesh: Mesh | None,
        *integers: Int[Array, "D n"],
        blocks: Array | None = None,
    ) -> Array:
        others = integers if blocks is None else (*integers, blocks)
        if mesh is None:
            return function(stored, *others)
        spec, by_lane = _pool_spec(stored.shape, mesh, self.layout), PartitionSpec(ROW_AXES)
        specs = (spec, *[by_lane] * len(integers), *[spec] * (len(others) - len(integers)))
        split = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
        written: Array = split(stored, *others)
        return written

    def closed(self, cache: KVCache | PagedCache, first: Int[Array, "D n"], targets: Int[Array, "D n G M"]) -> Pool:
        """After decoding on what `opened` returned."""
        if isinstance(cache, KVCache):
            return self.scatter(cache, first, targets, None)
        return replace(self, keys=cache.keys, values=cache.values)

    def _rows(self, blocks: Shaped[Array, "R n W *_block"], *, last: bool) -> Shaped[Array, "R n K _4 _5"]:
        """Blocks side by side: [K, S, H], or with positions `last` [K, H, S]."""
        repeats, rows, _, *block = blocks.shape
        if self.layout in ("gather", "ragged"):
            joined = blocks.reshape(repeats, rows, -1, *block[1:])
            return jnp.moveaxis(joined, 2, 4 if last else 3)
        if last:
            return jnp.moveaxis(blocks, 2, 4).reshape(repeats, rows, *block[:2], -1)
        return blocks.swapaxes(2, 3).reshape(repeats, rows, block[0], -1, block[2])

    def _blocks(self, split: Shaped[Array, "R n K _1 _2 _3"], *, last: bool) -> Shaped[Array, "R n M _4 _5 _6"]:
        """Split rows into blocks, from [K, M, BLOCK, H], or with positions `last` from [K, H, M, BLOCK]."""
        if self.layout in ("rows", "joined"):
            return jnp.moveaxis(split, 4 if last else 3, 2)
        return split.transpose(0, 1, 4, 5, 2, 3) if last else jnp.moveaxis(split, 2, 4)


def _mapped(function: Callable[..., Array], arrays: Sequence[Array | None], *others: Sequence[Any]) -> tuple[Any, ...]:
    """Apply a function to the arrays that there are, each with its others."""
    return tuple(x if x is None else function(x, *rest) for x, *rest in zip(arrays, *others, strict=True))


def _split(
    both: Float[Array, "R B _K S Hp"], head: HeadLanes, layout: Layout
) -> tuple[Float[Array, "R B K _1 _2"], Float[Array, "R B K S Hv"] | None]:
    """Keys and values as `KVCache` has them, of pages of a kernel."""
    if layout == "ragged":
        return both[:, :, 0::2, :, : head.keys].swapaxes(3, 4), both[:, :, 1::2, :, : head.values]
    if head.start < head.keys:
        return both[..., : head.keys], None
    return both[..., : head.keys].swapaxes(3, 4), both[..., head.start : head.start + head.values]


def _placed(stored: Array, blocks: Array | None, old: Int[Array, " n"], new: Int[Array, " n"], platform: str) -> Array:
    """Copy `blocks` of numbers `old`, or the pool's own, to `new` where these are in range.

    On GPU by one scatter, since each turn of a loop waits for the host. Else in a loop: for a scatter XLA:TPU would lay
    out the whole pool anew, and back.
    """
    if platform == "gpu":
        source = stored if blocks is None else blocks
        return stored.at[:, 0, new].set(source[:, 0, old], mode="drop")
    within = new < stored.shape[2]
    order = jnp.argsort(~within)
    size = (stored.shape[0], 1, 1, *stored.shape[3:])

    def copy(index: Array, stored: Array) -> Array:
        row = order[index]
        block = jax.lax.dynamic_slice(stored if blocks is None else blocks, _start(old[row], stored), size)
        return jax.lax.dynamic_update_slice(stored, block, _start(new[row], stored))

    return jax.lax.fori_loop(0, jnp.sum(within), copy, stored)


def _start(block: Int[Array, ""], stored: Array) -> tuple[Array | int, ...]:
    return (0, 0, block, *[0] * (stored.ndim - 3))


def _along(axis: int, function: Callable[[Array], Array], x: Array) -> Array:
    """Apply a function of vectors along an axis."""
    return jnp.moveaxis(function(jnp.moveaxis(x, axis, -1)), -1, axis)


def choose_layout(
    wanted: DecodeAttention, config: ModelConfig, compute: Compute, mesh: Mesh | None, kind: CacheDtype = "compute"
) -> Layout:
    """The fastest that serves the model on the platform, or the one that was asked for: ConfigError if it cannot."""
    layout = _layout(wanted, config, compute, mesh, kind)
    if kind != "compute" and any(isinstance(block.attention, LatentAttentionConfig) for block in config.blocks):
        raise ConfigError(f"rollout.cache_dtype={kind}: latent attention keeps latents in compute only; remove it")
    if kind != "compute" and layout in KERNELS:
        raise ConfigError(
            f"rollout.cache_dtype={kind}: TPU's kernels read keys and values in compute only; remove it, or set "
            "model.decode_attention: gather"
        )
    return layout


def _layout(
    wanted: DecodeAttention, config: ModelConfig, compute: Compute, mesh: Mesh | None, kind: CacheDtype
) -> Layout:
    mesh = compute.mesh if mesh is None else mesh
    check_decode_kernel(wanted, config, compute.dtype, head_shards(mesh))
    if wanted != "auto":
        return wanted
    platform = platform_of(mesh)
    if platform != "tpu":
        # A copy in `compute` would undo what a cache of 8 bits saves of a GPU's memory.
        return "rows" if platform == "cpu" or kind == "compute" else "gather"
    for kernel in _preferred(config):
        if refusal_of_kernel(kernel, config, compute.dtype, head_shards(mesh)) is None:
            return kernel
    return "gather"


def _preferred(config: ModelConfig) -> tuple[PageLayout, PageLayout]:
    """The kernels, the one of joined heads first where it takes fewer bytes: the other pads keys and values apart."""
    heads = [head_lanes(block.attention) for block in config.blocks]
    narrow = any(head.width < 2 * padded(head.keys) for head in heads)
    return ("joined", "ragged") if narrow else ("ragged", "joined")


def empty_pool(shapes: Pool) -> Pool:
    """Zeros of the shapes and shardings of `pool_shapes`."""
    pool: Pool = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)
    return pool


def pool_shapes(
    config: ModelConfig,
    dtype: jnp.dtype,
    placement: Sharding,
    *,
    layout: Layout,
    lanes: int,
    blocks: int,
    window_blocks: int | None = None,
    kind: CacheDtype = "compute",
) -> Pool:
    """Shapes of a pool where the weights are: lanes over the data axes, heads over `tensor` where they divide.
    `window_blocks`: those of layers with a window; None: as many as others."""
    like = jax.eval_shape(lambda: empty_cache(config, lanes * blocks, BLOCK, dtype))
    mesh = placement.mesh if isinstance(placement, NamedSharding) else None

    def placed(
        rows: jax.ShapeDtypeStruct, head: HeadLanes, windowed: bool, size: int, last: bool = False
    ) -> jax.ShapeDtypeStruct:
        repeats, heads = rows.shape[0], rows.shape[2]
        block = {
            "rows": rows.shape[2:],
            "gather": (BLOCK, heads, size),
            "ragged": (BLOCK, 2 * heads, padded(head.keys)),
            "joined": (heads, BLOCK, head.width),
        }[layout]
        if kind != "compute":
            at = 1 if last and layout == "rows" else 2
            block = (*block[:at], block[at] + EXPONENT_BYTES, *block[at + 1 :])
        shape = (repeats, lanes, window_blocks if windowed else blocks, *block)
        place = placement if mesh is None else NamedSharding(mesh, _pool_spec(shape, mesh, layout))
        return jax.ShapeDtypeStruct(shape, rows.dtype if kind == "compute" else jnp.int8, sharding=place)

    attentions = [block.attention for stage in config.stages for block in stage.blocks]
    heads = tuple(None if keys is None else head_lanes(c) for keys, c in zip(like.keys, attentions, strict=True))
    windowed = tuple(window_blocks is not None and window is not None for window in windows_of(config))

    def each(arrays: Sequence[Any], values: bool) -> tuple[Any, ...]:
        return tuple(
            x and head and placed(x, head, narrow, head.values if values else head.keys, last=not values)
            for x, head, narrow in zip(arrays, heads, windowed, strict=True)
        )

    keys = each(like.keys, False)
    values = each((None,) * len(heads) if layout in KERNELS else like.values, True)

    def zeros() -> Pool:
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (keys, values))
        of: dict[str, Any] = {"layout": layout, "heads": heads, "kind": kind, "dtype": dtype, "windowed": windowed}
        return Pool(keys=blank[0], values=blank[1], **of)

    pool: Pool = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(zeros)), jax.tree.leaves((keys, values)))
    return pool


def num_lanes(mesh: Mesh | None) -> int:
    """One for each shard of the data axes."""
    return 1 if mesh is None else row_shards(mesh)


def _pool_spec(shape: Sequence[int], mesh: Mesh | AbstractMesh, layout: Layout) -> PartitionSpec:
    if layout != "rows":
        return page_spec(shape, mesh, layout)
    lanes = None, ROW_AXES, None
    return PartitionSpec(*lanes, "tensor") if shape[3] % mesh.shape["tensor"] == 0 else PartitionSpec(*lanes)
