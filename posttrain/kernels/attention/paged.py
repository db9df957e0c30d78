"""Paged attention of one new token per row: TPU's ragged kernel, and a reference that gathers the pages."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as tpu_kernel
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from posttrain.kernels.attention.call import Variant, single_query
from posttrain.kernels.platform import log_choice, platform_of
from posttrain.mesh import HEAD_AXIS, head_shards, row_axes

LANES = 128
"""Alignment of the head dimension, as a TPU pads it anyway."""

BLOCK_POSITIONS = 512
"""Positions of keys and values in a TPU's vector memory per block, double-buffered."""

BLOCK_ROWS = 32

WORD_BYTES = 4

TABLE_ENTRIES = 3 * 2**16
"""Page numbers in a TPU's scalar memory (1 MiB) at once."""


def ragged_refusal(head_dim: int, itemsize: int) -> str | None:
    """Return why the ragged kernel does not support heads of this size; None if it does."""
    if padded_head(head_dim) > LANES and itemsize >= WORD_BYTES:
        return f"reads heads of more than {LANES} in 16 bits only, got {head_dim} in {8 * itemsize}"
    return None


def heads_apart(num_kv_heads: int, head_dim: int, itemsize: int, shards: int) -> bool:
    """Return True where a page holds one head: the kernel reads more of them from a page only in whole tiles, and only
    those of up to 128."""
    heads = 2 * num_kv_heads // (shards if num_kv_heads % shards == 0 else 1)
    packing = WORD_BYTES // itemsize
    tiles = heads // packing
    whole = heads % packing == 0 and (tiles in (1, 2, 4, 8) or tiles % 8 == 0)
    return not whole or (heads > 2 and padded_head(head_dim) > LANES)


def padded_head(head_dim: int) -> int:
    return LANES * math.ceil(head_dim / LANES)


