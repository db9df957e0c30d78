"""Blockwise (flash) attention in plain XLA: loops over query and key blocks, unrolled for short rows on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from posttrain.kernels.attention.call import (
    MASKED,
    SAVED,
    Attended,
    AttentionCall,
    MaskInputs,
    Operands,
    Variant,
    capped,
    visible,
)

FLOOR = 0.1 * MASKED
"""Lower bound of the running maximum: relative to it, masked logits of a fully masked query get weight 0."""

BLOCK, CPU_BLOCKS = 512, (128, 64)
"""Queries and keys per block of logits. On CPU, packed rows use the smaller size if the larger block over all rows and
heads does not fit the cache."""

SHORT_ROW, SHORT_BLOCK = 4, 128
"""Maximum number of blocks of `block_size` for which CPU attention is unrolled, and the block size then, regardless of
the cache: two blocks of 128 instead of four of 64 make the first step 10 % shorter and others 3 % longer."""

LANES = 8
"""Alignment of equal blocks of a short row."""

CPU_CACHE = 2 << 20
"""Bytes of the second-level caches of two cores."""


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Static block sizes and options of one attention call, padded to whole blocks."""

    variant: Variant
    same_tokens: bool
    parents: bool
    sinks: bool
    block_q: int
    block_k: int
    num_blocks_k: int

    def key_blocks(self, i: Array | int) -> tuple[Array | int, Array | int]:
        """Return the range `[first, stop)` of key blocks visible to query block `i`; Python ints if `i` is an int.

        Self-attention (`same_tokens`) skips blocks after the diagonal, or after the largest image that begins there,
        and before the window.
        """
        if not self.same_tokens:
            return 0, self.num_blocks_k
        least, most = (jnp.minimum, jnp.maximum) if isinstance(i, Array) else (min, max)
        first: Array | int = 0
        # A parent segment may be anywhere in the row, so the window bounds nothing.
        if self.variant.window is not None and not self.parents:
            first = most(i * self.block_q - self.variant.window + 1, 0) // self.block_k
        last = (i + 1) * self.block_q - 1 + self.variant.ahead
        return first, least(last // self.block_k + 1, self.num_blocks_k)


def block_size(call: AttentionCall) -> int:
    """Queries and keys per block of logits in `blockwise`."""
    if call.platform != "cpu":
        return BLOCK
    large, small = CPU_BLOCKS
    if call.kind != "rows":
        return large
    rows, heads = -(-call.rows // call.row_shards), -(-call.num_heads // call.head_shards)
    return large if 4 * rows * heads * large * large <= CPU_CACHE else small


def even_block(call: AttentionCall) -> int | None:
    """Block size for unrolled attention of a short row on CPU; None if a loop is used.

    The fewest equal blocks, at least two, with no more logits than blocks of `SHORT_BLOCK` have; a row of at most that
    length is one block. Unrolled blocks are compiled one by one.
    """
    length = call.num_queries
    if call.platform != "cpu" or call.kind != "rows" or call.token_shards > 1 or length > SHORT_ROW * block_size(call):
        return None

    def num_logits(size: int) -> int:
        count = -(-length // size)
        return count * (count + 1) // 2 * size**2

    sizes = (-(-length // (LANES * count)) * LANES for count in range(2, -(-length // SHORT_BLOCK) + 1))
    return next((size for size in sizes if num_logits(size) <= num_logits(SHORT_BLOCK)), SHORT_BLOCK)


def query_inputs(mask_inputs: MaskInputs) -> tuple[Array | None, ...]:
    return mask_inputs.q_positions, mask_inputs.q_segments, mask_inputs.q_parents, mask_inputs.q_images


def einsum32(spec: str, x: Array, y: Array) -> Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def blockwise(operands: Operands, variant: Variant, *, same_tokens: bool, block: int, short: bool) -> Attended:
    """softmax(scale q k) v with a running maximum and sum; FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.

    `block`: queries and keys per block of logits. `short`: unroll over query blocks, each with one softmax over all
    visible keys (`attend_short_rows`): faster on CPU, but the program grows with the row length.
    """
    q, k, v, mask_inputs, sinks = operands
    rows, length, num_heads, head_dim = q.shape
    num_kv_heads, keys, value_dim = v.shape[1:]
    groups = num_heads // num_kv_heads
    block_q, block_k = min(block, length), min(block, keys)
    pad_q, pad_k = -length % block_q, -keys % block_k
    q = jnp.pad(q, ((0, 0), (0, pad_q), (0, 0), (0, 0)))
    q = q.reshape(rows, -1, block_q, num_kv_heads, groups, head_dim).transpose(1, 0, 3, 4, 2, 5)
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pad_k), (0, 0))) for x in (k, v))
    # Padding gets segment ids that match nothing.
    mask_inputs = MaskInputs(
        _blocks(mask_inputs.q_positions, pad_q, block_q, 0),
        jnp.pad(mask_inputs.k_positions, ((0, 0), (0, pad_k))),
        _blocks(mask_inputs.q_segments, pad_q, block_q, -1),
        jnp.pad(mask_inputs.k_segments, ((0, 0), (0, pad_k)), constant_values=-2),
        None if mask_inputs.q_parents is None else _blocks(mask_inputs.q_parents, pad_q, block_q, 0),
        None if mask_inputs.q_images is None else _blocks(mask_inputs.q_images, pad_q, block_q, 0),
        None if mask_inputs.k_images is None else jnp.pad(mask_inputs.k_images, ((0, 0), (0, pad_k))),
    )
    per_head = jnp.zeros(num_heads) if sinks is None else sinks.astype(jnp.float32)
    plan = BlockPlan(
        variant=variant,
        same_tokens=same_tokens,
        parents=mask_inputs.q_parents is not None,
        sinks=sinks is not None,
        block_q=block_q,
        block_k=block_k,
        num_blocks_k=k.shape[2] // block_k,
    )
    attend = attend_short_rows if short else _attend
    out, largest = attend(plan, q, k, v, per_head.reshape(1, num_kv_heads, groups, 1), mask_inputs)
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(rows, length + pad_q, num_heads, value_dim)
    if largest is not None:
        largest = jax.lax.stop_gradient(jnp.max(largest, axis=0).reshape(rows, num_heads))
    return Attended(out[:, :length], largest)


def _blocks(x: Array, pad: int, block: int, value: int) -> Array:
    x = jnp.pad(x, ((0, 0), (0, pad)), constant_values=value)
    return x.reshape(x.shape[0], -1, block).swapaxes(0, 1)


# Shapes below: q [I, B, K, G, t, H], out and its gradient [I, B, K, G, t, Hv], statistics [I, B, K, G, t] for I blocks
# of t queries; their largest logits [I, B, K, G]; k and v [B, K, S, H]; sinks [1, K, G, 1].


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: BlockPlan, q: Array, k: Array, v: Array, sinks: Array, mask_inputs: MaskInputs) -> Attended:
    return _forward(plan, q, k, v, sinks, mask_inputs)[0]


