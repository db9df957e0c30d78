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

from posttrain.kernels.attention.call import Variant
from posttrain.kernels.attention.reference import single_query
from posttrain.kernels.platform import HEAD_AXIS, head_shards, log_choice, platform_of, row_axes

LANES = 128
"""Alignment of the head dimension, as a TPU pads it anyway."""

BLOCK_POSITIONS = 512
"""Positions of keys and values in a TPU's vector memory per block, double-buffered."""

BLOCK_ROWS = 32

WORD_BYTES = 4


def ragged_refusal(num_kv_heads: int, itemsize: int, shards: int) -> str | None:
    """Return why the ragged kernel does not support this many KV heads over `shards` devices; None if it does."""
    heads = 2 * num_kv_heads // (shards if num_kv_heads % shards == 0 else 1)
    packing = WORD_BYTES // itemsize
    tiles = heads // packing
    if heads % packing or not (tiles in (1, 2, 4, 8) or tiles % 8 == 0):
        return f"needs 1, 2, 4 or a multiple of 8 tiles of key and value heads on a device, got {heads} heads"
    return None


def padded_head(head_dim: int) -> int:
    return LANES * math.ceil(head_dim / LANES)


def ragged_paged_attention(
    q: Float[Array, "B 1 N H"],
    pages: Float[Array, "R D P S K2 Hp"],
    repeat: Int[Array, ""],
    table: Int[Array, "D n W"],
    lengths: Int[Array, "D n"],
    mesh: Mesh | None,
    variant: Variant,
) -> Float[Array, "B 1 N H"]:
    """softmax(scale q k) v over the first `lengths` positions of each row, at most the last `window` of them.

    Pages: R layers, D lanes of rows, P pages of S positions, keys and values of a head interleaved. The rows of q are
    ordered by lane. The layer is encoded in the page numbers, so no layer is copied.
    """
    platform = platform_of(mesh)
    log_choice("attention", "ragged" if platform == "tpu" else "gathered pages", "decode", platform)
    lane = partial(_lane, variant=variant, on_tpu=platform == "tpu")
    if mesh is None or mesh.size == 1:
        return lane(q, pages, repeat, table, lengths)
    rows = row_axes(mesh)
    divides = pages.shape[4] // 2 % head_shards(mesh) == 0
    heads = HEAD_AXIS if HEAD_AXIS in mesh.axis_names and divides else None
    queries, by_lane = PartitionSpec(rows, None, heads), PartitionSpec(rows)
    split = jax.shard_map(
        lane,
        mesh=mesh,
        in_specs=(queries, PartitionSpec(None, rows, None, None, heads), PartitionSpec(), by_lane, by_lane),
        out_specs=queries,
        check_vma=False,
    )
    return split(q, pages, repeat, table, lengths)


def _lane(
    q: Float[Array, "n 1 N H"],
    pages: Float[Array, "R 1 P S K2 Hp"],
    repeat: Int[Array, ""],
    table: Int[Array, "1 n W"],
    lengths: Int[Array, "1 n"],
    *,
    variant: Variant,
    on_tpu: bool,
) -> Float[Array, "n 1 N H"]:
    head_dim = q.shape[3]
    repeats, _, count, *page = pages.shape
    flat = pages.reshape(repeats * count, *page)
    padded = jnp.pad(q[:, 0], ((0, 0), (0, 0), (0, page[-1] - head_dim)))
    width = table.shape[2]
    attend = partial(_on_tpu, pages_per_block=min(width, BLOCK_POSITIONS // page[0])) if on_tpu else gathered
    out = attend(padded.astype(pages.dtype), flat, lengths[0], table[0] + repeat * count, variant)
    return out[:, None, :, :head_dim].astype(q.dtype)


def _on_tpu(
    q: Float[Array, "n N Hp"],
    pages: Float[Array, "P S K2 Hp"],
    lengths: Int[Array, " n"],
    table: Int[Array, "n W"],
    variant: Variant,
    *,
    pages_per_block: int,
) -> Float[Array, "n N Hp"]:
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
        num_kv_pages_per_block=pages_per_block,
        num_queries_per_block=min(rows, BLOCK_ROWS),
    )
    return out


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
