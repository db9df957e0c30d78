"""Losses on given text."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from posttrain.batch import Batch, LossOutput, TokenStats
from posttrain.losses.reduce import token_mean
from posttrain.tree import Mean


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood: sum(-w log p) / sum(w)."""

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        metrics = _metrics(stats, batch)
        return LossOutput(loss=metrics["nll"], metrics=metrics)


@dataclass(frozen=True)
class DFTLoss:
    """Dynamic fine-tuning: sum(-w sg(p) log p) / sum(w), a weaker pull of improbable tokens. arXiv:2508.05629."""

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        logps = _masked(stats.logps, batch)
        loss = token_mean(-jax.lax.stop_gradient(jnp.exp(logps)) * logps, jnp.asarray(batch.loss_weight), _ids(batch))
        return LossOutput(loss=loss, metrics=_metrics(stats, batch))


def _ids(batch: Batch) -> Array:
    return jnp.asarray(batch.segments)


def _masked(values: Array, batch: Batch) -> Array:
    # Before `exp`: a masked token must not reach the gradient as 0 * inf.
    return jnp.where(jnp.asarray(batch.loss_weight) > 0, values, 0.0)


def _metrics(stats: TokenStats, batch: Batch) -> dict[str, Mean]:
    weight = jnp.asarray(batch.loss_weight)
    metrics = {"nll": token_mean(-_masked(stats.logps, batch), weight, _ids(batch))}
    if stats.entropy is not None:
        metrics["entropy"] = token_mean(_masked(stats.entropy, batch), weight, _ids(batch))
    return metrics
