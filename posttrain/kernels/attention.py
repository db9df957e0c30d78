"""Attention behind one function whose only mask language is positions, segments and window."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    *,
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    window: int | None,
    scale: float,
) -> Float[Array, "B T N H"]:
    """softmax(scale q k) v over the keys of the same segment at positions <= the query's, at most `window` of them.

    Logits and softmax in float32. A query of segment 0 (padding) sees the other padding and yields finite numbers.
    Keys stand as [B, K, S, H]: on CPU decoding reads them twice as fast as [B, S, K, H].
    """
    rows, length, num_heads, head_dim = q.shape
    num_kv_heads, keys = k.shape[1], k.shape[2]
    groups = num_heads // num_kv_heads
    mask = visible(q_positions, k_positions, q_segments, k_segments, window)
    if length == 1:
        return _single_query(q, k, v, mask[:, 0], scale)
    # The queries of a group stand one below the other: plain batched products, in the layout that the keys have.
    q = q.reshape(rows, length, num_kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(rows, num_kv_heads, groups * length, head_dim)
    logits = jnp.einsum("bkth,bksh->bkts", q, k, preferred_element_type=jnp.float32) * scale
    logits = logits.reshape(rows, num_kv_heads, groups, length, keys)
    probs = jax.nn.softmax(jnp.where(mask[:, None, None], logits, -1e30), axis=-1).astype(v.dtype)
    probs = probs.reshape(rows, num_kv_heads, groups * length, keys)
    # XLA:CPU has no BF16 x BF16 = F32 for this product; the platforms that matter accumulate in float32 anyway.
    out = jnp.einsum("bkts,bksh->bkth", probs, v)
    out = out.reshape(rows, num_kv_heads, groups, length, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, length, num_heads, head_dim)


def _single_query(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B S"],
    scale: float,
) -> Float[Array, "B 1 N H"]:
    """`attention` of one decoded token, with the operands of both products in the order that CPUs read fastest."""
    rows, _, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q = q.reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    # Scaled before the transpose: after it, XLA:CPU takes a fifth longer for a whole decoding step.
    logits = (jnp.einsum("bksh,bkgh->bksg", k, q, preferred_element_type=jnp.float32) * scale).swapaxes(2, 3)
    probs = jax.nn.softmax(jnp.where(mask[:, None, None], logits, -1e30), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", probs, v).reshape(rows, 1, num_heads, head_dim)


def visible(
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    window: int | None,
) -> Bool[Array, "B T S"]:
    """Which key each query sees."""
    distance = q_positions[:, :, None] - k_positions[:, None, :]
    mask = (q_segments[:, :, None] == k_segments[:, None, :]) & (distance >= 0)
    return mask if window is None else mask & (distance < window)
