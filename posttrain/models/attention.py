"""Attention layers: grouped heads with RoPE, and multi-head latent attention (MLA)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from posttrain.models.activations import QKV
from posttrain.models.cache import head_lanes
from posttrain.models.config import AttentionConfig, LatentAttentionConfig, ModelConfig
from posttrain.models.forward_state import (
    Context,
    ForwardState,
    LayerIndex,
    StoredKeys,
    StoredPages,
    attend,
    store_keys,
)
from posttrain.models.layers import FusedLinear, Init, Linear, RMSNorm, fused_linear, normal, param, rms_normed
from posttrain.models.rope import apply_rope


class Attention(nnx.Module):
    """Grouped-query attention, arXiv:2305.13245."""

    def __init__(self, config: AttentionConfig, model: ModelConfig, repeats: int, init: Init):
        self.config = c = config
        self.norm_eps = model.norm_eps
        embed_dim, q_dim, kv_dim = model.embed_dim, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        own_keys, own_values = c.reuses is None, c.reuses is None and not c.keys_as_values
        self.q = Linear(repeats, ("embed", "heads"), (embed_dim, q_dim), init, bias=c.qkv_bias)
        kv = (repeats, ("embed", "kv_heads"), (embed_dim, kv_dim), init)
        self.k = Linear(*kv, bias=c.qkv_bias) if own_keys else None
        self.v = Linear(*kv, bias=c.qkv_bias) if own_values else None
        self.o = Linear(repeats, ("heads", "embed"), (q_dim, embed_dim), init, bias=c.out_bias)
        self.sinks = param(normal(init, (repeats, c.num_heads)), ("layers", "heads"), "sinks") if c.sinks else None
        sizes = {None: (0, 0), "head": (c.head_dim, c.head_dim), "projection": (q_dim, kv_dim)}[c.qk_norm]
        dims = ("head_dim", "head_dim") if c.qk_norm == "head" else ("heads", "kv_heads")
        self.q_norm = RMSNorm.of(model, repeats, dims[0], sizes[0], init) if c.qk_norm else None
        self.k_norm = RMSNorm.of(model, repeats, dims[1], sizes[1], init) if c.qk_norm and own_keys else None
        self.fused: FusedLinear | None = nnx.data(None)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, state: ForwardState, index: LayerIndex
    ) -> Float[Array, "B T D"]:
        c = self.config
        projected = self._projected(x)
        state.projected["q"] = q = self._heads(projected[0], self.q_norm, c.num_heads)
        q = self._rotated(q, context)
        stored = self._keys_and_values(projected, context, state, index) if c.reuses is None else state.kept[c.reuses]
        if c.reuses is not None and state.cache is None and isinstance(stored, StoredKeys):
            # Those of this pass: a kernel for rows asks for the very same arrays, which a loop or remat has renamed.
            ids = {"segments": context.segments, "q_segments": context.segments}
            stored = stored._replace(positions=context.positions, **ids)
        if c.keeps is not None:
            assert isinstance(stored, StoredKeys), "paged attention cannot share keys and values between layers"
            state.kept[c.keeps] = stored
        sinks = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        options: dict[str, Any] = {"window": c.window, "scale": c.scale, "soft_cap": c.soft_cap}
        out = attend(q, stored, context, state, **options, sinks=sinks, image_ahead=c.image_ahead)
        return self.o(out.reshape(*x.shape[:2], -1))

    def fuse(self, shards: int) -> None:
        """Compute queries, keys and values as one product from now on."""
        self.fused = nnx.data(fused_linear(self._layers, shards))

    @property
    def _layers(self) -> list[Linear]:
        return [layer for layer in (self.q, self.k, self.v) if layer is not None]

    def _projected(self, x: Float[Array, "B T D"]) -> list[Float[Array, "B T _F"]]:
        """Queries, and of the layer's own keys and values as many as have a projection."""
        layers = self._layers
        projected = [layer(x) for layer in layers] if self.fused is None else self.fused(x, layers)
        # The backward pass of a norm reads its input; without norms that of the kernel reads what RoPE returns.
        return projected if self.q_norm is None else [checkpoint_name(y, QKV) for y in projected]

    def _keys_and_values(
        self, projected: list[Float[Array, "B T _F"]], context: Context, state: ForwardState, index: LayerIndex
    ) -> StoredKeys | StoredPages:
        c = self.config
        k = self._heads(projected[1], self.k_norm, c.num_kv_heads)
        v = projected[-1].reshape(*k.shape)
        state.projected |= {"k": k, "v": v}
        k = self._rotated(k, context)
        if c.value_norm:
            v = rms_normed(v, self.norm_eps).astype(v.dtype)
        if self.q_norm is None:
            v = checkpoint_name(v, QKV)
        window = c.window if c.keeps is None else None
        return store_keys(k.swapaxes(1, 2), v.swapaxes(1, 2), context, state, index, window=window)

    def _rotated(self, x: Float[Array, "B T N H"], context: Context) -> Float[Array, "B T N H"]:
        rope = self.config.rope
        x = x if rope is None else apply_rope(x, context.rope[rope], interleaved=rope.interleaved)
        return x if self.q_norm is not None else checkpoint_name(x, QKV)

    def _heads(self, x: Float[Array, "B T F"], norm: RMSNorm | None, heads: int) -> Float[Array, "B T N H"]:
        """Split into heads, with the norm over the whole projection or per head."""
        if norm is not None and self.config.qk_norm == "projection":
            x = norm(x)
        x = x.reshape(*x.shape[:2], heads, self.config.head_dim)
        return norm(x) if norm is not None and self.config.qk_norm == "head" else x


