"""Grouped-query attention layer: projections, norms, RoPE, KV cache, kernel."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from posttrain.models.config import AttentionConfig, ModelConfig
from posttrain.models.forward_state import Context, ForwardState, LayerIndex, StoredKeys, StoredPages, attend, store
from posttrain.models.layers import FusedLinear, Init, Linear, RMSNorm, fused, normal, param, rms_normed
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
        self.sinks = param(normal(init, (repeats, c.num_heads)), ("layers", "heads")) if c.sinks else None
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
        if c.rope is not None:
            q = apply_rope(q, context.rope[c.rope], interleaved=c.rope.interleaved)
        stored = self._keys_and_values(projected, context, state, index) if c.reuses is None else state.kept[c.reuses]
        if c.keeps is not None:
            assert isinstance(stored, StoredKeys), "ragged paged attention cannot share keys and values between layers"
            state.kept[c.keeps] = stored
        sinks = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        out = attend(q, stored, context, state, window=c.window, scale=c.scale, soft_cap=c.soft_cap, sinks=sinks)
        return self.o(out.reshape(*x.shape[:2], -1))

    def fuse(self, shards: int) -> None:
        """Compute queries, keys and values as one product from now on."""
        self.fused = nnx.data(fused(self._layers, shards))

    @property
    def _layers(self) -> list[Linear]:
        return [layer for layer in (self.q, self.k, self.v) if layer is not None]

    def _projected(self, x: Float[Array, "B T D"]) -> list[Float[Array, "B T _F"]]:
        """Queries, and of the layer's own keys and values as many as have a projection."""
        layers = self._layers
        return [layer(x) for layer in layers] if self.fused is None else self.fused(x, layers)

    def _keys_and_values(
        self, projected: list[Float[Array, "B T _F"]], context: Context, state: ForwardState, index: LayerIndex
    ) -> StoredKeys | StoredPages:
        c = self.config
        k = self._heads(projected[1], self.k_norm, c.num_kv_heads)
        v = projected[-1].reshape(*k.shape)
        state.projected |= {"k": k, "v": v}
        if c.rope is not None:
            k = apply_rope(k, context.rope[c.rope], interleaved=c.rope.interleaved)
        if c.value_norm:
            v = rms_normed(v, self.norm_eps).astype(v.dtype)
        return store(k.swapaxes(1, 2), v.swapaxes(1, 2), context, state, index)

    def _heads(self, x: Float[Array, "B T F"], norm: RMSNorm | None, heads: int) -> Float[Array, "B T N H"]:
        """Split into heads, with the norm over the whole projection or per head."""
        if norm is not None and self.config.qk_norm == "projection":
            x = norm(x)
        x = x.reshape(*x.shape[:2], heads, self.config.head_dim)
        return norm(x) if norm is not None and self.config.qk_norm == "head" else x