def _forward(
    plan: BlockPlan, q: Array, k: Array, v: Array, sinks: Array, mask_inputs: MaskInputs
) -> tuple[Attended, Any]:
    def block(inputs: tuple[Any, ...]) -> tuple[Array, Array, Array | None]:
        i, q_i, *q_inputs = inputs

        def step(j: Array, carry: tuple[Array, Array, Array, Array | None]) -> tuple[Array, Array, Array, Array | None]:
            top, total, out, largest = carry
            k_j, v_j = _slice(k, j, plan.block_k), _slice(v, j, plan.block_k)
            mask = _visible(plan, j, q_inputs, mask_inputs)
            logits, _, products = _logits(plan, q_i, k_j, mask)
            if largest is not None:
                products = jnp.where(mask, products, MASKED)
                largest = jnp.maximum(largest, jnp.max(products, axis=-1))
            new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
            exps, keep = jnp.exp(logits - new_top[..., None]), jnp.exp(top - new_top)
            added = einsum32("bkgts,bksh->bkgth", exps.astype(v.dtype), v_j)
            return new_top, total * keep + jnp.sum(exps, axis=-1), out * keep[..., None] + added, largest

        # A sink acts as a first key without a value.
        top = jnp.broadcast_to(jnp.maximum(sinks, FLOOR) if plan.sinks else FLOOR, q_i.shape[:-1])
        total = jnp.full(top.shape, 1.0 if plan.sinks else 0.0)
        out, largest = jnp.zeros((*top.shape, v.shape[-1])), None
        if plan.variant.largest:
            largest = jnp.full(top.shape, MASKED, jnp.float32)
        start = top.astype(jnp.float32), total, out, largest
        top, total, out, largest = lax.fori_loop(*plan.key_blocks(i), step, start)
        total = jnp.where(total > 0, total, 1.0)
        found = (out / total[..., None]).astype(q.dtype), top + jnp.log(total)
        return *found, None if largest is None else _of_tokens(largest, q_inputs[1])

    *found, largest = lax.map(block, (jnp.arange(q.shape[0]), q, *query_inputs(mask_inputs)))
    out, log_total = (checkpoint_name(x, SAVED) for x in found)
    return Attended(out, largest), (q, k, v, sinks, mask_inputs, out, log_total)


