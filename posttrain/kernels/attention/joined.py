"""Paged attention of one new token per row, which it also stores: a TPU kernel, and its twin."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Bool, Float, Int

from posttrain.kernels.attention.call import MASKED, Variant, capped, single_query

LANES = 128
"""Alignment of the last dimension, as a TPU pads it anyway."""

BLOCK_BYTES = 1 << 20
"""Pages in a TPU's vector memory per block, of which there are two."""

BLOCK_POSITIONS = 1024


@dataclass(frozen=True, kw_only=True)
class HeadLanes:
    """Lanes of one head in a row of a page: keys from the first on, values from `start` on, behind the keys or, in
    latent attention (arXiv:2405.04434), among them. Queries are zero where there is no key, so that a head of 64 fills
    the 128 lanes that a TPU reads anyway."""

    keys: int
    start: int
    values: int

    @property
    def width(self) -> int:
        return padded(max(self.keys, self.start + self.values))


def padded(lanes: int) -> int:
    """Lanes in whole registers."""
    return LANES * math.ceil(lanes / LANES)


class NewHeads(NamedTuple):
    """Keys and values of the newest position of each row, or of T, as a page has them, and whether they are written."""

    heads: Float[Array, "n K *T Hp"]
    writes: Bool[Array, "n ..."]


