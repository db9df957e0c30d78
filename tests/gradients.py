"""Gradients of a whole step, tensor by tensor under the names of transformers, against those of the goldens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from posttrain.models.decoder import Decoder
from posttrain.weights.save import hf_tensors


def gradient_for_weights() -> optax.GradientTransformation:
    """An optimizer after whose step each weight is its gradient."""

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda gradient, weight: gradient - weight, gradients, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def assert_gradients(model: Decoder, case: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Of a model that made one step with `gradient_for_weights`: the norm of each tensor, and the embedding's numbers
    where the golden has them."""
    found, size = dict(hf_tensors(model)), case["grad_norm_total"]
    norms = case["grad_l2_per_param"]
    assert found.keys() >= norms.keys()
    for name, norm in norms.items():
        np.testing.assert_allclose(np.linalg.norm(found[name]), norm, rtol=1e-3, atol=1e-5 * size, err_msg=name)
    expected = arrays.get(f"out/{case['name']}/grad_embed")
    if expected is not None:
        np.testing.assert_allclose(found["model.embed_tokens.weight"], expected, rtol=1e-3, atol=1e-4 * size)