def _of_tokens(largest: Float[Array, "B K G t"], segments: Array) -> Float[Array, "B K G"]:
    """Largest logit of a block, its padding aside."""
    return jnp.max(jnp.where(segments[:, None, None] > 0, largest, MASKED), axis=-1)


def _backward(plan: BlockPlan, saved: Any, d_attended: Attended) -> tuple[Array, Array, Array, Array | None, None]:
    q, k, v, sinks, mask_inputs, out, log_total = saved
    d_out = d_attended.heads
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)

    def block(carry: tuple[Array, Array], inputs: tuple[Any, ...]) -> tuple[tuple[Array, Array], Array]:
        i, q_i, log_total_i, d_out_i, delta_i, *q_inputs = inputs

        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq_i, dk, dv = carry
            k_j, v_j = _slice(k, j, plan.block_k), _slice(v, j, plan.block_k)
            logits, slope, _ = _logits(plan, q_i, k_j, _visible(plan, j, q_inputs, mask_inputs))
            probs = jnp.exp(logits - log_total_i[..., None])
            d_probs = einsum32("bkgth,bksh->bkgts", d_out_i, v_j)
            d_logits = (probs * (d_probs - delta_i[..., None]) * slope).astype(q.dtype)
            dv = _add(dv, j, einsum32("bkgth,bkgts->bkhs", d_out_i, probs.astype(d_out_i.dtype)))
            dk = _add(dk, j, einsum32("bkgth,bkgts->bkhs", q_i, d_logits))
            return dq_i + einsum32("bkgts,bksh->bkgth", d_logits, k_j), dk, dv

        dq_i, dk, dv = lax.fori_loop(*plan.key_blocks(i), step, (jnp.zeros(q_i.shape), *carry))
        return (dk, dv), dq_i.astype(q.dtype)

    blocks = (jnp.arange(q.shape[0]), q, log_total, d_out, delta, *query_inputs(mask_inputs))
    # Accumulate [B, K, H, S]: XLA:CPU transposes the first operand of these products, which here is not the t x s one.
    zeros = (jnp.zeros(k.swapaxes(2, 3).shape), jnp.zeros(v.swapaxes(2, 3).shape))
    (dk, dv), dq = lax.scan(block, zeros, blocks)
    dk, dv = dk.swapaxes(2, 3), dv.swapaxes(2, 3)
    # The sink's probability is exp(sink - log_total); its value is 0.
    d_sinks = -jnp.sum(jnp.exp(sinks[None] - log_total) * delta, axis=(0, 1, 4)).reshape(sinks.shape)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), d_sinks if plan.sinks else None, None


_attend.defvjp(_forward, _backward)


def _logits(plan: BlockPlan, q: Array, k: Array, mask: Array) -> tuple[Array, Array | float, Array]:
    """Masked logits, their derivative with respect to q k, and logits before mask and soft cap."""
    scale, cap = plan.variant.scale, plan.variant.soft_cap
    logits = einsum32("bkgth,bksh->bkgts", q, k) * scale
    if cap is None:
        return jnp.where(mask, logits, MASKED), scale, logits
    tanh = jnp.tanh(logits / cap)
    return jnp.where(mask, cap * tanh, MASKED), scale * (1 - tanh * tanh), logits