def joined_attention(
    q: Float[Array, "n N Hk"],
    new: NewHeads,
    pages: Float[Array, "P K S Hp"],
    table: Int[Array, "n W"],
    lengths: Int[Array, " n"],
    sinks: Float[Array, " N"] | None,
    lanes: HeadLanes,
    variant: Variant,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "n N Hv"], Float[Array, "P K S Hp"]]:
    """softmax(scale q k) v over the first `lengths` positions of each row, at most the last `window` of them; and the
    pages with the last of these positions written.

    Grid: rows. A block of pages is copied while the one before is computed, across rows too; of a row only the pages
    that hold positions are copied. A scatter instead would have XLA lay out all pages anew.
    """
    rows, num_heads, _ = q.shape
    kv_heads, size, width = pages.shape[1:]
    groups, keys = num_heads // kv_heads, padded(lanes.keys)
    first, stop = lanes.start // LANES * LANES, padded(lanes.start + lanes.values)
    q = jnp.pad(q, [(0, 0)] * 2 + [(0, keys - lanes.keys)]).reshape(rows, kv_heads, groups, keys).astype(pages.dtype)
    position_bytes = kv_heads * width * pages.dtype.itemsize
    positions = max(LANES, min(BLOCK_POSITIONS, BLOCK_BYTES // position_bytes) // LANES * LANES)
    block = min(table.shape[1], max(1, positions // size))

    def row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda row, *_: (row, 0, 0, 0))

    inputs, specs = (
        [q, new.heads[:, :, None].astype(pages.dtype)],
        [row(kv_heads, groups, keys), row(kv_heads, 1, width)],
    )
    if sinks is not None:
        inputs.append(sinks.astype(jnp.float32).reshape(kv_heads, groups, 1))
        specs.append(pl.BlockSpec((kv_heads, groups, 1), lambda row, *_: (0, 0, 0)))
    stored = pl.BlockSpec(memory_space=pl.ANY)
    out, pages = pl.pallas_call(
        partial(_kernel, variant=variant, keys=keys, values=slice(first, stop), with_sinks=sinks is not None),
        name="joined_attention",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(rows,),
            in_specs=[*specs, stored],
            out_specs=[row(kv_heads, groups, stop - first), stored],
            scratch_shapes=[
                pltpu.VMEM((2, block, kv_heads, size, width), pages.dtype),
                pltpu.SemaphoreType.DMA((3,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((kv_heads, groups, 1), jnp.float32),
                pltpu.VMEM((kv_heads, groups, 1), jnp.float32),
                pltpu.VMEM((kv_heads, groups, stop - first), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, kv_heads, groups, stop - first), q.dtype),
            jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        ],
        input_output_aliases={3 + len(inputs): 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
    )(lengths, new.writes.astype(jnp.int32), table, *inputs, pages)
    return out.reshape(rows, num_heads, -1)[..., lanes.start - first :][..., : lanes.values], pages


def _kernel(*refs: Any, variant: Variant, keys: int, values: slice, with_sinks: bool) -> None:
    """Attend for one row. Last of `refs`: outputs and pages; two buffers of a block, semaphores of these and of the
    written page, the buffer in turn; maxima, denominators and numerators of the softmax."""
    lengths, writes, table, q, new, *rest = refs
    sinks = rest[0] if with_sinks else None
    _, out, pages, buffers, semaphores, turn, top, total, sums = rest[with_sinks:]
    row, rows = pl.program_id(0), pl.num_programs(0)
    _, block, kv_heads, size, width = buffers.shape
    positions = block * size

    def each_page(row: Any, index: Any, slot: Any, act: Callable[[Any], None]) -> None:
        first = index * block

        def one(page: Any, carry: None) -> None:
            act(pltpu.make_async_copy(pages.at[table[row, first + page]], buffers.at[slot, page], semaphores.at[slot]))

        jax.lax.fori_loop(0, jnp.clip(pl.cdiv(lengths[row], size) - first, 0, block), one, None)

    @pl.when(row == 0)
    def _first() -> None:
        turn[0] = 0
        each_page(0, 0, 0, lambda copy: copy.start())

    top[...] = jnp.full_like(top, MASKED) if sinks is None else sinks[...]
    total[...] = jnp.zeros_like(total) if sinks is None else jnp.ones_like(total)
    sums[...] = jnp.zeros_like(sums)
    blocks = jnp.maximum(pl.cdiv(lengths[row], positions), 1)

    def attend(index: Any, carry: None) -> None:
        slot, last = turn[0], index + 1 == blocks
        next_row, next_index = jnp.where(last, row + 1, row), jnp.where(last, 0, index + 1)

        @pl.when(next_row < rows)
        def _next() -> None:
            each_page(next_row, next_index, 1 - slot, lambda copy: copy.start())

        each_page(row, index, slot, lambda copy: copy.wait())
        left = lengths[row] - index * positions
        newest = jnp.maximum(left - 1, 0) // size
        written = pltpu.make_async_copy(
            buffers.at[slot, newest], pages.at[table[row, index * block + newest]], semaphores.at[2]
        )

        @pl.when(last)
        def _end() -> None:
            # What lies behind the row's end may be infinite or no number, and zero times that is none.
            place = jax.lax.broadcasted_iota(jnp.int32, buffers.shape[1:], 2)
            place += jax.lax.broadcasted_iota(jnp.int32, buffers.shape[1:], 0) * size
            held = buffers[slot]
            buffers[slot] = jnp.where(place < left, jnp.where(place == left - 1, new[...], held), jnp.zeros_like(held))

        writing = last & (writes[row] != 0)

        @pl.when(writing)
        def _write() -> None:
            written.start()

        behind = left - 1 - jax.lax.broadcasted_iota(jnp.int32, (q.shape[2], positions), 1)
        mask = behind >= 0 if variant.window is None else (behind >= 0) & (behind < variant.window)
        for head in range(kv_heads):
            held = buffers[slot, :, head].reshape(positions, width)
            _add_block(q[0, head], held[:, :keys], held[:, values], mask, top, total, sums, head, variant)

        @pl.when(writing)
        def _written() -> None:
            written.wait()

        turn[0] = 1 - slot

    jax.lax.fori_loop(0, blocks, attend, None)
    out[0] = (sums[...] / jnp.maximum(total[...], jnp.finfo(jnp.float32).tiny)).astype(out.dtype)


def _add_block(
    q: Any, keys: Any, values: Any, mask: Any, top: Any, total: Any, sums: Any, head: int, variant: Variant
) -> None:
    """Add one block of a head to its softmax: maxima, denominators and numerators."""
    logits = jax.lax.dot_general(q, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    logits = jnp.where(mask, capped(logits * variant.scale, variant.soft_cap), MASKED)
    before = top[head]
    highest = jnp.maximum(before, jnp.max(logits, axis=-1, keepdims=True))
    exps = jnp.where(mask, jnp.exp(logits - highest), 0.0)
    shrink = jnp.exp(before - highest)
    top[head] = highest
    total[head] = total[head] * shrink + jnp.sum(exps, axis=-1, keepdims=True)
    product = jnp.dot(exps.astype(values.dtype), values, preferred_element_type=jnp.float32)
    sums[head] = sums[head] * shrink + product


def joined_reference(
    q: Float[Array, "n N Hk"],
    new: NewHeads,
    pages: Float[Array, "P K S Hp"],
    table: Int[Array, "n W"],
    lengths: Int[Array, " n"],
    sinks: Float[Array, " N"] | None,
    lanes: HeadLanes,
    variant: Variant,
) -> tuple[Float[Array, "n N Hv"], Float[Array, "P K S Hp"]]:
    """Reference implementation of `joined_attention`: scatter the new position, gather the pages, then attend."""
    size = pages.shape[2]
    last = jnp.maximum(lengths - 1, 0)
    page = jnp.take_along_axis(table, (last // size)[:, None], axis=1)[:, 0]
    page = jnp.where(new.writes & (lengths > 0), page, pages.shape[0])
    pages = pages.at[page, :, last % size].set(new.heads.astype(pages.dtype), mode="drop")
    held = pages[table].swapaxes(1, 2)
    held = held.reshape(*held.shape[:2], -1, held.shape[-1])
    behind = lengths[:, None] - 1 - jnp.arange(held.shape[2], dtype=jnp.int32)[None]
    mask = behind >= 0 if variant.window is None else (behind >= 0) & (behind < variant.window)
    keys, values = held[..., : lanes.keys], held[..., lanes.start : lanes.start + lanes.values]
    out = single_query(q[:, None], keys, values, mask, scale=variant.scale, soft_cap=variant.soft_cap, sinks=sinks)
    return out[:, 0], pages
