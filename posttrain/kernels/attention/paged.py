"""Paged attention of one new token per row: TPU's ragged kernel, that of `joined` heads, and their twins."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as tpu_kernel
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from posttrain.kernels.attention.call import Variant, single_query
from posttrain.kernels.attention.joined import LANES, HeadLanes, NewHeads, joined_attention, joined_reference, padded
from posttrain.kernels.platform import log_choice, platform_of
from posttrain.mesh import HEAD_AXIS, head_shards, row_axes

BLOCK_POSITIONS = 512
"""Positions of keys and values in a TPU's vector memory per block, double-buffered."""

BLOCK_ROWS = 32

WORD_BYTES = 4

TABLE_ENTRIES = 3 * 2**16
"""Page numbers in a TPU's scalar memory (1 MiB) at once."""


def ragged_refusal(num_kv_heads: int, head_dim: int, itemsize: int, shards: int) -> str | None:
    """Return why the ragged kernel does not support such heads, split over `shards`; None if it does: it reads them
    from a page in whole tiles, and several only of up to 128."""
    wide = padded(head_dim) > LANES
    if wide and itemsize >= WORD_BYTES:
        return f"reads heads of more than {LANES} in 16 bits only, got {head_dim} in {8 * itemsize}"
    heads = num_kv_heads // (shards if num_kv_heads % shards == 0 else 1)
    packing = WORD_BYTES // itemsize
    tiles = 2 * heads // packing
    whole = 2 * heads % packing == 0 and (tiles in (1, 2, 4, 8) or tiles % 8 == 0)
    if not whole or (heads > 1 and wide):
        return f"does not read {heads} key heads of {head_dim} from a page"
    return None


def paged_attention(
    q: Float[Array, "B 1 N H"],
    pages: Float[Array, "R D P *page"],
    repeat: Int[Array, ""],
    table: Int[Array, "D n W"],
    lengths: Int[Array, "D n"],
    mesh: Mesh | None,
    lanes: HeadLanes | None,
    new: NewHeads | None,
    sinks: Float[Array, " N"] | None,
    variant: Variant,
) -> tuple[Float[Array, "B 1 N Hv"], Float[Array, "R D P *page"]]:
    """softmax(scale q k) v over the first `lengths` positions of each row, at most the last `window` of them; and the
    pages, to which `new` heads are written.

    Pages: R layers, D lanes of rows, P pages of S positions. Keys and values of a head are interleaved, [S, 2 K, Hp],
    or joined with `lanes`, [K, S, Hp]. The rows of q are ordered by lane. The layer is encoded in the page numbers, so
    no layer is copied. If there is one head of keys, all devices read it, each with queries of its own.
    """
    platform = platform_of(mesh)
    kernel = "ragged" if new is None else "joined"
    log_choice("attention", kernel if platform == "tpu" else "gathered pages", "decode", platform)
    lane = partial(_lane, lanes=lanes, variant=variant, on_tpu=platform == "tpu")
    if mesh is None or mesh.size == 1:
        return lane(q, pages, repeat, table, lengths, new, sinks)
    rows, shards = row_axes(mesh), head_shards(mesh)
    kv_heads = pages.shape[4] // 2 if new is None else pages.shape[3]
    named = HEAD_AXIS if HEAD_AXIS in mesh.axis_names else None
    heads = named if kv_heads % shards == 0 else None
    shared = named if kv_heads == 1 and q.shape[2] % shards == 0 else heads
    queries, by_lane = PartitionSpec(rows, None, shared), PartitionSpec(rows)
    stored = PartitionSpec(None, rows, None, *((None, heads) if new is None else (heads,)))
    written = None if new is None else (PartitionSpec(rows, heads), PartitionSpec(rows))
    split = jax.shard_map(
        lane,
        mesh=mesh,
        in_specs=(queries, stored, PartitionSpec(), by_lane, by_lane, written, PartitionSpec(shared)),
        out_specs=(queries, stored),
        check_vma=False,
    )
    return split(q, pages, repeat, table, lengths, None if new is None else (new.heads, new.writes), sinks)


def _lane(
    q: Float[Array, "n 1 N H"],
    pages: Float[Array, "R 1 P *page"],
    repeat: Int[Array, ""],
    table: Int[Array, "1 n W"],
    lengths: Int[Array, "1 n"],
    new: tuple[Array, Array] | None,
    sinks: Float[Array, " N"] | None,
    *,
    lanes: HeadLanes | None,
    variant: Variant,
    on_tpu: bool,
) -> tuple[Float[Array, "n 1 N Hv"], Float[Array, "R 1 P *page"]]:
    rows, _, _, head_dim = q.shape
    count, page = pages.shape[2], pages.shape[3:]
    here, start = recent_pages(table[0], lengths[0], page[0 if new is None else 1], variant.window)
    here, lengths, flat = here + repeat * count, lengths[0] - start, pages.reshape(-1, *page)
    at_once = max(1, TABLE_ENTRIES // here.shape[1])
    outs = []
    for some in (slice(first, first + at_once) for first in range(0, rows, at_once)):
        if new is None or lanes is None:
            assert sinks is None, "ragged paged attention does not support sinks"
            padding = [(0, 0)] * 2 + [(0, page[-1] - head_dim)]
            padded_q = jnp.pad(q[some, 0], padding).astype(pages.dtype)
            attend = _ragged if on_tpu else gathered
            out = attend(padded_q, flat, here[some], lengths[some], variant)[..., :head_dim]
        else:
            serve = joined_attention if on_tpu else joined_reference
            part = NewHeads(*(x[some] for x in new))
            out, flat = serve(q[some, 0], part, flat, here[some], lengths[some], sinks, lanes, variant)
        outs.append(out)
    out = outs[0] if len(outs) == 1 else jnp.concatenate(outs)
    return out[:, None].astype(q.dtype), flat.reshape(pages.shape)


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


def _ragged(
    q: Float[Array, "n N Hp"],
    pages: Float[Array, "P S K2 Hp"],
    table: Int[Array, "n W"],
    lengths: Int[Array, " n"],
    variant: Variant,
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
        num_kv_pages_per_block=min(table.shape[1], BLOCK_POSITIONS // pages.shape[1]),
        num_queries_per_block=min(rows, BLOCK_ROWS),
    )
    return out


def gathered(
    q: Float[Array, "n N Hp"],
    pages: Float[Array, "P S K2 Hp"],
    table: Int[Array, "n W"],
    lengths: Int[Array, " n"],
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
