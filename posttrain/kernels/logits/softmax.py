"""Softmax of logits in the parts that statistics, divergences and their gradients share."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

NO_LOGIT = -1e30
"""In place of logits of -inf: their probability is 0, and no product with it is NaN."""


class Softmax(NamedTuple):
    """softmax(logits / temperature) before its division.

    All is relative to the largest logit, so that a nearly certain outcome has an exact logarithm. What is made of the
    same logits in several places of a program is computed once.
    """

    temperature: float
    top: Float[Array, "B C 1"]
    """The largest logit."""
    centred: Float[Array, "B C V"]
    """Logits less the largest one; not divided by the temperature."""
    exps: Float[Array, "B C V"]
    norm: Float[Array, "B C 1"]
    """The sum of `exps`."""

    @classmethod
    def of(cls, logits: Float[Array, "B C V"], temperature: float) -> Softmax:
        top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        centred, exps = _relative(logits, top, temperature)
        return cls(temperature, top, centred, exps, jnp.sum(exps, axis=-1, keepdims=True))

    @classmethod
    def again(
        cls, logits: Float[Array, "B C V"], temperature: float, top: Float[Array, "B C 1"], norm: Float[Array, "B C 1"]
    ) -> Softmax:
        """With `top` and `norm` known from before."""
        return cls(temperature, top, *_relative(logits, top, temperature), norm)

    @property
    def log_norm(self) -> Float[Array, "B C 1"]:
        return jnp.log(self.norm)

    @property
    def probs(self) -> Float[Array, "B C V"]:
        return self.exps / self.norm

    @property
    def logs(self) -> Float[Array, "B C V"]:
        """Of the probabilities."""
        return self.centred / self.temperature - self.log_norm

    def log_of(self, logits: Float[Array, "B C K"]) -> Float[Array, "B C K"]:
        """Log-probabilities of outcomes whose logits these are; -inf where a logit is."""
        return (logits - self.top) / self.temperature - self.log_norm


def _relative(
    logits: Float[Array, "B C V"], top: Float[Array, "B C 1"], temperature: float
) -> tuple[Float[Array, "B C V"], Float[Array, "B C V"]]:
    centred = jnp.maximum(logits - top, NO_LOGIT)
    return centred, jnp.exp(centred / temperature)
