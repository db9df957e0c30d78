"""Attention of short rows on a CPU: blocks of queries without a loop, each with one softmax over all that it can see.

XLA:CPU hands to its library YNN in one piece what lies between two products, where that is sums, maxima and what the
library knows of elementwise operations: here a block's exponentials, all that follows of them, and the gradient of its
logits. Such a piece runs on all cores, while a product alone of matrices as small as these runs on one. Hence groups
and queries are one axis, in the mask as well (added through a reshape it takes half as long as all else of a piece);
the mask is added and not chosen; every product but the last has a sum in its piece; and what would be an output of two
pieces is computed twice.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from posttrain.kernels.attention.blocks import FLOOR, Plan, of_queries, product
from posttrain.kernels.attention.reference import MASKED, capped, visible
from posttrain.kernels.attention.request import Places

# Below, as in `blockwise`: q [I, B, K, G, t, H], out and its gradient [I, B, K, G, t, Hv]; k and v [B, K, S, H];
# sinks [1, K, G, 1]. Of one block: r = G t queries, s keys.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_short_rows(plan: Plan, q: Array, k: Array, v: Array, sinks: Array, places: Places) -> Array:
    """softmax(scale q k) v; for a gradient it keeps the exponentials. Twin: the same in loops, `blockwise`."""
    return _forward(plan, q, k, v, sinks, places)[0]


def _forward(plan: Plan, q: Array, k: Array, v: Array, sinks: Array, places: Places) -> tuple[Array, Any]:
    outs, kept, least = [], [], _sinks(plan, q, sinks)
    for i in range(q.shape[0]):
        keys = _keys(plan, i)
        mask = _mask(plan, i, places, groups=q.shape[3])
        # Bound to these queries: else layers share one mask with all heads in it, too large for a cache.
        scaled, mask = jax.lax.optimization_barrier((_scaled(plan, q[i]), mask))
        logits = capped(_product_of(scaled, k[:, :, keys]), plan.variant.soft_cap) + mask
        top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), least)
        exps = jnp.exp(logits - top)
        of_sinks = jnp.exp(least - top) if plan.sinks else None
        outs.append(product("bkrs,bksh->bkrh", exps.astype(v.dtype), v[:, :, keys]) / _total(exps, of_sinks))
        kept.append((exps, of_sinks))
    out = jnp.stack(outs).astype(q.dtype).reshape(*q.shape[:-1], v.shape[-1])
    return out, (q, k, v, sinks, kept)


def _backward(plan: Plan, saved: Any, d_out: Array) -> tuple[Array, Array, Array, Array | None, None]:
    q, k, v, sinks, kept = saved
    dqs, d_sinks = [], jnp.zeros(())
    dk, dv = (jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2])) for x in (k, v))
    # The last first: where its queries see all keys, the others add to what it made.
    for i, of_block in reversed(list(enumerate(kept))):
        # A value of its own: the forward pass has its sum in one piece with a product.
        exps, of_sinks = jax.lax.optimization_barrier(of_block)
        keys, total = _keys(plan, i), _total(exps, of_sinks)
        # Divided here, not in arrays of r x s.
        d_out_i = _merged(d_out[i]) / total
        d_exps = product("bkrh,bksh->bkrs", d_out_i, v[:, :, keys])
        delta = jnp.sum(exps * d_exps, axis=-1, keepdims=True)
        d_logits = exps * (d_exps - delta / total)
        scaled = _scaled(plan, q[i])
        if plan.variant.soft_cap is not None:
            d_logits *= 1 - jnp.square(jnp.tanh(_product_of(scaled, k[:, :, keys]) / plan.variant.soft_cap))
        dqs.append(plan.variant.scale * product("bkrs,bksh->bkrh", d_logits, k[:, :, keys]))
        dk = _plus(dk, product("bkrh,bkrs->bkhs", scaled, d_logits), keys)
        dv = _plus(dv, product("bkrh,bkrs->bkhs", d_out_i, exps), keys)
        if of_sinks is not None:
            # The share of the sink, whose value is 0.
            d_sinks -= jnp.sum((of_sinks / total * delta).reshape(q.shape[1:-1]), axis=(0, 3))
    dq = jnp.stack(dqs[::-1]).astype(q.dtype).reshape(q.shape)
    dk, dv = dk.swapaxes(2, 3).astype(k.dtype), dv.swapaxes(2, 3).astype(v.dtype)
    return dq, dk, dv, d_sinks.reshape(sinks.shape) if plan.sinks else None, None


attend_short_rows.defvjp(_forward, _backward)


def _keys(plan: Plan, i: int) -> slice:
    first, stop = map(int, plan.keys_of(i))
    return slice(first * plan.block_k, stop * plan.block_k)


def _plus(sums: Array, new: Array, keys: slice) -> Array:
    """In place: what reads the sums reads one array."""
    return jax.lax.dynamic_update_slice_in_dim(sums, sums[..., keys] + new, keys.start, axis=3)


def _mask(plan: Plan, i: int, places: Places, groups: int) -> Array:
    """What is added to the logits, [B, 1, r, s]."""
    positions, segments, parents = jax.tree.map(lambda x: x[i], of_queries(places))
    known = places.k_positions[:, _keys(plan, i)], places.k_segments[:, _keys(plan, i)]
    seen = visible(positions, known[0], segments, known[1], parents, plan.variant.window)
    added = jnp.where(seen, 0.0, MASKED)[:, None, None]
    return _merged(jnp.broadcast_to(added, (added.shape[0], 1, groups, *added.shape[3:])))


def _sinks(plan: Plan, q: Array, sinks: Array) -> Array | float:
    """The sinks [B, K, r, 1], or the least maximum."""
    if not plan.sinks:
        return FLOOR
    return _merged(jnp.broadcast_to(jnp.maximum(sinks, FLOOR), q.shape[1:-1])[..., None])


def _scaled(plan: Plan, q: Array) -> Array:
    """[B, K, r, H], so that no array of r x s is scaled."""
    return _merged(q.astype(jnp.float32) * plan.variant.scale)


def _product_of(scaled: Array, k: Array) -> Array:
    return product("bkrh,bksh->bkrs", scaled, k)


def _total(exps: Array, of_sinks: Array | None) -> Array:
    """What a softmax divides its exponentials by: at least 1, that of the largest, but where nothing is visible."""
    total = jnp.sum(exps, axis=-1, keepdims=True)
    return jnp.maximum(total if of_sinks is None else total + of_sinks, 1.0)


def _merged(x: Array) -> Array:
    """Groups and queries as one axis."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
