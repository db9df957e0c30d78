"""The attention layer: projections, qk-norm, RoPE, cache, kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from posttrain.kernels.attention import attention
from posttrain.models.cache import KVCache
from posttrain.models.config import AttentionConfig
from posttrain.models.layers import Linear, RMSNorm, apply_rope
from posttrain.tree import pytree


@pytree
class Context:
    """What every layer of one forward pass shares."""

    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    rope: dict[Any, tuple[Float[Array, "B T half"], Float[Array, "B T half"]]]


class Attention(nnx.Module):
    def __init__(
        self,
        config: AttentionConfig,
        repeats: int,
        embed_dim: int,
        *,
        norm_eps: float,
        stddev: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.config = config
        q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        kwargs: dict[str, Any] = {"stddev": stddev, "dtype": dtype, "rngs": rngs}
        self.q = Linear(repeats, ("embed", "heads"), (embed_dim, q_dim), bias=config.qkv_bias, **kwargs)
        self.k = Linear(repeats, ("embed", "kv_heads"), (embed_dim, kv_dim), bias=config.qkv_bias, **kwargs)
        self.v = Linear(repeats, ("embed", "kv_heads"), (embed_dim, kv_dim), bias=config.qkv_bias, **kwargs)
        self.o = Linear(repeats, ("heads", "embed"), (q_dim, embed_dim), bias=config.out_bias, **kwargs)
        norm = (repeats,), "head_dim", config.head_dim
        self.q_norm = RMSNorm(*norm, eps=norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(*norm, eps=norm_eps, dtype=dtype) if config.qk_norm else None

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None, layer: int
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        c = self.config
        rows, length, _ = x.shape
        q = self.q(x).reshape(rows, length, c.num_heads, c.head_dim)
        k = self.k(x).reshape(rows, length, c.num_kv_heads, c.head_dim)
        v = self.v(x).reshape(rows, length, c.num_kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        tables = context.rope[(c.rope, c.head_dim)]
        q, k = apply_rope(q, tables), apply_rope(k, tables)
        scale = c.head_dim**-0.5
        if cache is None:
            keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
            k_positions, k_segments, q_segments = context.positions, context.segments, context.segments
        else:
            # Padding goes out of range, where it is dropped.
            places = jnp.where(context.segments > 0, context.positions, cache.keys[layer].shape[2])
            cache = cache.write(layer, k, v, places)
            keys, values = cache.read(layer)
            # A cache row holds one sequence, so position alone decides what a query sees.
            k_positions = jnp.broadcast_to(jnp.arange(cache.width, dtype=jnp.int32), (rows, cache.width))
            k_segments, q_segments = jnp.ones_like(k_positions), jnp.ones_like(context.segments)
        out = attention(
            q,
            keys.astype(q.dtype),
            values.astype(q.dtype),
            q_positions=context.positions,
            k_positions=k_positions,
            q_segments=q_segments,
            k_segments=k_segments,
            window=c.window,
            scale=scale,
        )
        return self.o(out.reshape(rows, length, -1)), cache