class LatentAttention(nnx.Module):
    """Multi-head latent attention of DeepSeek-V2, arXiv:2405.04434, section 2.1.

    The cache holds only latents and the shared rotated key. In prefill, latents are expanded to keys and values of
    every head; in decoding the expansion is absorbed into queries and outputs: the same sums in another order.
    """

    def __init__(self, config: LatentAttentionConfig, model: ModelConfig, repeats: int, init: Init):
        self.config = c = config

        def norm(size: int) -> RMSNorm:
            return RMSNorm((repeats,), "latent", size, eps=c.norm_eps, dtype=init.dtype)

        q_dim = c.num_heads * (c.nope_dim + c.rope_dim)
        rank, down = c.q_rank or 0, c.q_rank is not None
        self.q = None if down else Linear(repeats, ("embed", "heads"), (model.embed_dim, q_dim), init, bias=False)
        to_low, to_heads = (("embed", "latent"), (model.embed_dim, rank)), (("latent", "heads"), (rank, q_dim))
        self.q_down = Linear(repeats, *to_low, init, bias=c.bias) if down else None
        self.q_norm = norm(rank) if down else None
        self.q_up = Linear(repeats, *to_heads, init, bias=False) if down else None
        kv_rank, kv_dim = c.kv_rank, c.num_heads * (c.nope_dim + c.value_dim)
        self.kv_down = Linear(repeats, ("embed", "latent"), (model.embed_dim, kv_rank + c.rope_dim), init, bias=c.bias)
        self.kv_norm = norm(kv_rank)
        self.kv = Linear(repeats, ("latent", "heads"), (kv_rank, kv_dim), init, bias=False)
        out = c.num_heads * c.value_dim
        self.o = Linear(repeats, ("heads", "embed"), (out, model.embed_dim), init, bias=c.bias)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, state: ForwardState, index: LayerIndex
    ) -> Float[Array, "B T D"]:
        c = self.config
        rows, length, _ = x.shape
        q = self._queries(x).reshape(rows, length, c.num_heads, c.nope_dim + c.rope_dim)
        tables, interleaved = context.rope[c.rope], c.rope.interleaved
        q_nope, q_rope = q[..., : c.nope_dim], apply_rope(q[..., c.nope_dim :], tables, interleaved=interleaved)
        down = checkpoint_name(self.kv_down(x), QKV)
        latent = self.kv_norm(down[..., : c.kv_rank])
        k_rope = apply_rope(down[..., None, c.kv_rank :], tables, interleaved=interleaved)[:, :, 0]
        if state.cache is None or state.fresh:
            out = self._expanded(q_nope, q_rope, latent, k_rope, context, state, index)
        else:
            out = self._absorbed(q_nope, q_rope, latent, k_rope, context, state, index)
        return self.o(out.reshape(rows, length, -1))

    def _queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        if self.q is not None:
            return self.q(x)
        assert self.q_down is not None and self.q_norm is not None and self.q_up is not None
        return self.q_up(self.q_norm(checkpoint_name(self.q_down(x), QKV)))

    def _expanded(
        self,
        q_nope: Float[Array, "B T N Hn"],
        q_rope: Float[Array, "B T N Hr"],
        latent: Float[Array, "B T R"],
        k_rope: Float[Array, "B T Hr"],
        context: Context,
        state: ForwardState,
        index: LayerIndex,
    ) -> Float[Array, "B T N Hv"]:
        c = self.config
        kv = checkpoint_name(self.kv(latent), QKV).reshape(*latent.shape[:2], c.num_heads, c.nope_dim + c.value_dim)
        shared = jnp.broadcast_to(k_rope[:, :, None], (*kv.shape[:3], c.rope_dim))
        keys = jnp.concatenate([kv[..., : c.nope_dim], shared], axis=-1)
        values = kv[..., c.nope_dim :]
        state.projected |= {"q": q_nope, "k": kv[..., : c.nope_dim], "v": values}
        if state.cache is not None:
            store_keys(self._cached(latent, k_rope), None, context, state, index, window=None)
        segments = context.segments
        stored = StoredKeys(keys.swapaxes(1, 2), values.swapaxes(1, 2), context.positions, segments, segments)
        q = checkpoint_name(jnp.concatenate([q_nope, q_rope], axis=-1), QKV)
        return self._attend(q, stored, context, state)

    def _absorbed(
        self,
        q_nope: Float[Array, "B T N Hn"],
        q_rope: Float[Array, "B T N Hr"],
        latent: Float[Array, "B T R"],
        k_rope: Float[Array, "B T Hr"],
        context: Context,
        state: ForwardState,
        index: LayerIndex,
    ) -> Float[Array, "B T N Hv"]:
        c = self.config
        up = self.kv.weight(q_nope.dtype).reshape(c.kv_rank, c.num_heads, c.nope_dim + c.value_dim)
        stored = store_keys(self._cached(latent, k_rope), None, context, state, index, window=None)
        if isinstance(stored, StoredPages):
            stored = stored._replace(lanes=head_lanes(c))
        else:
            stored = stored._replace(values=stored.keys[..., : c.kv_rank])
        q_latent = jnp.einsum("btnh,rnh->btnr", q_nope, up[..., : c.nope_dim])
        if (stack := self.kv.stack) is not None:
            a, b = stack.lora_a[...].astype(q_nope.dtype), stack.scaled_b(q_nope.dtype).reshape(-1, *up.shape[1:])
            low = stack.own(jnp.einsum("btnh,ynh->btny", q_nope, b[..., : c.nope_dim]))
            q_latent = q_latent + jnp.einsum("btny,ry->btnr", low, a)
        out = self._attend(jnp.concatenate([q_latent, q_rope], axis=-1), stored, context, state)
        heads = jnp.einsum("btnr,rnh->btnh", out, up[..., c.nope_dim :])
        if stack is not None:
            low = stack.own(jnp.einsum("btnr,ry->btny", out, a))
            heads = heads + jnp.einsum("btny,ynh->btnh", low, b[..., c.nope_dim :])
        return heads

    def _cached(self, latent: Float[Array, "B T R"], k_rope: Float[Array, "B T Hr"]) -> Float[Array, "B 1 T H"]:
        return jnp.concatenate([latent, k_rope], axis=-1)[:, None]

    def _attend(
        self, q: Float[Array, "B T N H"], stored: StoredKeys | StoredPages, context: Context, state: ForwardState
    ) -> Float[Array, "B T N Hv"]:
        return attend(q, stored, context, state, window=self.config.window, scale=self.config.scale)
