"""Scalar head of a decoder (reward model): its configuration, adding it, training it beside an adapter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import jax
from flax import nnx
from jax.sharding import Mesh

from posttrain.errors import ConfigError
from posttrain.mesh import param_sharding
from posttrain.models.config import ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.models.hf import classifier_fields
from posttrain.models.layers import Init, ScalarHead
from posttrain.runtime import processes
from posttrain.weights.lora import has_lora
from posttrain.weights.state import ModelWeights

SCORE = "score.kernel"
WITHOUT_CLASSIFIER = ("gemma4_text", "granite", "glm4_moe")
"""Families of text without a sequence classifier in transformers, and so without a file format. Those with pictures
have the layout of its classifiers in general."""


def add_scalar_head(model: Decoder, *, seed: int, mesh: Mesh | None = None, saved: bool = True) -> None:
    """Add a scalar head, if there is none yet; beside an adapter the head is trained in full. `saved`: the model is to
    be saved as a sequence classifier."""
    if not model.config.scalar_head:
        with_scalar_head(model, seed=seed, saved=saved)
    weights = ModelWeights(model)
    if has_lora(model):
        weights.set_saved(weights.saved() | {SCORE})
    if mesh is not None:
        kernel = weights.read()[SCORE]
        sharding = param_sharding(mesh, SCORE, weights.dims()[SCORE], kernel.shape)
        weights.write({SCORE: processes.on_devices(kernel, sharding)})


def with_scalar_head(model: Decoder, *, seed: int, saved: bool = True) -> None:
    """Replace the model's head by a randomly initialized scalar head.

    Raises ConfigError for a family without a sequence classifier in transformers.
    """
    config = reward_config(model.config) if saved else replace(model.config, scalar_head=True)
    dtype = model.embed.embedding[...].dtype
    init = Init(model.config.initializer_range, dtype, nnx.Rngs(jax.random.key(seed)))
    model.head = nnx.data(None)
    model.score = nnx.data(ScalarHead(config.embed_dim, init))
    model.config = config


def reward_config(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the same decoder as a one-label sequence classifier (reward model)."""
    if config.scalar_head:
        return config
    if config.vision is None and config.model_type in WITHOUT_CLASSIFIER:
        raise ConfigError(f"model: transformers has no sequence classifier for {config.model_type}; use another family")
    fields = json.loads(config.hf_json)
    return replace(config, scalar_head=True, hf_json=json.dumps(fields | classifier_fields(fields)))


def with_padding(config: ModelConfig, pad_id: int | None, stop_ids: Sequence[int]) -> ModelConfig:
    """Set the padding token, since transformers reads the score at the last non-padding token.

    A stop token is never used; without a padding token transformers accepts one sequence at a time and reports it.
    """
    fields = json.loads(config.hf_json)
    padding = {"pad_token_id": None if pad_id in stop_ids else pad_id}
    # transformers reads that of the text part.
    fields |= padding | ({"text_config": fields["text_config"] | padding} if "text_config" in fields else {})
    return replace(config, hf_json=json.dumps(fields))
