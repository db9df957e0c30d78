"""Reference attention: the full matrix of logits, and the case of a single query (decoding)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

MASKED = -1e30
"""Logit of a masked key: finite, so that a fully masked query stays finite."""


def visible(
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    q_parents: Int[Array, "B T"] | None,
    window: int | None,
) -> Bool[Array, "B T S"]:
    """Causal mask over the query's own segment and its parent segment, if that is not 0."""
    distance = q_positions[:, :, None] - k_positions[:, None, :]
    same = q_segments[:, :, None] == k_segments[:, None, :]
    if q_parents is not None:
        same |= (q_parents[:, :, None] == k_segments[:, None, :]) & (q_parents[:, :, None] > 0)
    mask = same & (distance >= 0)
    return mask if window is None else mask & (distance < window)


def full_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Hv"],
    mask: Bool[Array, "B T S"],
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "B T N Hv"]:
    """Full logits, softmax, product with the values."""
    rows, length, num_heads, head_dim = q.shape
    num_kv_heads, keys, value_dim = v.shape[1:]
    groups = num_heads // num_kv_heads
    # Queries of a group are merged into one axis: plain batched products in the layout of the keys.
    q = q.reshape(rows, length, num_kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(rows, num_kv_heads, groups * length, head_dim)
    logits = capped(jnp.einsum("bkth,bksh->bkts", q, k, preferred_element_type=jnp.float32) * scale, soft_cap)
    logits = jnp.where(mask[:, None, None], logits.reshape(rows, num_kv_heads, groups, length, keys), MASKED)
    per_head = None if sinks is None else sinks.reshape(1, num_kv_heads, groups, 1, 1)
    probs = softmax(logits, per_head).astype(v.dtype).reshape(rows, num_kv_heads, groups * length, keys)
    # XLA:CPU has no BF16 x BF16 = F32 for this product; other platforms accumulate in float32 anyway.
    out = jnp.einsum("bkts,bksh->bkth", probs, v)
    out = out.reshape(rows, num_kv_heads, groups, length, value_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, length, num_heads, value_dim)


def single_query(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Hv"],
    mask: Bool[Array, "B S"],
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "B 1 N Hv"]:
    """Attention of one decoded token, with both products' operands in the order that CPUs read fastest.

    Keys as wide as the values come from a cache stored as [K, H, S]; those of latent attention (MLA), whose values are
    a part of them, are stored as [K, S, H].
    """
    rows, _, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = v.shape[1], v.shape[3]
    groups = num_heads // num_kv_heads
    q = q.reshape(rows, num_kv_heads, groups, head_dim)
    if head_dim == value_dim:
        logits = jnp.einsum("bkgh,bksh->bkgs", q, k, preferred_element_type=jnp.float32) * scale
    else:
        # Scaled before the transpose: after it, XLA:CPU takes a fifth longer for a whole decoding step.
        logits = jnp.einsum("bksh,bkgh->bksg", k, q, preferred_element_type=jnp.float32) * scale
        logits = logits.swapaxes(2, 3)
    logits = jnp.where(mask[:, None, None], capped(logits, soft_cap), MASKED)
    exps, total = exponentials(logits, None if sinks is None else sinks.reshape(1, num_kv_heads, groups, 1))
    out = jnp.einsum("bkgs,bksh->bkgh", exps.astype(v.dtype), v) / total
    return out.astype(v.dtype).reshape(rows, 1, num_heads, value_dim)


def capped(logits: Float[Array, "*B"], soft_cap: float | None) -> Float[Array, "*B"]:
    """cap tanh(logits / cap): Gemma 2, arXiv:2408.00118, section 2."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def softmax(logits: Float[Array, "*B S"], sinks: Float[Array, "*#B 1"] | None) -> Float[Array, "*B S"]:
    """Softmax over the last dimension; a sink is one more logit whose probability goes to no value."""
    if sinks is None:
        return jax.nn.softmax(logits, axis=-1)
    exps, total = exponentials(logits, sinks)
    return exps / total


def exponentials(
    logits: Float[Array, "*B S"], sinks: Float[Array, "*#B 1"] | None
) -> tuple[Float[Array, "*B S"], Float[Array, "*B 1"]]:
    """Numerator and denominator of `softmax`, shifted so that the largest exponential is 1."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(logits.dtype)
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(top)
    exps = jnp.exp(logits - top)
    total = jnp.sum(exps, axis=-1, keepdims=True)
    return exps, total if sinks is None else total + jnp.exp(sinks - top)
