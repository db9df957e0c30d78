"""The tiny fixture: a real `Decoder` with grouped heads, a window in one layer, qk-norm or biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from posttrain.models.config import AttentionConfig, BlockConfig, MLPConfig, ModelConfig, Rope, stages_of
from posttrain.models.decoder import Decoder
from posttrain.models.weights import ModelWeights

WINDOW = 5


def tiny_config(
    *,
    num_layers: int = 3,
    windows: tuple[int | None, ...] = (None, WINDOW, None),
    qk_norm: bool = True,
    bias: bool = False,
    **changes: Any,
) -> ModelConfig:
    """3 layers, 4 query and 2 key-value heads of 8, embed 32, vocabulary 512; `changes` are fields of `ModelConfig`.

    Layer i has `windows[i % len(windows)]`. With `qk_norm` it is a qwen3, else with `bias` a qwen2, else a llama
    (which has a form on disk only without windows).
    """
    attention = AttentionConfig(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope=Rope(theta=10_000.0),
        qk_norm=qk_norm,
        qkv_bias=bias,
        out_bias=bias and qk_norm,
    )
    blocks = tuple(
        BlockConfig(attention=replace(attention, window=windows[i % len(windows)]), mlp=MLPConfig(dim=48))
        for i in range(num_layers)
    )
    config = ModelConfig(
        model_type="qwen3" if qk_norm else "qwen2" if bias else "llama",
        vocab_size=512,
        embed_dim=32,
        norm_eps=1e-5,
        tie_embeddings=True,
        max_positions=256,
        stages=stages_of(blocks),
        initializer_range=0.2,
    )
    return replace(config, **changes)


def tiny_model(
    seed: int = 0,
    *,
    dtype: DTypeLike = jnp.float32,
    compute_dtype: DTypeLike | None = None,
    remat: bool = False,
    **changes: Any,
) -> Decoder:
    """A `Decoder` of `tiny_config(**changes)` with random weights."""
    config = tiny_config(**changes)
    types = {"dtype": jnp.dtype(dtype), "compute_dtype": jnp.dtype(compute_dtype or dtype)}

    def build(seed: Any) -> Decoder:
        return Decoder(config, **types, remat=remat, rngs=nnx.Rngs(jax.random.key(seed)))

    # One compiled program instead of one per shape.
    arrays = jax.jit(lambda seed: ModelWeights(build(seed)).read())(jnp.uint32(seed))
    return ModelWeights(nnx.eval_shape(build, jnp.uint32(seed))).bind(arrays)


def shake(model: Decoder, seed: int, stddev: float = 0.1) -> None:
    """Add noise to every parameter, so that biases, norms and adapters count."""
    weights = ModelWeights(model)
    keys = jax.random.split(jax.random.key(seed), len(weights.read()))
    noisy = {
        path: (w + stddev * jax.random.normal(key, w.shape)).astype(w.dtype)
        for key, (path, w) in zip(keys, sorted(weights.read().items()), strict=True)
    }
    weights.write(noisy)


def forward(model: Decoder, tokens: Any, positions: Any = None, segments: Any = None) -> Array:
    """Logits of whole rows, compiled; by default each row is one sequence."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    segments = jnp.ones_like(tokens) if segments is None else segments
    weights = ModelWeights(model)

    @jax.jit
    def run(arrays: Any, *inputs: Array) -> Array:
        bound = weights.bind(arrays)
        return bound.logits(bound(*inputs)[0])

    return run(weights.read(), tokens, jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32))
