"""Scalar head of a decoder: adding it, training it beside an adapter, placing it on a mesh."""

from __future__ import annotations

import jax
from flax import nnx
from jax.sharding import Mesh

from posttrain.mesh import param_sharding
from posttrain.models.decoder import Decoder
from posttrain.models.heads import ScalarHead, reward_config
from posttrain.models.layers import Init
from posttrain.weights.lora import has_lora
from posttrain.weights.state import ModelWeights

SCORE = "score.kernel"


def add_scalar_head(model: Decoder, *, seed: int, mesh: Mesh | None = None) -> None:
    """Add a scalar head, if there is none yet; beside an adapter the head is trained in full."""
    if not model.config.scalar_head:
        with_scalar_head(model, seed=seed)
    weights = ModelWeights(model)
    if has_lora(model):
        weights.set_saved(weights.saved() | {SCORE})
    if mesh is not None:
        kernel = weights.read()[SCORE]
        sharding = param_sharding(mesh, SCORE, weights.dims()[SCORE], kernel.shape)
        weights.write({SCORE: jax.device_put(kernel, sharding)})


def with_scalar_head(model: Decoder, *, seed: int) -> None:
    """Replace the model's head by a randomly initialized scalar head.

    Raises ConfigError for a family without a sequence classifier in transformers.
    """
    config = reward_config(model.config)
    dtype = model.embed.embedding[...].dtype
    init = Init(model.config.initializer_range, dtype, nnx.Rngs(jax.random.key(seed)))
    model.head = nnx.data(None)
    model.score = nnx.data(ScalarHead(config.embed_dim, init))
    model.config = config
