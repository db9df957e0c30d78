"""Ratios of policies: KL estimators, importance weights, and the gap of sampler and trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.batch import Batch, BatchLoss, LossOutput, TokenLoss, TokenStats
from posttrain.losses.reduce import sequence_sums, to_tokens, token_mean
from posttrain.tree import EffectiveShare, Max, Metric, Quantile

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before `exp`, to avoid inf; beyond it the gradient is 0."""

KLEstimator = Callable[[Float[Array, "B T"], Float[Array, "B T"], Bool[Array, "B T"]], Float[Array, "B T"]]
"""Per-token estimator of KL(policy || reference) from log-probabilities of sampled tokens, d = ref_logps - logps.
J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html."""


def k1(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Unbiased estimator -d; 0 where masked out. Its expected gradient is 0, with bias correction that of the reverse
    KL."""
    return -_log_ratio(logps, ref_logps, mask)


def k2(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Biased estimator d^2 / 2; 0 where masked out. Its expected gradient is that of the reverse KL(policy ||
    reference)."""
    return 0.5 * jnp.square(_log_ratio(logps, ref_logps, mask))


def k3(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Unbiased, non-negative estimator exp(d) - 1 - d; 0 where masked out. Used by GRPO, arXiv:2402.03300 eq. 4.

    Its expected gradient is that of the forward KL(reference || policy); with bias correction that of the reverse KL.
    """
    d = jnp.clip(_log_ratio(logps, ref_logps, mask), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(d) - d


Gradient = Literal[
    "reverse KL",
    "forward KL",
    "half the squared log-ratio",
    "nothing",
    "reverse KL less forward KL",
    "half the squared log-ratio less reverse KL",
]
_GRADIENTS: dict[KLEstimator, tuple[Gradient, Gradient]] = {
    k1: ("nothing", "reverse KL"),
    k2: ("reverse KL", "half the squared log-ratio"),
    k3: ("forward KL", "reverse KL"),
}


def gradient_of(estimator: KLEstimator, *, bias_correction: bool) -> Gradient | None:
    """Name the quantity whose gradient an estimator has in expectation over samples of the policy; None: unknown.

    As a plain loss, differentiation ignores that the policy draws the samples; `bias_correction` multiplies the
    estimate by the policy's ratio pi / pi_old, whose derivative includes sampling: the gradient of the estimator's
    expectation.
    """
    return _GRADIENTS[estimator][bias_correction] if estimator in _GRADIENTS else None


_GRADIENTS_IN_REWARD: dict[KLEstimator, Gradient] = {
    k1: "reverse KL",
    k2: "half the squared log-ratio less reverse KL",
    k3: "reverse KL less forward KL",
}


def gradient_in_reward(estimator: KLEstimator) -> Gradient | None:
    """Name the quantity whose gradient an estimator has in expectation as a penalty in the reward, which only the
    sampling differentiates; None: unknown."""
    return _GRADIENTS_IN_REWARD.get(estimator)


def _log_ratio(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Array:
    # Mask both first: inf or NaN at a masked token would otherwise reach the gradient as 0 * inf.
    return jnp.where(mask, ref_logps, 0.0) - jnp.where(mask, logps, 0.0)


Level = Literal["token", "sequence_mean", "sequence_sum"]
"""Level of importance weights: per token, or per sequence as exp of the mean (geometric) or sum of its log-ratios."""
RatioLevel = Literal["token", "sequence_mean", "sequence_sum", "sequence_mean_token"]
"""Level of the policy ratio: per token, or per sequence as exp of the mean (GSPO) or sum (RLOO) of its log-ratios.
`sequence_mean_token` (GSPO-token): value of `sequence_mean`, gradient of each token's own log-probability."""
Bound = Literal["truncate", "mask", "reject"]


def level_log_ratio(
    level: RatioLevel, log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Aggregate token log-ratios (0 where masked out) at a level, clipped to the range of `exp`."""
    found = log_ratio
    if level != "token":
        sums = sequence_sums(log_ratio, segments)
        if level != "sequence_sum":
            sums /= jnp.maximum(sequence_sums(mask.astype(log_ratio.dtype), segments), 1.0)
        found = to_tokens(sums, segments)
    found = jnp.clip(found, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level == "sequence_mean_token":
        # The difference is exactly 0; it has the gradient of the token's log-probability.
        found = jax.lax.stop_gradient(found) + log_ratio - jax.lax.stop_gradient(log_ratio)
    return found


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling:
    """Importance weights w = pi_proximal / pi_behaviour of the surrogate, which correct for sampling from another
    distribution: top-k, top-p, min-p, penalties, bias, quantized weights, earlier weights. arXiv:2505.24298 (decoupled
    PPO); truncated: fengyao.notion.site/off-policy-rl."""

    level: Level = "token"
    bound: Bound = "truncate"
    """Treatment of ratios out of bounds: `truncate` to the bound, `mask` the token (weight 0; with a level of sequences
    the sequence), or `reject` the sequence of any such token."""
    low: float | None = None
    high: float | None = 2.0
    """Upper bound. None: unbounded, as for `low`."""

    def __post_init__(self) -> None:
        for name, options in (("level", Level), ("bound", Bound)):
            if getattr(self, name) not in get_args(options):
                raise ValueError(
                    f"importance_sampling.{name}={getattr(self, name)!r} must be one of {', '.join(get_args(options))}"
                )
        low, high = self.low, self.high
        if (low is not None and not 0 <= low < 1) or (high is not None and high <= 1):
            raise ValueError(
                f"importance_sampling: low={low} must be at least 0 and below 1, high={high} above 1: a token of equal "
                "probabilities has weight 1"
            )
        if self.bound != "truncate" and low is None and high is None:
            raise ValueError(
                f"importance_sampling.bound={self.bound} without low and high masks nothing; set one of them"
            )
        if self.bound == "reject" and self.level != "token":
            raise ValueError(
                f"importance_sampling.bound=reject with level={self.level}: a ratio of a sequence is masked as a "
                "whole; use bound: mask"
            )

    def __call__(
        self,
        proximal: Float[Array, "B T"],
        behaviour: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
        segments: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T"], dict[str, Metric]]:
        """Weights without a gradient, and metrics: of the ratios before the bounds the mean, the maximum, the share out
        of bounds and chi^2(proximal || behaviour) = E[ratio^2] - 1, and the effective sample size of the weights."""
        difference = jnp.where(mask, proximal, 0.0) - jnp.where(mask, behaviour, 0.0)
        log_ratio = level_log_ratio(self.level, jax.lax.stop_gradient(difference), mask, segments)
        ratio = jnp.exp(log_ratio)
        low, high = 0.0 if self.low is None else self.low, jnp.inf if self.high is None else self.high
        outside = (ratio < low) | (ratio > high)
        if self.bound == "reject":
            outside = to_tokens(sequence_sums((outside & mask).astype(ratio.dtype), segments), segments) > 0
        weights = jnp.clip(ratio, low, high) if self.bound == "truncate" else jnp.where(outside, 0.0, ratio)
        counted = mask.astype(ratio.dtype)
        name = "sampling/importance_sampling_ratio"
        return weights, {
            f"{name}/mean": token_mean(ratio, counted, segments),
            f"{name}/max": Max(largest=jnp.max(jnp.where(mask, ratio, 0.0))),
            f"{name}/out_of_bounds": token_mean(outside.astype(ratio.dtype), counted, segments),
            f"{name}/chi_square": token_mean(jnp.expm1(2 * log_ratio), counted, segments),
            f"{name}/effective_sample_size": EffectiveShare.of(weights, counted),
        }


def off_policy_mask(
    threshold: float,
    advantages: Float[Array, "B T"],
    logps: Float[Array, "B T"],
    behaviour: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    segments: Int[Array, "B T"],
) -> Bool[Array, "B T"]:
    """Mask of tokens to learn from: advantage not negative, or the mean of log(pi_behaviour / pi) over the sequence at
    most `threshold`. DeepSeek-V3.2, arXiv:2512.02556 section 3.1."""
    difference = jnp.where(mask, behaviour, 0.0) - jnp.where(mask, jax.lax.stop_gradient(logps), 0.0)
    counts = jnp.maximum(sequence_sums(mask.astype(difference.dtype), segments), 1.0)
    return (advantages >= 0) | (to_tokens(sequence_sums(difference, segments) / counts, segments) <= threshold)


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
