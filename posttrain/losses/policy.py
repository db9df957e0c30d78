"""Policy-gradient loss (PPO, GRPO, DAPO, GSPO, RLOO, CISPO, SAPO, GMPO, ...) as values of one dataclass."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from posttrain.batch import Batch, HostArray, LossOutput, TokenLoss, TokenStats
from posttrain.losses import surrogates
from posttrain.losses.ratios import (
    ImportanceSampling,
    KLEstimator,
    RatioLevel,
    gradient_of,
    k3,
    level_log_ratio,
    off_policy_mask,
    sampler_gap,
)
from posttrain.losses.reduce import ConstantLength, Reduction, Shares, sequence_mean, sequence_total, token_mean
from posttrain.losses.surrogates import PolicyTerms, Surrogate
from posttrain.tree import Mean, Metric


@runtime_checkable
class RLLoss(TokenLoss, Protocol):
    """Loss of an RL stage, `PolicyLoss` or a user's."""

    @property
    def kl_coef(self) -> float:
        """Coefficient of a KL from the reference; above 0, batches have `ref_logps`."""


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """Values of a policy loss at each token, before their reduction; valid where `terms.mask`."""

    loss: Float[Array, "B T"]
    surrogate: Float[Array, "B T"]
    """Part of `loss` without KL and entropy terms."""
    proximal: Float[Array, "B T"]
    """Log-probabilities of the proximal policy, the denominator of the ratio."""
    bounded: Mapping[str, Bool[Array, "B T"]]
    """Tokens that a bound of the surrogate changed, by the name of the bound."""
    terms: PolicyTerms
    metrics: dict[str, Metric]
    """Metrics of importance weights and of the off-policy mask."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Policy-gradient loss: `surrogate` of the ratio r = pi / pi_old and the advantage, plus KL and entropy terms.

    pi_old is the proximal policy: the batch's `old_logps`, or without them the detached policy itself, so that every
    ratio is exactly 1. Ratios, KL and metrics cover tokens with a positive `loss_weight`; other tokens may hold any
    value, inf and NaN included.
    """

    clip_low: float
    clip_high: float
    """Upper clip bound: r is clipped to 1 - clip_low .. 1 + clip_high, by surrogates with a clip."""
    reduce: Reduction
    surrogate: Surrogate = surrogates.CLIP
    ratio: RatioLevel = "token"
    importance: ImportanceSampling | None = None
    """Importance weights of the surrogate where `behaviour_logps` differ from the proximal policy; the KL is not
    weighted."""
    off_policy_mask: float | None = None
    """Largest mean of log(pi_behaviour / pi) over a sequence, in nats per token: beyond it, tokens of negative
    advantage have no surrogate. arXiv:2512.02556."""
    dual_clip: float | None = None
    """Upper bound of r where A < 0, arXiv:1912.09729; at least 1 + clip_high."""
    kl_coef: float = 0.0
    """Coefficient of KL(policy || reference), added per token and reduced like the surrogate."""
    kl_estimator: KLEstimator = k3
    kl_bias_correction: bool = True
    """Multiply the KL by r so that its gradient is that of KL(policy || reference), unless `ratio` is a mean over the
    sequence. arXiv:2512.02556."""
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
        name = type(self.surrogate).__name__.removesuffix("Objective")
        if self.dual_clip is not None and "dual_clip" not in self.surrogate.bounds:
            raise ValueError(f"PolicyLoss.dual_clip={self.dual_clip} has no effect on the surrogate {name}; remove it")
        if self.surrogate.token_ratio and self.ratio != "token":
            raise ValueError(
                f"PolicyLoss.ratio={self.ratio} with the surrogate {name}, which aggregates token ratios itself; use "
                "ratio: token"
            )
        if self.off_policy_mask is not None and self.off_policy_mask <= 0:
            raise ValueError(f"PolicyLoss.off_policy_mask={self.off_policy_mask} nats per token must be positive")
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
        shares = None if batch.sample_shares is None else jnp.asarray(batch.sample_shares)
        tokens = self.tokens(stats, batch)
        mask, metrics = tokens.terms.mask, dict(tokens.metrics)
        metrics["policy_loss"] = self.reduce(tokens.surrogate, weight, segments, shares)
        metrics |= self._ratio_metrics(tokens, shares)
        approx_kl = k3(tokens.proximal, stats.logps, mask)
        metrics["approx_kl"] = token_mean(approx_kl, mask.astype(stats.logps.dtype), segments)
        metrics |= distance_metrics(stats, batch, mask)
        return LossOutput(loss=self.reduce(tokens.loss, weight, segments, shares), metrics=metrics)

    def tokens(self, stats: TokenStats, batch: Batch) -> PolicyTokens:
        """Compute the loss of each token; ValueError as for the whole loss."""
        segments = jnp.asarray(batch.segments)
        mask = jnp.asarray(batch.loss_weight) > 0
        proximal = jax.lax.stop_gradient(stats.logps if batch.old_logps is None else jnp.asarray(batch.old_logps))
        terms, metrics = self._terms(stats, batch, proximal, mask)
        output = self.surrogate(terms)
        surrogate = output.loss
        if terms.importance is not None and not self.surrogate.weighted:
            surrogate *= terms.importance
        if self.off_policy_mask is not None:
            behaviour = _required(batch.behaviour_logps, "batch.behaviour_logps", "off_policy_mask")
            kept = off_policy_mask(self.off_policy_mask, terms.advantages, stats.logps, behaviour, mask, segments)
            surrogate = jnp.where(kept, surrogate, 0.0)
            counted = mask.astype(surrogate.dtype)
            metrics["sampling/off_policy_masked"] = token_mean((~kept).astype(surrogate.dtype), counted, segments)
        loss = surrogate
        if self.kl_coef:
            kl = self.kl_estimator(
                terms.logps, _required(batch.ref_logps, "batch.ref_logps", f"kl_coef={self.kl_coef}"), mask
            )
            loss += self.kl_coef * (kl * terms.ratio if self.kl_bias_correction else kl)
        if self.entropy_coef or batch.entropy_coefs is not None:
            entropy = _required(stats.entropy, "stats.entropy", f"entropy_coef={self.entropy_coef}")
            coef = self.entropy_coef if batch.entropy_coefs is None else jnp.asarray(batch.entropy_coefs)
            loss -= jnp.where(mask, coef * jnp.where(mask, entropy, 0.0), 0.0)
        return PolicyTokens(
            loss=loss,
            surrogate=surrogate,
            proximal=proximal,
            bounded=output.bounded,
            terms=terms,
            metrics=metrics,
        )

    def _terms(
        self, stats: TokenStats, batch: Batch, proximal: Float[Array, "B T"], mask: Bool[Array, "B T"]
    ) -> tuple[PolicyTerms, dict[str, Metric]]:
        """Inputs of the surrogate, and metrics of importance weights."""
        segments = jnp.asarray(batch.segments)
        logps = jnp.where(mask, stats.logps, 0.0)
        log_ratio = logps - jnp.where(mask, proximal, 0.0)
        metrics: dict[str, Metric] = {}
        importance = None
        if self.importance is not None:
            behaviour = _required(batch.behaviour_logps, "batch.behaviour_logps", "importance sampling")
            importance, metrics = self.importance(proximal, behaviour, mask, segments)
        terms = PolicyTerms(
            logps=logps,
            log_ratio=log_ratio,
            ratio=jnp.exp(level_log_ratio(self.ratio, log_ratio, mask, segments)),
            advantages=jnp.where(mask, _required(batch.advantages, "batch.advantages", "every policy loss"), 0.0),
            mask=mask,
            segments=segments,
            low=1 - self.clip_low,
            high=1 + self.clip_high,
            dual_clip=self.dual_clip,
            importance=importance,
            importance_level=None if self.importance is None else self.importance.level,
        )
        return terms, metrics

    def _ratio_metrics(self, tokens: PolicyTokens, shares: Shares) -> dict[str, Mean]:
        """Mean ratio, and the share of tokens that each bound changed; `region` is that of any bound."""
        terms, mean = tokens.terms, token_mean if self.ratio == "token" else sequence_mean
        counted = terms.mask.astype(terms.ratio.dtype)
        metrics = {"ratio/mean": mean(terms.ratio, counted, terms.segments, shares)}
        if tokens.bounded:
            none = jnp.zeros_like(terms.mask)
            masks = {"low": none, "high": none, **tokens.bounded}
            masks["region"] = functools.reduce(jnp.logical_or, masks.values())
            for name, changed in masks.items():
                share = mean(changed.astype(counted.dtype), counted, terms.segments, shares)
                metrics[f"clip_ratio/{name}_mean"] = share
        return metrics


