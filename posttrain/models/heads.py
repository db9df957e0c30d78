"""Scalar heads for reward models and critics: one number per token instead of logits."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from posttrain.errors import ConfigError
from posttrain.models.layers import Init, normal, param

CAUSAL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


class ScalarHead(nnx.Module):
    """Linear head x w without a bias, as in one-label sequence classifiers of transformers."""

    def __init__(self, embed_dim: int, init: Init):
        self.kernel = param(normal(init, (embed_dim, 1)), ("embed", "score"))

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        kernel = self.kernel[...].astype(hidden.dtype)[:, 0]
        return jnp.einsum("btd,d->bt", hidden, kernel, preferred_element_type=jnp.float32)


def is_classifier(fields: dict[str, object]) -> bool:
    """Return True if a `config.json` is of a sequence classifier. Raises ConfigError for more than one label."""
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not str(names[0]).endswith(CLASSIFIER):
        return False
    labels = fields.get("id2label", {0: "", 1: ""})
    if not isinstance(labels, dict) or len(labels) != 1:
        raise ConfigError(f"id2label: a reward model needs exactly one label, got {labels!r}")
    return True
