"""Value loss of a critic with a scalar head."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from posttrain.batch import Batch, LossOutput, ScoreStats
from posttrain.losses.reduce import token_mean


def values_before(scores: Float[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Value of the context before each token: the score of the token before it in its sequence, 0 at the first.

    It does not depend on the token itself, unlike the score at the token's own place.
    """
    inside = segments[:, 1:] == segments[:, :-1]
    return jnp.pad(jnp.where(inside, scores[:, :-1], 0.0), ((0, 0), (1, 0)))


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Clipped value loss max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2, mean over tokens.
    arXiv:1707.06347 in the form of arXiv:2005.12729.

    v is the value before the token, `values_before` of the scores; R = `batch.returns`, v_old = `batch.old_values`.
    """

    clip: float | None = 0.2
    """Largest change of a value. None: no clip."""

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"ValueLoss.clip={self.clip} must be positive; None for no clip")

    def __call__(self, stats: ScoreStats, batch: Batch) -> LossOutput:
        """Raises ValueError if `batch.returns`, or with a clip `batch.old_values`, is None."""
        if batch.returns is None or (self.clip is not None and batch.old_values is None):
            missing = "returns" if batch.returns is None else "old_values"
            raise ValueError(f"ValueLoss: batch.{missing} is None; add it with posttrain.rl.returns.with_returns")
        weight, segments = jnp.asarray(batch.loss_weight), jnp.asarray(batch.segments)
        mask = weight > 0
        values = jnp.where(mask, values_before(stats.scores, segments), 0.0)
        returns = jnp.where(mask, jnp.asarray(batch.returns), 0.0)
        losses = jnp.square(values - returns)
        clipped = jnp.zeros_like(mask)
        if self.clip is not None:
            old = jnp.where(mask, jnp.asarray(batch.old_values), 0.0)
            bounded = jnp.square(jnp.clip(values, old - self.clip, old + self.clip) - returns)
            clipped = bounded > losses
            losses = jnp.maximum(losses, bounded)
        loss = token_mean(0.5 * losses, weight, segments)
        counted = mask.astype(weight.dtype)
        metrics = {
            "critic/loss": loss,
            "critic/vf_clipfrac": token_mean(clipped.astype(weight.dtype), counted, segments),
        }
        return LossOutput(loss=loss, metrics=metrics)