GRPO = PolicyLoss(clip_low=0.2, clip_high=0.2, reduce=sequence_mean, kl_coef=0.04)
"""GRPO, arXiv:2402.03300: k3 against the reference with coefficient 0.04 (section 4.2); PPO's clip range."""

DAPO = replace(GRPO, clip_high=0.28, reduce=token_mean, kl_coef=0.0)
"""DAPO, arXiv:2503.14476: higher upper clip bound, token-level mean, no KL."""

BNPO = replace(GRPO, reduce=token_mean, kl_coef=0.0)
"""GRPO with the mean over all tokens of the batch, no KL; the loss type `bnpo` of TRL."""

GSPO = replace(GRPO, ratio="sequence_mean", clip_low=3e-4, clip_high=4e-4, kl_coef=0.0, kl_bias_correction=False)
"""GSPO, arXiv:2507.18071 eq. 5-7 and section 5.1: one length-normalised ratio per sequence, no KL and no bias
correction of it, which needs an unnormalised ratio."""

RLOO = replace(GRPO, ratio="sequence_sum", kl_coef=0.0)
"""RLOO, arXiv:2402.14740: a whole completion is one action. The ratio and its clip matter only off-policy."""

GSPO_TOKEN = replace(GSPO, ratio="sequence_mean_token")
"""GSPO-token, arXiv:2507.18071 eq. 14: the ratio of GSPO, with a gradient per token, for advantages per token."""

