"""Softmax terms shared by token statistics, divergences and their gradients."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

NO_LOGIT = -1e30
"""Finite stand-in for logits of -inf: probability 0, and no product with it is NaN."""


class Softmax(NamedTuple):
    """softmax(logits / temperature) before its division.

    Everything is relative to the largest logit, so that a nearly certain outcome has an exact logarithm. XLA merges
    equal computations on the same logits.
    """

    temperature: float
    top: Float[Array, "B C 1"]
    """Largest logit."""
    centred: Float[Array, "B C V"]
    """Logits minus the largest, not divided by the temperature."""
    exps: Float[Array, "B C V"]
    norm: Float[Array, "B C 1"]
    """Sum of `exps`."""

    @classmethod
    def of(cls, logits: Float[Array, "B C V"], temperature: float) -> Softmax:
        top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        centred, exps = _relative(logits, top, temperature)
        return cls(temperature, top, centred, exps, jnp.sum(exps, axis=-1, keepdims=True))

    @classmethod
    def with_norm(
        cls, logits: Float[Array, "B C V"], temperature: float, top: Float[Array, "B C 1"], norm: Float[Array, "B C 1"]
    ) -> Softmax:
        """Build from `top` and `norm` saved by the forward pass."""
        return cls(temperature, top, *_relative(logits, top, temperature), norm)

    @property
    def log_norm(self) -> Float[Array, "B C 1"]:
        return jnp.log(self.norm)

    @property
    def probs(self) -> Float[Array, "B C V"]:
        return self.exps / self.norm

    @property
    def logs(self) -> Float[Array, "B C V"]:
        """Log-probabilities."""
        return self.centred / self.temperature - self.log_norm

    def log_of(self, logits: Float[Array, "B C K"]) -> Float[Array, "B C K"]:
        """Log-probabilities of outcomes with these logits; -inf where a logit is."""
        return (logits - self.top) / self.temperature - self.log_norm


def _relative(
    logits: Float[Array, "B C V"], top: Float[Array, "B C 1"], temperature: float
) -> tuple[Float[Array, "B C V"], Float[Array, "B C V"]]:
    centred = jnp.maximum(logits - top, NO_LOGIT)
    return centred, jnp.exp(centred / temperature)
