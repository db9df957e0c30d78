"""Gap of sampler and trainer: differences of their log-probabilities of the sampled tokens, before the update."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from posttrain.batch import Batch, TokenStats
from posttrain.losses.reduce import token_mean
from posttrain.tree import Max, Metric

OUTLIER_NATS = 0.5
"""Threshold in nats: sampled tokens whose sampler and trainer log-probabilities differ by more are outliers."""


def sampler_gap(stats: TokenStats, batch: Batch, mask: Bool[Array, "B T"]) -> dict[str, Metric]:
    """Metrics of the gap; none without `sampler_logps`.

    `sampling/logp_difference/*`: absolute difference of sampler and trainer log-probabilities, before the update, over
    tokens sampled with the current weights: mean, maximum, and share above `OUTLIER_NATS`.
    `sampling/logp_difference/stale_mean`: mean over tokens sampled with older weights, where a difference is expected.
    """
    if batch.sampler_logps is None:
        return {}
    counted, segments = mask.astype(stats.logps.dtype), jnp.asarray(batch.segments)
    trainer = stats.logps if stats.sampling_logps is None else stats.sampling_logps
    gap = jax.lax.stop_gradient(jnp.abs(trainer - jnp.asarray(batch.sampler_logps)))
    stale = jnp.zeros_like(mask) if batch.staleness is None else jnp.asarray(batch.staleness) > 0
    fresh = counted * ~stale
    metrics: dict[str, Metric] = {
        "sampling/logp_difference/mean": token_mean(gap, fresh, segments),
        "sampling/logp_difference/max": Max(largest=jnp.max(jnp.where(fresh > 0, gap, 0.0))),
        "sampling/logp_difference/outliers": token_mean((gap > OUTLIER_NATS).astype(gap.dtype), fresh, segments),
    }
    if batch.staleness is not None:
        metrics["sampling/logp_difference/stale_mean"] = token_mean(gap, counted * stale, segments)
    return metrics