LUSPO = replace(GSPO, reduce=sequence_total)
"""LUSPO, arXiv:2602.05261: GSPO with each sequence weighted by its length."""

CISPO = replace(GRPO, surrogate=surrogates.CISPOObjective(), clip_high=4.0, reduce=token_mean, kl_coef=0.0)
"""CISPO, arXiv:2506.13585: clipped importance weights on log-probabilities, no KL; ratios up to 5, arXiv:2510.13786."""

SAPO = replace(GRPO, surrogate=surrogates.SAPOObjective(positive=1.0, negative=1.05), kl_coef=0.0)
"""SAPO, arXiv:2511.20347: a soft gate in place of the clip."""

VESPO = replace(
    GRPO,
    surrogate=surrogates.VESPOObjective(k_positive=2.0, rate_positive=3.0, k_negative=3.0, rate_negative=2.0),
    reduce=token_mean,
    kl_coef=0.0,
)
"""VESPO, arXiv:2602.10693: sequence weights in place of ratios."""

GMPO = replace(GRPO, surrogate=surrogates.GMPOObjective(), clip_low=0.4, clip_high=0.4, kl_coef=0.0)
"""GMPO, arXiv:2507.20673: geometric mean of ratios, clipped to e^-0.4 .. e^0.4 per token."""

REINFORCE = replace(GRPO, reduce=token_mean, kl_coef=0.0)
"""REINFORCE++, arXiv:2501.03262: clipped surrogate, token-level mean; its KL belongs to the reward."""

PPO = replace(GRPO, reduce=token_mean, kl_coef=0.0)
"""PPO, arXiv:1707.06347: clipped surrogate with an advantage per token."""

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