def _visible(plan: BlockPlan, j: Array, q_inputs: Sequence[Any], mask_inputs: MaskInputs) -> Array:
    def here(x: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, j * plan.block_k, plan.block_k, axis=1)

    keys = jax.tree.map(here, (mask_inputs.k_positions, mask_inputs.k_segments, mask_inputs.k_images))
    return _seen(plan, q_inputs, keys)[:, None, None]


def _seen(plan: BlockPlan, queries: Sequence[Any], keys: Sequence[Any]) -> Array:
    """Mask [B, t, s] of a block."""
    positions, segments, parents, images = queries
    k_positions, k_segments, k_images = keys
    return visible(positions, k_positions, segments, k_segments, parents, images, k_images, plan.variant.window)


def _slice(x: Array, j: Array, block: int) -> Array:
    return lax.dynamic_slice_in_dim(x, j * block, block, axis=2)


def _add(x: Array, j: Array, block: Array) -> Array:
    start, size = j * block.shape[3], block.shape[3]
    return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, start, size, axis=3) + block, start, axis=3)


# XLA:CPU passes to its YNN library in one piece what lies between two products, if it consists of sums, maxima and
# elementwise operations that the library supports: here a block's exponentials, all that follows from them, and the
# gradient of its logits. Such a piece runs on all cores, while a product alone of matrices this small runs on one.
# Hence groups and queries are one axis, in the mask as well (adding it through a reshape takes half as long as the rest
# of a piece); the mask is added, not selected; every product but the last has a sum in its piece; and an output of two
# pieces is computed twice.

# Shapes below, as in `blockwise`: q [I, B, K, G, t, H], out and its gradient [I, B, K, G, t, Hv]; k and v [B, K, S, H];
# sinks [1, K, G, 1]. Within one block: r = G t queries, s keys.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_short_rows(plan: BlockPlan, q: Array, k: Array, v: Array, sinks: Array, mask_inputs: MaskInputs) -> Attended:
    """softmax(scale q k) v that saves the exponentials for the backward pass. Reference: `blockwise` with loops."""
    return _short_forward(plan, q, k, v, sinks, mask_inputs)[0]


def _short_forward(
    plan: BlockPlan, q: Array, k: Array, v: Array, sinks: Array, mask_inputs: MaskInputs
) -> tuple[Attended, Any]:
    outs, saved, largest, least = [], [], [], _sinks(plan, q, sinks)
    for i in range(q.shape[0]):
        keys = _keys(plan, i)
        mask = _mask(plan, i, mask_inputs, groups=q.shape[3])
        # The barrier ties the mask to these queries: otherwise layers share one mask over all heads, too large for a
        # cache.
        scaled, mask = jax.lax.optimization_barrier((_scaled(plan, q[i]), mask))
        products = _product_of(scaled, k[:, :, keys])
        logits = capped(products, plan.variant.soft_cap) + mask
        if plan.variant.largest:
            each = jnp.max(products + mask, axis=-1).reshape(q.shape[1:-1])
            largest.append(_of_tokens(each, mask_inputs.q_segments[i]))
        top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), least)
        exps = jnp.exp(logits - top)
        sink_exps = jnp.exp(least - top) if plan.sinks else None
        outs.append(einsum32("bkrs,bksh->bkrh", exps.astype(v.dtype), v[:, :, keys]) / _total(exps, sink_exps))
        saved.append((exps, sink_exps))
    out = checkpoint_name(jnp.stack(outs).astype(q.dtype).reshape(*q.shape[:-1], v.shape[-1]), SAVED)
    return Attended(out, jnp.stack(largest) if largest else None), (q, k, v, sinks, saved)


