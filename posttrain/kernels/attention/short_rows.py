"""Attention of short rows on CPU: unrolled query blocks, each with one softmax over all visible keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from posttrain.kernels.attention.blocks import FLOOR, BlockPlan, einsum32, query_inputs
from posttrain.kernels.attention.call import MaskInputs
from posttrain.kernels.attention.reference import MASKED, capped, visible

# XLA:CPU passes to its YNN library in one piece what lies between two products, if it consists of sums, maxima and
# elementwise operations that the library supports: here a block's exponentials, all that follows from them, and the
# gradient of its logits. Such a piece runs on all cores, while a product alone of matrices this small runs on one.
# Hence groups and queries are one axis, in the mask as well (adding it through a reshape takes half as long as the rest
# of a piece); the mask is added, not selected; every product but the last has a sum in its piece; and an output of two
# pieces is computed twice.

# Shapes below, as in `blockwise`: q [I, B, K, G, t, H], out and its gradient [I, B, K, G, t, Hv]; k and v [B, K, S, H];
# sinks [1, K, G, 1]. Within one block: r = G t queries, s keys.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_short_rows(plan: BlockPlan, q: Array, k: Array, v: Array, sinks: Array, mask_inputs: MaskInputs) -> Array:
    """softmax(scale q k) v that saves the exponentials for the backward pass. Reference: `blockwise` with loops."""
    return _forward(plan, q, k, v, sinks, mask_inputs)[0]


def _forward(plan: BlockPlan, q: Array, k: Array, v: Array, sinks: Array, mask_inputs: MaskInputs) -> tuple[Array, Any]:
    outs, kept, least = [], [], _sinks(plan, q, sinks)
    for i in range(q.shape[0]):
        keys = _keys(plan, i)
        mask = _mask(plan, i, mask_inputs, groups=q.shape[3])
        # The barrier ties the mask to these queries: otherwise layers share one mask over all heads, too large for a
        # cache.
        scaled, mask = jax.lax.optimization_barrier((_scaled(plan, q[i]), mask))
        logits = capped(_product_of(scaled, k[:, :, keys]), plan.variant.soft_cap) + mask
        top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), least)
        exps = jnp.exp(logits - top)
        sink_exps = jnp.exp(least - top) if plan.sinks else None
        outs.append(einsum32("bkrs,bksh->bkrh", exps.astype(v.dtype), v[:, :, keys]) / _total(exps, sink_exps))
        kept.append((exps, sink_exps))
    out = jnp.stack(outs).astype(q.dtype).reshape(*q.shape[:-1], v.shape[-1])
    return out, (q, k, v, sinks, kept)


def _backward(plan: BlockPlan, saved: Any, d_out: Array) -> tuple[Array, Array, Array, Array | None, None]:
    q, k, v, sinks, kept = saved
    dqs, d_sinks = [], jnp.zeros(())
    dk, dv = (jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2])) for x in (k, v))
    # Last block first: if its queries see all keys, the other blocks accumulate into its result.
    for i, saved_block in reversed(list(enumerate(kept))):
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


attend_short_rows.defvjp(_forward, _backward)


def _keys(plan: BlockPlan, i: int) -> slice:
    first, stop = map(int, plan.key_blocks(i))
    return slice(first * plan.block_k, stop * plan.block_k)


def _plus(sums: Array, new: Array, keys: slice) -> Array:
    """Accumulate in place, so that readers of the sums read one array."""
    return jax.lax.dynamic_update_slice_in_dim(sums, sums[..., keys] + new, keys.start, axis=3)


def _mask(plan: BlockPlan, i: int, mask_inputs: MaskInputs, groups: int) -> Array:
    """Additive mask [B, 1, r, s]."""
    positions, segments, parents = jax.tree.map(lambda x: x[i], query_inputs(mask_inputs))
    known = mask_inputs.k_positions[:, _keys(plan, i)], mask_inputs.k_segments[:, _keys(plan, i)]
    seen = visible(positions, known[0], segments, known[1], parents, plan.variant.window)
    added = jnp.where(seen, 0.0, MASKED)[:, None, None]
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
