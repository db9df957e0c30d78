"""Blockwise (flash) attention in plain XLA: loops over query and key blocks, no T x S array in either pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from posttrain.kernels.attention.blocks import FLOOR, BlockPlan, einsum32, query_inputs
from posttrain.kernels.attention.call import MaskInputs, Operands, Variant
from posttrain.kernels.attention.reference import MASKED, visible
from posttrain.kernels.attention.short_rows import attend_short_rows


def blockwise(
    operands: Operands, variant: Variant, *, same_tokens: bool, block: int, short: bool
) -> Float[Array, "B T N Hv"]:
    """softmax(scale q k) v with a running maximum and sum; FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.

    `block`: queries and keys per block of logits. `short`: unroll over query blocks, each with one softmax over all
    visible keys (`short_rows`): faster on CPU, but the program grows with the row length.
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
    out = attend(plan, q, k, v, per_head.reshape(1, num_kv_heads, groups, 1), mask_inputs)
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(rows, length + pad_q, num_heads, value_dim)
    return out[:, :length]


def _blocks(x: Array, pad: int, block: int, value: int) -> Array:
    x = jnp.pad(x, ((0, 0), (0, pad)), constant_values=value)
    return x.reshape(x.shape[0], -1, block).swapaxes(0, 1)


# Shapes below: q [I, B, K, G, t, H], out and its gradient [I, B, K, G, t, Hv], statistics [I, B, K, G, t] for I blocks
# of t queries; k and v [B, K, S, H]; sinks [1, K, G, 1].


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: BlockPlan, q: Array, k: Array, v: Array, sinks: Array, mask_inputs: MaskInputs) -> Array:
    return _forward(plan, q, k, v, sinks, mask_inputs)[0]


def _forward(plan: BlockPlan, q: Array, k: Array, v: Array, sinks: Array, mask_inputs: MaskInputs) -> tuple[Array, Any]:
    def block(inputs: tuple[Any, ...]) -> tuple[Array, Array]:
        i, q_i, *q_inputs = inputs

        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = carry
            k_j, v_j = _slice(k, j, plan.block_k), _slice(v, j, plan.block_k)
            logits, _ = _logits(plan, q_i, k_j, _visible(plan, j, q_inputs, mask_inputs))
            new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
            exps, keep = jnp.exp(logits - new_top[..., None]), jnp.exp(top - new_top)
            added = einsum32("bkgts,bksh->bkgth", exps.astype(v.dtype), v_j)
            return new_top, total * keep + jnp.sum(exps, axis=-1), out * keep[..., None] + added

        # A sink acts as a first key without a value.
        top = jnp.broadcast_to(jnp.maximum(sinks, FLOOR) if plan.sinks else FLOOR, q_i.shape[:-1])
        total = jnp.full(top.shape, 1.0 if plan.sinks else 0.0)
        out = jnp.zeros((*top.shape, v.shape[-1]))
        top, total, out = lax.fori_loop(*plan.key_blocks(i), step, (top.astype(jnp.float32), total, out))
        total = jnp.where(total > 0, total, 1.0)
        return (out / total[..., None]).astype(q.dtype), top + jnp.log(total)

    out, log_total = lax.map(block, (jnp.arange(q.shape[0]), q, *query_inputs(mask_inputs)))
    return out, (q, k, v, sinks, mask_inputs, out, log_total)


def _backward(plan: BlockPlan, saved: Any, d_out: Array) -> tuple[Array, Array, Array, Array | None, None]:
    q, k, v, sinks, mask_inputs, out, log_total = saved
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)

    def block(carry: tuple[Array, Array], inputs: tuple[Any, ...]) -> tuple[tuple[Array, Array], Array]:
        i, q_i, log_total_i, d_out_i, delta_i, *q_inputs = inputs

        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq_i, dk, dv = carry
            k_j, v_j = _slice(k, j, plan.block_k), _slice(v, j, plan.block_k)
            logits, slope = _logits(plan, q_i, k_j, _visible(plan, j, q_inputs, mask_inputs))
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


def _logits(plan: BlockPlan, q: Array, k: Array, mask: Array) -> tuple[Array, Array | float]:
    """Masked logits and their derivative with respect to q k."""
    scale, cap = plan.variant.scale, plan.variant.soft_cap
    logits = einsum32("bkgth,bksh->bkgts", q, k) * scale
    if cap is None:
        return jnp.where(mask, logits, MASKED), scale
    tanh = jnp.tanh(logits / cap)
    return jnp.where(mask, cap * tanh, MASKED), scale * (1 - tanh * tanh)


def _visible(plan: BlockPlan, j: Array, q_inputs: Sequence[Any], mask_inputs: MaskInputs) -> Array:
    keys = (mask_inputs.k_positions, mask_inputs.k_segments)
    k_positions, k_segments = (lax.dynamic_slice_in_dim(x, j * plan.block_k, plan.block_k, axis=1) for x in keys)
    positions, segments, parents = q_inputs
    return visible(positions, k_positions, segments, k_segments, parents, plan.variant.window)[:, None, None]


def _slice(x: Array, j: Array, block: int) -> Array:
    return lax.dynamic_slice_in_dim(x, j * block, block, axis=2)


def _add(x: Array, j: Array, block: Array) -> Array:
    start, size = j * block.shape[3], block.shape[3]
    return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, start, size, axis=3) + block, start, axis=3)
