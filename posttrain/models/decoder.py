"""The one decoder: embedding, stages of blocks, final norm, head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from posttrain.models.attention import Attention, Context
from posttrain.models.cache import KVCache
from posttrain.models.config import BlockConfig, ModelConfig
from posttrain.models.config import Stage as StageConfig
from posttrain.models.layers import MLP, Embedding, Linear, RMSNorm, rope_tables

UNROLLED_LAYERS_ON_CPU = 8
"""Up to this depth XLA:CPU runs unrolled layers faster than a scan, and compiles them soon enough."""


class Block(nnx.Module):
    """Pre-norm residual block."""

    def __init__(self, config: BlockConfig, model: ModelConfig, repeats: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        kwargs: dict[str, Any] = {"stddev": model.initializer_range, "dtype": dtype, "rngs": rngs}
        norm = (repeats,), "embed", model.embed_dim
        self.attention_norm = RMSNorm(*norm, eps=model.norm_eps, dtype=dtype)
        self.attention = Attention(config.attention, repeats, model.embed_dim, norm_eps=model.norm_eps, **kwargs)
        self.mlp_norm = RMSNorm(*norm, eps=model.norm_eps, dtype=dtype)
        self.mlp = MLP(config.mlp, repeats, model.embed_dim, **kwargs)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None, layer: int
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        attended, cache = self.attention(self.attention_norm(x), context, cache, layer)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


class Stage(nnx.Module):
    """The blocks of a pattern, each holding the stacked weights of all its repeats."""

    def __init__(self, config: StageConfig, model: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.repeats = config.repeats
        self.blocks = nnx.List([Block(b, model, config.repeats, dtype=dtype, rngs=rngs) for b in config.blocks])

    def scanned(self, x: Float[Array, "B T D"], context: Context, *, remat: bool) -> Float[Array, "B T D"]:
        """One traced pattern, whatever the depth."""
        graph, weights = nnx.split(self.blocks)

        def body(x: Array, layer_weights: Any) -> tuple[Array, None]:
            for block in nnx.merge(graph, layer_weights):
                x, _ = block(x, context, None, 0)
            return x, None

        x, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, x, weights)
        return x

    def unrolled(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None, first_layer: int, *, remat: bool
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """The same layers one after the other; the only form that takes a cache, which it updates in place."""
        graph, weights = nnx.split(self.blocks)
        layer = first_layer
        for repeat in range(self.repeats):

            def body(x: Array, w: Any, cache: KVCache | None, layer: int = layer) -> tuple[Array, KVCache | None]:
                blocks: nnx.List[Block] = nnx.merge(graph, w)
                for index, block in enumerate(blocks):
                    x, cache = block(x, context, cache, layer + index)
                return x, cache

            weights_here = jax.tree.map(lambda w, repeat=repeat: w[repeat], weights)
            x, cache = (jax.checkpoint(body) if remat else body)(x, weights_here, cache)
            layer += len(self.blocks)
        return x, cache

    def split_repeats(self) -> list[Stage]:
        """One stage of a single repeat for each of its own, weights sliced out of the stacks."""
        graph, weights = nnx.split(self)
        pieces = []
        for repeat in range(self.repeats):
            piece = nnx.merge(graph, jax.tree.map(lambda w, r=repeat: w[r : r + 1], weights))
            piece.repeats = 1
            pieces.append(piece)
        return pieces


class Decoder(nnx.Module):
    """A decoder-only transformer; what differs between families is in `config`.

    >>> hidden, _ = model(tokens, positions, segments)  # doctest: +SKIP
    >>> logits = model.logits(hidden)  # doctest: +SKIP
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, compute_dtype: jnp.dtype, remat: bool, rngs: nnx.Rngs):
        self.config = config
        self.compute_dtype = compute_dtype
        self.remat = remat
        stddev = config.initializer_range
        self.embed = Embedding(config.vocab_size, config.embed_dim, stddev=stddev, dtype=dtype, rngs=rngs)
        self.stages = nnx.List([Stage(stage, config, dtype=dtype, rngs=rngs) for stage in config.stages])
        self.final_norm = RMSNorm((), "embed", config.embed_dim, eps=config.norm_eps, dtype=dtype)
        shape = (config.embed_dim, config.vocab_size)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(1, ("embed", "vocab"), shape, bias=False, stddev=stddev, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        cache: KVCache | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """Hidden states after the final norm, ready for `logits`, and the cache with these tokens written into it."""
        ropes = {(b.attention.rope, b.attention.head_dim) for b in self.config.blocks}
        context = Context(
            positions=positions, segments=segments, rope={key: rope_tables(*key, positions) for key in ropes}
        )
        x = self.embed(tokens, self.compute_dtype)
        layer = 0
        for stage, config in zip(self.stages, self.config.stages, strict=True):
            if cache is not None or self._unroll:
                x, cache = stage.unrolled(x, context, cache, layer, remat=self.remat)
            else:
                x = stage.scanned(x, context, remat=self.remat)
            layer += config.num_layers
        return self.final_norm(x), cache

    def for_decoding(self) -> Decoder:
        """The same function, for a loop over single tokens; call it outside of the loop, under `jit`.

        On CPU the slices of stacked weights are real copies, so they are made once here instead of at every token.
        """
        if jax.default_backend() != "cpu":
            return self
        sliced = nnx.merge(*nnx.split(self))
        sliced.stages = nnx.List([piece for stage in self.stages for piece in stage.split_repeats()])
        stages = tuple(replace(s, repeats=1) for s in self.config.stages for _ in range(s.repeats))
        sliced.config = replace(self.config, stages=stages)
        return sliced

    @property
    def _unroll(self) -> bool:
        return jax.default_backend() == "cpu" and self.config.num_layers <= UNROLLED_LAYERS_ON_CPU

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """float32 logits; for log-probabilities of long rows use `token_stats`, which never holds all of them."""
        if self.head is None:
            return jnp.einsum(
                "btd,vd->btv",
                hidden,
                self.embed.embedding[...].astype(hidden.dtype),
                preferred_element_type=jnp.float32,
            )
        kernel = self.head.kernel[...][0].astype(hidden.dtype)
        return jnp.einsum("btd,dv->btv", hidden, kernel, preferred_element_type=jnp.float32)
