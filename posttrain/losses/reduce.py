"""Reductions of per-token values to `Mean`, additive over rows and micro-batches.

A sequence is one segment id within a row, and of a sample as `Batch.sample_shares` says; weight 0 never counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from posttrain.batch import DIFFERENTIABLE, Batch, LinearLoss, LossOutput, TokenStats
from posttrain.tree import Mean

Reduction = Callable[..., Mean]
"""Reduction of (values, weight, segments, sample_shares), hashable: a function below or a `ConstantLength`."""
Shares = Float[Array, "B T"] | None


def sequence_sums(values: Float[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B S"]:
    """Sum of each sequence by its segment id; S = T + 1 regardless of packing, and column 0 is padding."""
    num_segments = segments.shape[1] + 1
    return jax.vmap(lambda x, s: jax.ops.segment_sum(x, s, num_segments=num_segments))(values, segments)


def to_tokens(per_sequence: Float[Array, "B S"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Broadcast values per sequence to tokens: the inverse of `sequence_sums`."""
    return jnp.take_along_axis(per_sequence, segments, axis=1)


def sample_counts(weight: Float[Array, "B T"], segments: Int[Array, "B T"], shares: Shares) -> Float[Array, "B S"]:
    """Share of each sequence in its sample; 0 without weighted tokens. They add up to the number of samples."""
    counts = sequence_sums(weight, segments) > 0
    if shares is None:
        return counts.astype(weight.dtype)
    num_segments = segments.shape[1] + 1
    largest = jax.vmap(lambda x, s: jax.ops.segment_max(x, s, num_segments=num_segments))
    return jnp.where(counts, largest(jnp.where(weight > 0, shares, 0.0), segments), 0.0)


def token_mean(
    values: Float[Array, "B T"], weight: Float[Array, "B T"], segments: Int[Array, "B T"], sample_shares: Shares = None
) -> Mean:
    """Token mean sum(w x) / sum(w): every token counts the same. SFT; DAPO, arXiv:2503.14476 eq. 8."""
    return Mean(total=_weighted(values, weight).sum(), weight=weight.sum())


def sequence_mean(
    values: Float[Array, "B T"], weight: Float[Array, "B T"], segments: Int[Array, "B T"], sample_shares: Shares = None
) -> Mean:
    """Mean over samples of their token means: every sample counts the same. GRPO, arXiv:2402.03300 eq. 3."""
    weights, counts = sequence_sums(weight, segments), sample_counts(weight, segments, sample_shares)
    means = sequence_sums(_weighted(values, weight), segments) / jnp.where(weights > 0, weights, 1.0)
    return Mean(total=jnp.where(weights > 0, means * counts, 0.0).sum(), weight=counts.sum())


def sequence_total(
    values: Float[Array, "B T"], weight: Float[Array, "B T"], segments: Int[Array, "B T"], sample_shares: Shares = None
) -> Mean:
    """Sum over tokens per sample: sum(w x) / number of samples; long samples count more. LUSPO, arXiv:2602.05261."""
    return Mean(total=_weighted(values, weight).sum(), weight=sample_counts(weight, segments, sample_shares).sum())


@dataclass(frozen=True)
class ConstantLength:
    """Constant normalizer sum(w x) / (number of samples * length): no length bias. Dr. GRPO, arXiv:2503.20783.

    `length` is a constant of the run, such as the maximum number of sampled tokens. Raises ValueError if it is below 1.
    """

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"ConstantLength.length={self.length} must be at least 1; give the run's max_tokens")

    def __call__(
        self,
        values: Float[Array, "B T"],
        weight: Float[Array, "B T"],
        segments: Int[Array, "B T"],
        sample_shares: Shares = None,
    ) -> Mean:
        total = sequence_total(values, weight, segments, sample_shares)
        return Mean(total=total.total, weight=total.weight * self.length)


def _weighted(values: Float[Array, "B T"], weight: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.where(weight > 0, values * weight, 0.0)


def known_cotangents(loss: Callable[[Any, Batch], LossOutput], batch: Batch) -> dict[str, Array] | None:
    """Gradient of the loss by the token statistics, by name; None if it depends on them."""
    if isinstance(loss, CotangentLoss):
        given = loss.cotangents
        named = {name: getattr(given, name) for name in DIFFERENTIABLE} if isinstance(given, TokenStats) else {}
        return {name: ct for name, ct in named.items() if ct is not None} or None
    linear: object = loss
    if not isinstance(linear, LinearLoss):
        return None
    zeros = jnp.zeros(batch.shape, jnp.float32)
    zero_stats = TokenStats(**{field.name: zeros for field in dataclasses.fields(TokenStats)})
    gradient = jax.grad(lambda stats: jnp.asarray(loss(stats, batch).loss.total))(zero_stats)
    return {name: getattr(gradient, name) for name in linear.linear_in}


@dataclass(frozen=True)
class CotangentLoss:
    """Linear loss sum(statistics * cotangents), given the gradient with respect to the statistics.

    It evaluates a whole-batch loss by micro-batches: first its gradient with respect to all statistics, then the
    gradient of each micro-batch's statistics with respect to the parameters (GradCache, arXiv:2101.06983).
    """

    cotangents: Any

    def __call__(self, stats: Any, batch: Batch) -> LossOutput:
        products = jax.tree.map(lambda s, c: jnp.sum(s * c), stats, self.cotangents)
        return LossOutput(loss=Mean(total=sum(jax.tree.leaves(products)), weight=jnp.zeros(())), metrics={})