def ragged_paged_attention(
    q: Float[Array, "B 1 N H"],
    pages: Float[Array, "R D P *page"],
    repeat: Int[Array, ""],
    table: Int[Array, "D n W"],
    lengths: Int[Array, "D n"],
    mesh: Mesh | None,
    variant: Variant,
) -> Float[Array, "B 1 N H"]:
    """softmax(scale q k) v over the first `lengths` positions of each row, at most the last `window` of them.

    Pages: R layers, D lanes of rows, P pages of S positions, keys and values of a head interleaved: [S, 2 K, Hp], or
    with heads apart [K, S, 2, Hp], where a head of a row counts as a row. The rows of q are ordered by lane. The layer
    is encoded in the page numbers, so no layer is copied.
    """
    platform = platform_of(mesh)
    log_choice("attention", "ragged" if platform == "tpu" else "gathered pages", "decode", platform)
    lane = partial(_lane, variant=variant, on_tpu=platform == "tpu")
    if mesh is None or mesh.size == 1:
        return lane(q, pages, repeat, table, lengths)
    rows = row_axes(mesh)
    apart = pages.ndim == 7
    divides = (pages.shape[3] if apart else pages.shape[4] // 2) % head_shards(mesh) == 0
    heads = HEAD_AXIS if HEAD_AXIS in mesh.axis_names and divides else None
    queries, by_lane = PartitionSpec(rows, None, heads), PartitionSpec(rows)
    place = (heads,) if apart else (None, heads)
    split = jax.shard_map(
        lane,
        mesh=mesh,
        in_specs=(queries, PartitionSpec(None, rows, None, *place), PartitionSpec(), by_lane, by_lane),
        out_specs=queries,
        check_vma=False,
    )
    return split(q, pages, repeat, table, lengths)


def _lane(
    q: Float[Array, "n 1 N H"],
    pages: Float[Array, "R 1 P *page"],
    repeat: Int[Array, ""],
    table: Int[Array, "1 n W"],
    lengths: Int[Array, "1 n"],
    *,
    variant: Variant,
    on_tpu: bool,
) -> Float[Array, "n 1 N H"]:
    rows, _, num_heads, head_dim = q.shape
    count, page = pages.shape[2], pages.shape[-3:]
    here, start = recent_pages(table[0], lengths[0], pages.shape[-3], variant.window)
    here, lengths = here + repeat * count, lengths[0] - start
    padded = jnp.pad(q[:, 0], ((0, 0), (0, 0), (0, page[-1] - head_dim))).astype(pages.dtype)
    if pages.ndim == 7:
        kv_heads = pages.shape[3]
        padded = padded.reshape(rows * kv_heads, num_heads // kv_heads, page[-1])
        here = (here[:, None] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]).reshape(
            -1, here.shape[1]
        )
        lengths = jnp.repeat(lengths, kv_heads)
    attend = _on_tpu if on_tpu else gathered
    out = attend(padded, pages.reshape(-1, *page), lengths, here, variant)
    return out.reshape(rows, 1, num_heads, -1)[..., :head_dim].astype(q.dtype)


def recent_pages(
    table: Int[Array, "*R W"], lengths: Int[Array, "*R"], size: int, window: int | None
) -> tuple[Int[Array, "*R V"], Int[Array, "*R"]]:
    """The pages of `size` positions that hold the last `window` of each row's `lengths`, and where the first begins:
    a window reads no more of a long row."""
    pages = table.shape[-1] if window is None else (window + 2 * size - 2) // size
    if window is None or pages >= table.shape[-1]:
        return table, jnp.zeros_like(lengths)
    first = jnp.maximum(lengths - window, 0) // size
    places = first[..., None] + jnp.arange(pages, dtype=first.dtype).reshape(*[1] * first.ndim, pages)
    return jnp.take_along_axis(table, places, axis=-1, mode="clip"), first * size


def _on_tpu(
    q: Float[Array, "n N Hp"],
    pages: Float[Array, "P S K2 Hp"],
    lengths: Int[Array, " n"],
    table: Int[Array, "n W"],
    variant: Variant,
) -> Float[Array, "n N Hp"]:
    width = table.shape[1]

    def some(q: Array, lengths: Array, table: Array) -> Array:
        rows = q.shape[0]
        out: Array = tpu_kernel(
            q,
            pages,
            lengths,
            table,
            jnp.arange(rows + 1, dtype=jnp.int32),  # one query of each row
            jnp.full(1, rows, jnp.int32),
            sm_scale=variant.scale,
            sliding_window=variant.window,
            soft_cap=variant.soft_cap,
            num_kv_pages_per_block=min(width, BLOCK_POSITIONS // pages.shape[1]),
            num_queries_per_block=min(rows, BLOCK_ROWS),
        )
        return out

    at_once = max(1, TABLE_ENTRIES // width)
    parts = [slice(start, start + at_once) for start in range(0, q.shape[0], at_once)]
    outs = [some(q[part], lengths[part], table[part]) for part in parts]
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs)


def gathered(
    q: Float[Array, "n N Hp"],
    pages: Float[Array, "P S K2 Hp"],
    lengths: Int[Array, " n"],
    table: Int[Array, "n W"],
    variant: Variant,
) -> Float[Array, "n N Hp"]:
    """Reference implementation of the ragged kernel: gather the pages, then attend."""
    rows = q.shape[0]
    kv = pages[table].reshape(rows, -1, *pages.shape[2:]).swapaxes(1, 2)
    behind = lengths[:, None] - 1 - jnp.arange(kv.shape[2], dtype=jnp.int32)[None]
    mask = behind >= 0 if variant.window is None else (behind >= 0) & (behind < variant.window)
    keys, values = kv[:, 0::2], kv[:, 1::2]
    out = single_query(q[:, None], keys, values, mask, scale=variant.scale, soft_cap=variant.soft_cap, sinks=None)
    return out[:, 0]
