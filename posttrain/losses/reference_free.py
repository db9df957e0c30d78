"""Reference-free pairwise losses: CPO, SimPO, ORPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from posttrain.batch import Batch, LossOutput, TokenStats
from posttrain.losses.pairs import Needs, nll_of_chosen, output, pair_metrics, pairs_of, sequences_of, with_nll
from posttrain.losses.preference import smoothed
from posttrain.losses.ratios import MAX_LOG_RATIO

CPOKind = Literal["sigmoid", "hinge", "ipo"]
SMALLEST = 1e-7
"""Lower bound of 1 - probability in the odds of ORPO."""


@dataclass(frozen=True, kw_only=True)
class CPOLoss:
    """Contrastive preference optimization, arXiv:2401.08417: f(log p(chosen) - log p(rejected)) + nll_coef * NLL."""

    kind: CPOKind = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    nll_coef: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(CPOKind):
            raise ValueError(f"CPOLoss.kind={self.kind!r} must be one of {', '.join(get_args(CPOKind))}")
        if self.label_smoothing and self.kind != "sigmoid":
            raise ValueError(f"CPOLoss.label_smoothing={self.label_smoothing} has no effect on kind={self.kind!r}")
        _check(self, self.beta, self.label_smoothing, self.nll_coef)

    @property
    def needs(self) -> Needs:
        return Needs(rows="pairs", reference=False)

    @property
    def needs_whole_batch(self) -> bool:
        """True with an NLL term, which is a mean over the batch's tokens."""
        return self.nll_coef > 0

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        """Raises ValueError if `batch.roles` is None."""
        pairs = pairs_of(sequences_of(stats, batch))
        if self.kind == "ipo":
            delta = pairs.chosen.mean_logps() - pairs.rejected.mean_logps()
            losses = jnp.square(delta - 1 / (2 * self.beta))
        else:
            delta = pairs.chosen.logps - pairs.rejected.logps
            hinge = jax.nn.relu(1 - self.beta * delta)
            losses = hinge if self.kind == "hinge" else smoothed(self.beta * delta, self.label_smoothing)
        sides = [side.mean_logps() if self.kind == "ipo" else side.logps for side in (pairs.chosen, pairs.rejected)]
        metrics = pair_metrics(pairs, self.beta * sides[0], self.beta * sides[1])
        metrics["nll"] = nll_of_chosen(stats, batch)
        loss = pairs.total(losses)
        return output(with_nll(loss, metrics["nll"], self.nll_coef) if self.nll_coef else loss, metrics, stats, batch)


@dataclass(frozen=True, kw_only=True)
class SimPOLoss:
    """SimPO: -log sigmoid(beta * (r(chosen) - r(rejected)) - gamma), r the mean log p per token; arXiv:2405.14734 eq.
    6.

    With `alpha` r = (1 - p^-alpha) / alpha, p the geometric mean probability: AlphaPO, arXiv:2501.03884. With
    `nll_coef` the mean -log p of chosen answers is added (CPO-SimPO).
    """

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0
    alpha: float = 0.0
    nll_coef: float = 0.0

    def __post_init__(self) -> None:
        _check(self, self.beta, self.label_smoothing, self.nll_coef)

    @property
    def needs(self) -> Needs:
        return Needs(rows="pairs", reference=False)

    @property
    def needs_whole_batch(self) -> bool:
        return self.nll_coef > 0

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        """Raises ValueError if `batch.roles` is None."""
        pairs = pairs_of(sequences_of(stats, batch))
        chosen, rejected = (self._reward(side.mean_logps()) for side in (pairs.chosen, pairs.rejected))
        losses = smoothed(self.beta * (chosen - rejected) - self.gamma, self.label_smoothing)
        metrics = pair_metrics(pairs, self.beta * chosen, self.beta * rejected)
        metrics["nll"] = nll_of_chosen(stats, batch)
        loss = pairs.total(losses)
        return output(with_nll(loss, metrics["nll"], self.nll_coef) if self.nll_coef else loss, metrics, stats, batch)

    def _reward(self, mean_logps: Float[Array, "B S"]) -> Float[Array, "B S"]:
        if not self.alpha:
            return mean_logps
        return (1 - jnp.exp(jnp.clip(-self.alpha * mean_logps, -MAX_LOG_RATIO, MAX_LOG_RATIO))) / self.alpha


@dataclass(frozen=True, kw_only=True)
class ORPOLoss:
    """ORPO: NLL - beta * log sigmoid(log odds(chosen) - log odds(rejected)), arXiv:2403.07691.

    The NLL covers all weighted tokens of chosen sequences: give their prompts a weight.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        _check(self, self.beta, 0.0, 0.0)

    @property
    def needs(self) -> Needs:
        return Needs(rows="pairs", reference=False, prompts=True)

    @property
    def needs_whole_batch(self) -> bool:
        return True

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        """Raises ValueError if `batch.roles` is None."""
        pairs = pairs_of(sequences_of(stats, batch))
        chosen, rejected = pairs.chosen.mean_logps(), pairs.rejected.mean_logps()
        log_odds = _log_odds(chosen) - _log_odds(rejected)
        ratio = jax.nn.log_sigmoid(log_odds)
        metrics = pair_metrics(pairs, self.beta * chosen, self.beta * rejected)
        metrics |= {
            "nll": nll_of_chosen(stats, batch),
            "log_odds_ratio": pairs.total(ratio),
            "log_odds_chosen": pairs.total(log_odds),
        }
        return output(with_nll(pairs.total(-self.beta * ratio), metrics["nll"], 1.0), metrics, stats, batch)


def _log_odds(mean_logps: Float[Array, "B S"]) -> Float[Array, "B S"]:
    """log(p / (1 - p)), with 1 - p bounded below by `SMALLEST`."""
    bounded = jnp.minimum(mean_logps, jnp.log1p(-SMALLEST))
    return bounded - jnp.log(-jnp.expm1(bounded))


def _check(loss: object, beta: float, label_smoothing: float, nll_coef: float) -> None:
    if beta <= 0 or not 0 <= label_smoothing < 0.5 or nll_coef < 0:
        raise ValueError(
            f"{type(loss).__name__}: beta={beta} must be positive, label_smoothing={label_smoothing} in [0, 0.5), "
            f"nll_coef={nll_coef} not negative"
        )
