"""Clipped policy-gradient loss (PPO, GRPO, DAPO, GSPO, RLOO, Dr. GRPO) as values of one dataclass, and the importance
weights of samples from another policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.batch import Batch, HostArray, LossOutput, TokenStats
from posttrain.losses.kl import MAX_LOG_RATIO, KLEstimator, gradient_of, k3
from posttrain.losses.reduce import ConstantLength, Reduction, sequence_mean, sequence_sums, to_tokens, token_mean
from posttrain.losses.sampler_gap import sampler_gap
from posttrain.tree import Max, Mean, Metric

RatioLevel = Literal["token", "sequence_mean", "sequence_sum"]
"""Level of the ratio: per token, or per sequence as exp of the mean (GSPO) or sum (RLOO) of its log-ratios."""
Bound = Literal["truncate", "mask"]


def level_log_ratio(
    level: RatioLevel, log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Aggregate token log-ratios (0 where masked out) at a level, clipped to the range of `exp`."""
    if level != "token":
        sums = sequence_sums(log_ratio, segments)
        if level == "sequence_mean":
            sums /= jnp.maximum(sequence_sums(mask.astype(log_ratio.dtype), segments), 1.0)
        log_ratio = to_tokens(sums, segments)
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling:
    """Importance weights w = pi_proximal / pi_behaviour of the surrogate, which correct for sampling from another
    distribution: top-k, top-p, min-p, penalties, bias, quantized weights, earlier weights. arXiv:2505.24298 (decoupled
    PPO); truncated: fengyao.notion.site/off-policy-rl."""

    level: RatioLevel = "token"
    bound: Bound = "truncate"
    """Treatment of ratios out of bounds: `truncate` to the bound, or `mask` the token (weight 0)."""
    low: float | None = None
    high: float | None = 2.0
    """Upper bound. None: unbounded, as for `low`."""

    def __post_init__(self) -> None:
        for name, options in (("level", RatioLevel), ("bound", Bound)):
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
        if self.bound == "mask" and low is None and high is None:
            raise ValueError("importance_sampling.bound=mask without low and high masks nothing; set one of them")

    def __call__(
        self,
        proximal: Float[Array, "B T"],
        behaviour: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
        segments: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T"], dict[str, Metric]]:
        """Weights without a gradient, and metrics of the ratios: mean, maximum, share out of bounds."""
        difference = jnp.where(mask, proximal, 0.0) - jnp.where(mask, behaviour, 0.0)
        ratio = jnp.exp(level_log_ratio(self.level, jax.lax.stop_gradient(difference), mask, segments))
        low, high = 0.0 if self.low is None else self.low, jnp.inf if self.high is None else self.high
        outside = (ratio < low) | (ratio > high)
        weights = jnp.where(outside, 0.0, ratio) if self.bound == "mask" else jnp.clip(ratio, low, high)
        counted = mask.astype(ratio.dtype)
        name = "sampling/importance_sampling_ratio"
        return weights, {
            f"{name}/mean": token_mean(ratio, counted, segments),
            f"{name}/max": Max(largest=jnp.max(jnp.where(mask, ratio, 0.0))),
            f"{name}/out_of_bounds": token_mean(outside.astype(ratio.dtype), counted, segments),
        }


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Clipped surrogate -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old. PPO eq. 7,
    arXiv:1707.06347.

    pi_old is the proximal policy: the batch's `old_logps`, or without them the detached policy itself, so that every
    ratio is exactly 1. Ratios, KL and metrics cover tokens with a positive `loss_weight`; other tokens may hold any
    value, inf and NaN included.
    """

    clip_low: float
    clip_high: float
    reduce: Reduction
    ratio: RatioLevel = "token"
    importance: ImportanceSampling | None = None
    """Importance weights of the surrogate where `behaviour_logps` differ from the proximal policy; the KL is not
    weighted."""
    dual_clip: float | None = None
    """Upper bound of r where A < 0, arXiv:1912.09729; at least 1 + clip_high."""
    kl_coef: float = 0.0
    """Coefficient of KL(policy || reference), added per token and reduced like the surrogate."""
    kl_estimator: KLEstimator = k3
    kl_bias_correction: bool = True
    """Multiply the KL by r so that its gradient is that of KL(policy || reference), unless `ratio` is `sequence_mean`.
        arXiv:2512.02556."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, subtracted per token and reduced like the surrogate."""

    def __post_init__(self) -> None:
        if self.ratio not in get_args(RatioLevel):
            raise ValueError(f"PolicyLoss.ratio={self.ratio!r} must be one of {', '.join(get_args(RatioLevel))}")
        if self.clip_low <= 0 or self.clip_high <= 0:
            raise ValueError(f"PolicyLoss.clip_low={self.clip_low} and clip_high={self.clip_high} must be positive")
        if self.dual_clip is not None and self.dual_clip < 1 + self.clip_high:
            raise ValueError(
                f"PolicyLoss.dual_clip={self.dual_clip} must be at least 1 + clip_high = {1 + self.clip_high}; "
                "raise it, or set None to disable it"
            )
        if self.kl_coef < 0 or self.entropy_coef < 0:
            raise ValueError(
                f"PolicyLoss.kl_coef={self.kl_coef} and entropy_coef={self.entropy_coef} must not be negative"
            )

        if self.kl_coef and gradient_of(self.kl_estimator, bias_correction=self.kl_bias_correction) == "nothing":
            raise ValueError(
                f"PolicyLoss.kl_estimator=k1 with kl_coef={self.kl_coef}: the gradient of k1 is 0 in expectation, so "
                "it would add noise but no penalty; use k3, k2, or kl_bias_correction"
            )

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        """Compute the loss. ValueError if the advantages, or inputs of a coefficient or of importance weights, are
        None."""
        weight, segments = jnp.asarray(batch.loss_weight), jnp.asarray(batch.segments)
        mask = weight > 0
        logps = jnp.where(mask, stats.logps, 0.0)
        proximal = jax.lax.stop_gradient(stats.logps if batch.old_logps is None else jnp.asarray(batch.old_logps))
        log_ratio = logps - jnp.where(mask, proximal, 0.0)
        ratio = jnp.exp(level_log_ratio(self.ratio, log_ratio, mask, segments))
        advantages = jnp.where(mask, _required(batch.advantages, "batch.advantages", "every policy loss"), 0.0)

        surrogate = self._surrogate(ratio, advantages)
        metrics: dict[str, Metric] = {}
        if self.importance is not None:
            behaviour = _required(batch.behaviour_logps, "batch.behaviour_logps", "importance sampling")
            weights, metrics = self.importance(proximal, behaviour, mask, segments)
            surrogate *= weights
        loss = surrogate
        if self.kl_coef:
            kl = self.kl_estimator(
                logps, _required(batch.ref_logps, "batch.ref_logps", f"kl_coef={self.kl_coef}"), mask
            )
            loss += self.kl_coef * (kl * ratio if self.kl_bias_correction else kl)
        if self.entropy_coef:
            entropy = _required(stats.entropy, "stats.entropy", f"entropy_coef={self.entropy_coef}")
            loss -= self.entropy_coef * jnp.where(mask, entropy, 0.0)

        metrics |= {"policy_loss": self.reduce(surrogate, weight, segments)}
        metrics |= self._clip_metrics(ratio, advantages, mask, segments)
        approx_kl = k3(proximal, stats.logps, mask)
        metrics["approx_kl"] = token_mean(approx_kl, mask.astype(stats.logps.dtype), segments)
        metrics |= distance_metrics(stats, batch, mask)
        return LossOutput(loss=self.reduce(loss, weight, segments), metrics=metrics)

    def _surrogate(self, ratio: Float[Array, "B T"], advantages: Float[Array, "B T"]) -> Float[Array, "B T"]:
        clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
        if self.dual_clip is not None:
            ratio = jnp.minimum(ratio, self.dual_clip)
        return -jnp.minimum(ratio * advantages, clipped * advantages)

    def _clip_metrics(
        self,
        ratio: Float[Array, "B T"],
        advantages: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
        segments: Int[Array, "B T"],
    ) -> dict[str, Mean]:
        low = (ratio < 1 - self.clip_low) & (advantages < 0)
        high = (ratio > 1 + self.clip_high) & (advantages > 0)
        mean = token_mean if self.ratio == "token" else sequence_mean
        counted = mask.astype(ratio.dtype)
        return {
            "ratio/mean": mean(ratio, counted, segments),
            "clip_ratio/low_mean": mean(low.astype(ratio.dtype), counted, segments),
            "clip_ratio/high_mean": mean(high.astype(ratio.dtype), counted, segments),
            "clip_ratio/region_mean": mean((low | high).astype(ratio.dtype), counted, segments),
        }


GRPO = PolicyLoss(clip_low=0.2, clip_high=0.2, reduce=sequence_mean, kl_coef=0.04)
"""GRPO, arXiv:2402.03300: k3 against the reference with coefficient 0.04 (section 4.2); PPO's clip range."""

DAPO = replace(GRPO, clip_high=0.28, reduce=token_mean, kl_coef=0.0)
"""DAPO, arXiv:2503.14476: higher upper clip bound, token-level mean, no KL."""

GSPO = replace(GRPO, ratio="sequence_mean", clip_low=3e-4, clip_high=4e-4, kl_coef=0.0, kl_bias_correction=False)
"""GSPO, arXiv:2507.18071 eq. 5-7 and section 5.1: one length-normalised ratio per sequence, no KL and no bias
correction of it, which needs an unnormalised ratio."""

RLOO = replace(GRPO, ratio="sequence_sum", kl_coef=0.0)
"""RLOO, arXiv:2402.14740: a whole completion is one action. The ratio and its clip matter only off-policy."""

DISTILL = replace(GRPO, reduce=token_mean, kl_coef=0.0)
"""On-policy distillation: the advantage of a token is log(teacher / student), so that the expected gradient is that of
the reverse KL after each prefix. arXiv:2306.13649 with beta 1; thinkingmachines.ai/blog/on-policy-distillation."""


def dr_grpo(max_tokens: int) -> PolicyLoss:
    """Dr. GRPO, arXiv:2503.20783: divide by the constant `max_tokens` instead of each completion's length, no KL."""
    return replace(GRPO, reduce=ConstantLength(max_tokens), kl_coef=0.0)


def _required(value: Array | HostArray | None, name: str, why: str) -> Array:
    if value is None:
        raise ValueError(f"PolicyLoss: {name} is None but {why} needs it")
    return jnp.asarray(value)


def distance_metrics(stats: TokenStats, batch: Batch, mask: Bool[Array, "B T"]) -> dict[str, Metric]:
    """Token means of entropy and of the policy's distance from reference and sampler (`sampler_gap`), if the batch has
    them."""
    counted, segments = mask.astype(stats.logps.dtype), jnp.asarray(batch.segments)
    metrics: dict[str, Metric] = {}
    if batch.ref_logps is not None:
        metrics["kl"] = token_mean(k3(stats.logps, jnp.asarray(batch.ref_logps), mask), counted, segments)
    if stats.entropy is not None:
        metrics["entropy"] = token_mean(stats.entropy, counted, segments)
    return metrics | sampler_gap(stats, batch, mask)
