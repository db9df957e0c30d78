"""Surrogates of policy losses: the per-token objective as a function of ratio and advantage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.losses.ratios import MAX_LOG_RATIO, Level
from posttrain.losses.reduce import sequence_sums, to_tokens


@dataclass(frozen=True, kw_only=True)
class PolicyTerms:
    """Inputs of a surrogate; 0 (ratio 1) at tokens without weight."""

    logps: Float[Array, "B T"]
    log_ratio: Float[Array, "B T"]
    """log(pi / pi_old) of each token."""
    ratio: Float[Array, "B T"]
    """Ratio at the loss's level."""
    advantages: Float[Array, "B T"]
    mask: Bool[Array, "B T"]
    segments: Int[Array, "B T"]
    low: float
    """Lower clip bound of the ratio, 1 - clip_low."""
    high: float
    """Upper clip bound of the ratio, 1 + clip_high."""
    dual_clip: float | None
    importance: Float[Array, "B T"] | None
    """Importance weights, without a gradient."""
    importance_level: Level | None
    """Level of the importance weights: with `sequence_sum` each token has the weight of its whole sequence."""


CLIP_FIELDS = ("clip_low", "clip_high", "dual_clip")


@dataclass(frozen=True, kw_only=True)
class SurrogateTokens:
    """Loss of each token, and what the surrogate's bounds did to it: `clip_ratio/*` and the view count these masks."""

    loss: Float[Array, "B T"]
    zero_gradient: Mapping[str, Bool[Array, "B T"]] = field(default_factory=dict)
    """Tokens that a bound leaves without a gradient, by the name of the bound: `low`, `high`, `dual`. Empty: the
    surrogate has none."""
    capped: Bool[Array, "B T"] | None = None
    """Tokens whose weight is capped at the upper bound, which keep their gradient; None: the surrogate caps none."""

    @property
    def bounded(self) -> Mapping[str, Bool[Array, "B T"]]:
        """Tokens that a bound changed, by its name: without a gradient, or with a capped weight (`high`)."""
        return self.zero_gradient if self.capped is None else {**self.zero_gradient, "high": self.capped}


@runtime_checkable
class Surrogate(Protocol):
    """Surrogate: per-token loss, before importance weights unless `weighted`."""

    @property
    def bounds(self) -> tuple[str, ...]:
        """Fields of `PolicyLoss` that the surrogate reads, of `CLIP_FIELDS`."""

    @property
    def weighted(self) -> bool:
        """True if the surrogate applies `terms.importance` itself."""

    @property
    def token_ratio(self) -> bool:
        """True if the surrogate aggregates token ratios itself and needs `ratio: token`."""

    def __call__(self, terms: PolicyTerms) -> SurrogateTokens: ...


@dataclass(frozen=True)
class Clip:
    """Clipped surrogate -min(r A, clip(r, low, high) A), PPO eq. 7, arXiv:1707.06347; r at most `dual_clip`,
    arXiv:1912.09729."""

    bounds: ClassVar[tuple[str, ...]] = CLIP_FIELDS
    weighted: ClassVar[bool] = False
    token_ratio: ClassVar[bool] = False

    def __call__(self, terms: PolicyTerms) -> SurrogateTokens:
        ratio = terms.ratio
        # Where the clipped product is the smaller one it is a constant: the token has no gradient.
        zero_gradient = {
            "low": (ratio < terms.low) & (terms.advantages < 0),
            "high": (ratio > terms.high) & (terms.advantages > 0),
        }
        if terms.dual_clip is not None:
            zero_gradient["dual"] = (ratio > terms.dual_clip) & (terms.advantages < 0)
            ratio = jnp.minimum(ratio, terms.dual_clip)
        clipped = jnp.clip(terms.ratio, terms.low, terms.high)
        loss = -jnp.minimum(ratio * terms.advantages, clipped * terms.advantages)
        return SurrogateTokens(loss=loss, zero_gradient=zero_gradient)


CLIP = Clip()


@dataclass(frozen=True)
class CISPOObjective:
    """Clipped importance weights -sg(min(r, high)) A log pi: no token loses its gradient. arXiv:2506.13585 eq. 4."""

    bounds: ClassVar[tuple[str, ...]] = ("clip_high",)
    weighted: ClassVar[bool] = False
    token_ratio: ClassVar[bool] = False

    def __call__(self, terms: PolicyTerms) -> SurrogateTokens:
        weight = jax.lax.stop_gradient(jnp.minimum(terms.ratio, terms.high))
        loss = -weight * terms.advantages * terms.logps
        # Of either sign of the advantage: the cap has no condition on it.
        return SurrogateTokens(loss=loss, capped=terms.ratio > terms.high)