def _short_backward(
    plan: BlockPlan, saved: Any, d_attended: Attended
) -> tuple[Array, Array, Array, Array | None, None]:
    (q, k, v, sinks, exponentials), d_out = saved, d_attended.heads
    dqs, d_sinks = [], jnp.zeros(())
    dk, dv = (jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2])) for x in (k, v))
    # Last block first: if its queries see all keys, the other blocks accumulate into its result.
    for i, saved_block in reversed(list(enumerate(exponentials))):
        # The barrier forces a separate sum: the forward pass fuses its own with a product.
        exps, sink_exps = jax.lax.optimization_barrier(saved_block)
        keys, total = _keys(plan, i), _total(exps, sink_exps)
        # Division here avoids one over arrays of r x s.
        d_out_i = _merged(d_out[i]) / total
        d_exps = einsum32("bkrh,bksh->bkrs", d_out_i, v[:, :, keys])
        delta = jnp.sum(exps * d_exps, axis=-1, keepdims=True)
        d_logits = exps * (d_exps - delta / total)
        scaled = _scaled(plan, q[i])
        if plan.variant.soft_cap is not None:
            d_logits *= 1 - jnp.square(jnp.tanh(_product_of(scaled, k[:, :, keys]) / plan.variant.soft_cap))
        dqs.append(plan.variant.scale * einsum32("bkrs,bksh->bkrh", d_logits, k[:, :, keys]))
        dk = _plus(dk, einsum32("bkrh,bkrs->bkhs", scaled, d_logits), keys)
        dv = _plus(dv, einsum32("bkrh,bkrs->bkhs", d_out_i, exps), keys)
        if sink_exps is not None:
            # Probability of the sink, whose value is 0.
            d_sinks -= jnp.sum((sink_exps / total * delta).reshape(q.shape[1:-1]), axis=(0, 3))
    dq = jnp.stack(dqs[::-1]).astype(q.dtype).reshape(q.shape)
    dk, dv = dk.swapaxes(2, 3).astype(k.dtype), dv.swapaxes(2, 3).astype(v.dtype)
    return dq, dk, dv, d_sinks.reshape(sinks.shape) if plan.sinks else None, None


attend_short_rows.defvjp(_short_forward, _short_backward)


def _keys(plan: BlockPlan, i: int) -> slice:
    first, stop = map(int, plan.key_blocks(i))
    return slice(first * plan.block_k, stop * plan.block_k)


def _plus(sums: Array, new: Array, keys: slice) -> Array:
    """Accumulate in place, so that readers of the sums read one array."""
    return jax.lax.dynamic_update_slice_in_dim(sums, sums[..., keys] + new, keys.start, axis=3)


def _mask(plan: BlockPlan, i: int, mask_inputs: MaskInputs, groups: int) -> Array:
    """Additive mask [B, 1, r, s]."""
    queries = jax.tree.map(lambda x: x[i], query_inputs(mask_inputs))
    of = mask_inputs.k_positions, mask_inputs.k_segments, mask_inputs.k_images
    keys = jax.tree.map(lambda x: x[:, _keys(plan, i)], of)
    added = jnp.where(_seen(plan, queries, keys), 0.0, MASKED)[:, None, None]
    return _merged(jnp.broadcast_to(added, (added.shape[0], 1, groups, *added.shape[3:])))


def _sinks(plan: BlockPlan, q: Array, sinks: Array) -> Array | float:
    """Sink logits [B, K, r, 1], or the lower bound of the maximum."""
    if not plan.sinks:
        return FLOOR
    return _merged(jnp.broadcast_to(jnp.maximum(sinks, FLOOR), q.shape[1:-1])[..., None])


def _scaled(plan: BlockPlan, q: Array) -> Array:
    """Scaled queries [B, K, r, H]; avoids scaling an array of r x s."""
    return _merged(q.astype(jnp.float32) * plan.variant.scale)


def _product_of(scaled: Array, k: Array) -> Array:
    return einsum32("bkrh,bksh->bkrs", scaled, k)


def _total(exps: Array, sink_exps: Array | None) -> Array:
    """Softmax denominator: at least 1 (the largest exponential), except for fully masked queries."""
    total = jnp.sum(exps, axis=-1, keepdims=True)
    return jnp.maximum(total if sink_exps is None else total + sink_exps, 1.0)


def _merged(x: Array) -> Array:
    """Merge groups and queries into one axis."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
