"""Supervised fine-tuning losses: negative log-likelihood, DFT."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from posttrain.batch import Batch, LossOutput, TokenStats
from posttrain.losses.reduce import token_mean
from posttrain.tree import Mean


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood: sum(-w log p) / sum(w).

    With `label_smoothing` e the target distribution is 1 - e on the token plus e / n on each of the n tokens,
    arXiv:1512.00567 section 7; requires `stats.mean_logps`.
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"SFTLoss.label_smoothing={self.label_smoothing} must be at least 0 and less than 1")

    @property
    def linear_in(self) -> tuple[str, ...]:
        return ("logps", "mean_logps") if self.label_smoothing else ("logps",)

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        """Raises ValueError if label smoothing lacks `stats.mean_logps`."""
        metrics = likelihood_metrics(stats, batch)
        if not self.label_smoothing:
            return LossOutput(loss=metrics["nll"], metrics=metrics)
        if stats.mean_logps is None:
            raise ValueError(
                f"SFTLoss: label_smoothing={self.label_smoothing} needs stats.mean_logps; give the trainer "
                "terms=Terms(mean_over=...)"
            )
        e = self.label_smoothing
        smoothed = -(1 - e) * masked(stats.logps, batch) - e * masked(stats.mean_logps, batch)
        return LossOutput(loss=_mean(smoothed, batch), metrics=metrics)


@dataclass(frozen=True)
class DFTLoss:
    """Dynamic fine-tuning (DFT): sum(-w sg(p) log p) / sum(w), down-weighting improbable tokens; arXiv:2508.05629."""

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        logps = masked(stats.logps, batch)
        loss = _mean(-jax.lax.stop_gradient(jnp.exp(logps)) * logps, batch)
        return LossOutput(loss=loss, metrics=likelihood_metrics(stats, batch))


def masked(values: Float[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    """Set tokens without weight to 0, so that their values cannot reach the gradient as 0 * inf."""
    return jnp.where(jnp.asarray(batch.loss_weight) > 0, values, 0.0)


def likelihood_metrics(stats: TokenStats, batch: Batch) -> dict[str, Mean]:
    """Token means `nll` and `entropy`."""
    metrics = {"nll": _mean(-masked(stats.logps, batch), batch)}
    if stats.entropy is not None:
        metrics["entropy"] = _mean(masked(stats.entropy, batch), batch)
    return metrics


def _mean(values: Float[Array, "B T"], batch: Batch) -> Mean:
    return token_mean(values, jnp.asarray(batch.loss_weight), jnp.asarray(batch.segments))
