"""Gap of sampler and trainer: differences of their log-probabilities of the sampled tokens, before the update."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from posttrain.batch import Batch, BatchLoss, LossOutput, TokenLoss, TokenStats
from posttrain.losses.kl import k3
from posttrain.losses.reduce import sequence_sums, to_tokens, token_mean
from posttrain.tree import Max, Metric, Quantile

OUTLIER_NATS = 0.5
"""Threshold in nats: sampled tokens whose sampler and trainer log-probabilities differ by more are outliers."""
THIRDS = (
    "sampling/logp_difference/at_first",
    "sampling/logp_difference/at_middle",
    "sampling/logp_difference/at_last",
)


def sampler_gap(stats: TokenStats, batch: Batch, mask: Bool[Array, "B T"]) -> dict[str, Metric]:
    """Metrics of the gap, over tokens sampled with the current weights; none without `sampler_logps`.

    `sampling/logp_difference/*`: absolute difference of the log-probabilities: mean, maximum, 99th percentile, share
    above `OUTLIER_NATS`, mean of its square, and mean in the first, middle and last third of the samples; `signed`:
    mean of trainer - sampler. `stale_mean`: mean over tokens sampled with older weights, where a difference is
    expected.
    `sampling/kl`: KL(sampler || trainer), k3 estimate.
    """
    if batch.sampler_logps is None:
        return {}
    segments = jnp.asarray(batch.segments)
    trainer = jax.lax.stop_gradient(stats.logps if stats.sampling_logps is None else stats.sampling_logps)
    sampler = jnp.asarray(batch.sampler_logps)
    signed = trainer - sampler
    gap = jnp.abs(signed)
    stale = jnp.zeros_like(mask) if batch.staleness is None else jnp.asarray(batch.staleness) > 0
    counts = mask & ~stale
    fresh = counts.astype(gap.dtype)
    metrics: dict[str, Metric] = {
        "sampling/logp_difference/mean": token_mean(gap, fresh, segments),
        "sampling/logp_difference/signed": token_mean(signed, fresh, segments),
        "sampling/logp_difference/square": token_mean(jnp.square(gap), fresh, segments),
        "sampling/logp_difference/max": Max(largest=jnp.max(jnp.where(counts, gap, 0.0))),
        "sampling/logp_difference/p99": Quantile.of(gap, counts, share=0.99),
        "sampling/logp_difference/outliers": token_mean((gap > OUTLIER_NATS).astype(gap.dtype), fresh, segments),
        "sampling/kl": token_mean(k3(sampler, trainer, counts), fresh, segments),
    }
    third = _thirds(mask, segments)
    for number, name in enumerate(THIRDS):
        metrics[name] = token_mean(gap, fresh * (third == number), segments)
    if batch.staleness is not None:
        metrics["sampling/logp_difference/stale_mean"] = token_mean(gap, (mask & stale).astype(gap.dtype), segments)
    return metrics


@dataclass(frozen=True)
class WithSamplerGap:
    """A user's loss with the metrics of `sampler_gap` beside its own, which the gate of sampler and trainer needs."""

    loss: TokenLoss

    @property
    def needs_whole_batch(self) -> bool:
        loss: object = self.loss
        return isinstance(loss, BatchLoss) and loss.needs_whole_batch

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        output = self.loss(stats, batch)
        gap = sampler_gap(stats, batch, jnp.asarray(batch.loss_weight) > 0)
        return replace(output, metrics={**output.metrics, **gap})


def _thirds(mask: Bool[Array, "B T"], segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Third (0, 1, 2) of its sample in which each sampled token lies; other tokens have any number."""
    one = mask.astype(jnp.float32)
    lengths = sequence_sums(one, segments)
    before = to_tokens(jnp.cumsum(lengths, axis=1) - lengths, segments)
    index = jnp.cumsum(one, axis=1) - one - before
    return (3 * index).astype(jnp.int32) // jnp.maximum(to_tokens(lengths, segments), 1.0).astype(jnp.int32)
