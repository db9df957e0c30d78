"""Importance weights of samples from another policy, and ratio levels: token or sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.losses.kl import MAX_LOG_RATIO
from posttrain.losses.reduce import sequence_sums, to_tokens, token_mean
from posttrain.tree import Max, Metric

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
        """Weights without a gradient, and metrics of the ratios: mean, maximum, share out of bounds."""
        difference = jnp.where(mask, proximal, 0.0) - jnp.where(mask, behaviour, 0.0)
        ratio = jnp.exp(level_log_ratio(self.level, jax.lax.stop_gradient(difference), mask, segments))
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