@dataclass(frozen=True, kw_only=True)
class SAPOObjective:
    """Soft gate -(4 / t) sigmoid(t (r - 1)) A in place of a clip, t by the sign of A. arXiv:2511.20347."""

    positive: float
    """Temperature t where A > 0."""
    negative: float
    """Temperature t elsewhere; a larger one decays faster."""
    bounds: ClassVar[tuple[str, ...]] = ()
    weighted: ClassVar[bool] = False
    token_ratio: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.positive <= 0 or self.negative <= 0:
            raise ValueError(f"SAPO.positive={self.positive} and negative={self.negative} must be positive")

    def __call__(self, terms: PolicyTerms) -> SurrogateTokens:
        temperature = jnp.where(terms.advantages > 0, self.positive, self.negative)
        gate = jax.nn.sigmoid(temperature * (terms.ratio - 1)) * (4 / temperature)
        return SurrogateTokens(loss=-gate * terms.advantages)


LOG_WEIGHT_MIN = math.log(1e-8)
"""Lower bound of the log of a sequence's weight in VESPO."""


@dataclass(frozen=True, kw_only=True)
class VESPOObjective:
    """Weights of sequences -phi(w) A log pi, phi(w) = w^k exp(rate (1 - w)), w = pi / pi_behaviour of the whole
    sequence, (k, rate) by the sign of A. arXiv:2602.10693."""

    k_positive: float
    rate_positive: float
    k_negative: float
    rate_negative: float
    bounds: ClassVar[tuple[str, ...]] = ()
    weighted: ClassVar[bool] = True
    token_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"VESPO.{name}={value} must be positive")

    def __call__(self, terms: PolicyTerms) -> SurrogateTokens:
        log_weight = jnp.clip(terms.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        if terms.importance is not None:
            # A weight of 0 masks its sequence.
            weight = jnp.where(terms.mask, terms.importance, 1.0)
            log_importance = jnp.clip(jnp.log(weight), LOG_WEIGHT_MIN, MAX_LOG_RATIO)
            if terms.importance_level == "sequence_sum":  # once per sequence: a share of it at each token
                counts = to_tokens(sequence_sums(terms.mask.astype(weight.dtype), terms.segments), terms.segments)
                log_importance /= jnp.maximum(counts, 1.0)
            log_weight += log_importance
        log_weight = to_tokens(sequence_sums(log_weight, terms.segments), terms.segments)
        log_weight = jnp.clip(log_weight, LOG_WEIGHT_MIN, MAX_LOG_RATIO)
        not_negative = terms.advantages >= 0
        k = jnp.where(not_negative, self.k_positive, self.k_negative)
        rate = jnp.where(not_negative, self.rate_positive, self.rate_negative)
        phi = jax.lax.stop_gradient(jnp.exp(rate + k * log_weight - rate * jnp.exp(log_weight)))
        return SurrogateTokens(loss=-phi * terms.advantages * terms.logps)


@dataclass(frozen=True)
class GMPOObjective:
    """Geometric mean -A exp(mean of clipped log-ratios), clipped per token in log space: log r at most clip_high where
    A > 0, at least -clip_low where A < 0. arXiv:2507.20673 eq. 4."""

    bounds: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    weighted: ClassVar[bool] = False
    token_ratio: ClassVar[bool] = True

    def __call__(self, terms: PolicyTerms) -> SurrogateTokens:
        low = terms.low - 1
        high = terms.high - 1
        # A bounded log-ratio is a constant in the mean: its token has no gradient, others of the sample have theirs.
        zero_gradient = {
            "low": (terms.log_ratio < low) & (terms.advantages < 0),
            "high": (terms.log_ratio > high) & (terms.advantages > 0),
        }
        bounded = jnp.where(zero_gradient["high"], high, terms.log_ratio)
        bounded = jnp.where(zero_gradient["low"], low, bounded)
        counts = sequence_sums(terms.mask.astype(bounded.dtype), terms.segments)
        mean = to_tokens(sequence_sums(bounded, terms.segments) / jnp.maximum(counts, 1.0), terms.segments)
        loss = -jnp.exp(jnp.clip(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO)) * terms.advantages
        return SurrogateTokens(loss=loss, zero_gradient=zero_gradient)
