"""Attention of one new token per row to pages that a table names: TPU's kernel, and its twin that gathers them."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as tpu_kernel
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from posttrain.kernels.attention.reference import single_query
from posttrain.kernels.attention.request import Variant
from posttrain.kernels.platform import HEAD_AXIS, head_shards, log_choice, platform_of, row_axes

LANES = 128
"""Numbers of a head are padded to a multiple of it, as a TPU lays them out anyway."""

BLOCK_POSITIONS = 512
"""Of keys and values that are in a TPU's vector memory at once, twice: while one block is used the next one comes."""

BLOCK_ROWS = 32

WORD_BYTES = 4


def ragged_refusal(num_kv_heads: int, itemsize: int, shards: int) -> str | None:
    """Why the kernel does not take pages of so many heads, which `shards` devices share; None where it does."""
    heads = 2 * num_kv_heads // (shards if num_kv_heads % shards == 0 else 1)
    packing = WORD_BYTES // itemsize
    tiles = heads // packing
    if heads % packing or not (tiles in (1, 2, 4, 8) or tiles % 8 == 0):
        return f"takes 1, 2, 4 or a multiple of 8 tiles of key and value heads on a device, got {heads} heads"
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

    Of R layers, in D lanes of rows, P pages of S positions with keys and values of a head side by side; q's rows are
    those of lane 0 first. The layer is a part of the page numbers: no layer is copied.
    """
    platform = platform_of(mesh)
    log_choice("attention", "ragged" if platform == "tpu" else "ragged's twin", "decode", platform)
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
    attend = partial(_on_tpu, pages_per_block=min(width, BLOCK_POSITIONS // page[0])) if on_tpu else twin
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


def twin(
    q: Float[Array, "n N Hp"],
    pages: Float[Array, "P S K2 Hp"],
    lengths: Int[Array, " n"],
    table: Int[Array, "n W"],
    variant: Variant,
) -> Float[Array, "n N Hp"]:
    """The same of gathered pages."""
    rows = q.shape[0]
    found = pages[table].reshape(rows, -1, *pages.shape[2:]).swapaxes(1, 2)
    behind = lengths[:, None] - 1 - jnp.arange(found.shape[2], dtype=jnp.int32)[None]
    mask = behind >= 0 if variant.window is None else (behind >= 0) & (behind < variant.window)
    keys, values = found[:, 0::2], found[:, 1::2]
    out = single_query(q[:, None], keys, values, mask, scale=variant.scale, soft_cap=variant.soft_cap, sinks=None)
    return out[:, 0]
