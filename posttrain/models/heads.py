"""Scalar heads for reward models and critics: one number per token instead of logits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from posttrain.errors import ConfigError
from posttrain.models.config import ModelConfig
from posttrain.models.layers import Init, normal, param

CAUSAL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
WITHOUT_CLASSIFIER = ("gemma4_text", "granite", "glm4_moe")
"""Families without a sequence classifier in transformers, and so without a file format."""


class ScalarHead(nnx.Module):
    """Linear head x w without a bias, as in one-label sequence classifiers of transformers."""

    def __init__(self, embed_dim: int, init: Init):
        self.kernel = param(normal(init, (embed_dim, 1)), ("embed", "score"))

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        kernel = self.kernel[...].astype(hidden.dtype)[:, 0]
        return jnp.einsum("btd,d->bt", hidden, kernel, preferred_element_type=jnp.float32)


def reward_config(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the same decoder as a one-label sequence classifier (reward model)."""
    if config.scalar_head:
        return config
    if config.model_type in WITHOUT_CLASSIFIER:
        raise ConfigError(f"model: transformers has no sequence classifier for {config.model_type}; use another family")
    fields = json.loads(config.hf_json)
    names = fields.get("architectures") or []
    if len(names) != 1 or not names[0].endswith(CAUSAL):
        raise ConfigError(f"model: architectures={names} of config.json is no model {CAUSAL}; give a text model")
    fields |= {"architectures": [names[0].removesuffix(CAUSAL) + CLASSIFIER], **_labels()}
    return replace(config, scalar_head=True, hf_json=json.dumps(fields))


def with_padding(config: ModelConfig, pad_id: int | None, stop_ids: Sequence[int]) -> ModelConfig:
    """Set the padding token, since transformers reads the score at the last non-padding token.

    A stop token is never used; without a padding token transformers accepts one sequence at a time and reports it.
    """
    fields = json.loads(config.hf_json)
    fields["pad_token_id"] = None if pad_id in stop_ids else pad_id
    return replace(config, hf_json=json.dumps(fields))


def is_classifier(fields: dict[str, object]) -> bool:
    """Return True if a `config.json` is of a sequence classifier. Raises ConfigError for more than one label."""
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not str(names[0]).endswith(CLASSIFIER):
        return False
    labels = fields.get("id2label", {0: "", 1: ""})
    if not isinstance(labels, dict) or len(labels) != 1:
        raise ConfigError(f"id2label: a reward model needs exactly one label, got {labels!r}")
    return True


def _labels() -> dict[str, dict[str, object]]:
    return {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
