"""Reward model losses on scalar-head scores: Bradley-Terry on pairs, cross-entropy on steps (process rewards)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from posttrain.batch import Batch, LossOutput, ScoreStats, TokenStats
from posttrain.losses.pairs import Needs, PairedSequences, pairs_of, sequences_of
from posttrain.losses.reduce import sequence_sums
from posttrain.tree import Mean, replace


@dataclass(frozen=True, kw_only=True)
class BradleyTerryLoss:
    """Bradley-Terry: -log sigmoid(r(chosen) - r(rejected) - margin) + center_coef * (r(chosen) + r(rejected))^2.

    The reward r of a sequence is the score of its last token. arXiv:2203.02155 eq. 1; margins: arXiv:2307.09288 eq. 2;
    centring: arXiv:2312.09244 eq. 2.
    """

    center_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.center_coef < 0:
            raise ValueError(f"BradleyTerryLoss.center_coef={self.center_coef} must not be negative")

    @property
    def needs(self) -> Needs:
        return Needs(rows="pairs", reference=False, margins=True)

    def __call__(self, stats: ScoreStats, batch: Batch) -> LossOutput:
        """Raises ValueError if `batch.roles` or `batch.margins` is None."""
        pairs = reward_pairs(stats, batch)
        chosen, rejected = pairs.chosen.logps, pairs.rejected.logps
        losses = -jax.nn.log_sigmoid(chosen - rejected - jnp.where(pairs.valid, _margins(batch), 0.0))
        if self.center_coef:
            losses += self.center_coef * jnp.square(chosen + rejected)
        margins = chosen - rejected
        metrics = {
            "rewards/chosen": pairs.total(chosen),
            "rewards/rejected": pairs.total(rejected),
            "rewards/accuracies": pairs.total((margins > 0).astype(margins.dtype)),
            "rewards/margins": pairs.total(margins),
            "calibration/brier": pairs.total(jnp.square(1 - jax.nn.sigmoid(margins))),
        }
        return LossOutput(loss=pairs.total(losses), metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class ProcessLoss:
    """Process reward loss: cross-entropy of sigmoid(score at a step's last token) with the step's label;
    arXiv:2305.20050."""

    @property
    def needs(self) -> Needs:
        return Needs(rows="steps", reference=False)

    def __call__(self, stats: ScoreStats, batch: Batch) -> LossOutput:
        """Raises ValueError if `batch.roles` is None."""
        if batch.roles is None:
            raise ValueError("ProcessLoss: batch.roles is None; set 1 for a correct step, -1 for a wrong one")
        roles, weight = jnp.asarray(batch.roles), jnp.asarray(batch.loss_weight)
        signed = jnp.where(weight > 0, stats.scores, 0.0) * jnp.sign(roles)

        def mean(values: Float[Array, "B T"], kept: Float[Array, "B T"] = weight) -> Mean:
            return Mean(total=jnp.where(kept > 0, values * kept, 0.0).sum(), weight=kept.sum())

        right, wrong = weight * (roles > 0), weight * (roles < 0)
        metrics = {
            "rewards/accuracies": mean((signed > 0).astype(weight.dtype)),
            "rewards/chosen": mean(stats.scores, right),
            "rewards/rejected": mean(stats.scores, wrong),
            "calibration/brier": mean(jnp.square(1 - jax.nn.sigmoid(signed))),
        }
        return LossOutput(loss=mean(-jax.nn.log_sigmoid(signed)), metrics=metrics)


def reward_pairs(stats: ScoreStats, batch: Batch) -> PairedSequences:
    """PairedSequences whose `logps` are rewards: the score of each sequence's last token."""
    segments = jnp.asarray(batch.segments)
    last = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (0, 1)), constant_values=True) & (segments > 0)
    rewards = sequence_sums(jnp.where(last, stats.scores, 0.0), segments)
    counted = sequences_of(TokenStats(logps=jnp.zeros_like(stats.scores)), batch)
    return pairs_of(replace(counted, logps=rewards, ref_logps=None))


def _margins(batch: Batch) -> Float[Array, "B S"]:
    """Margin of each sequence: mean over the tokens of its answer."""
    if batch.margins is None:
        raise ValueError("BradleyTerryLoss: batch.margins is None; set 0 where no margin is known")
    roles, segments = jnp.asarray(batch.roles), jnp.asarray(batch.segments)
    answers = (roles != 0).astype(jnp.float32)
    return sequence_sums(jnp.asarray(batch.margins) * answers, segments) / jnp.maximum(
        sequence_sums(answers, segments), 1.0
    )
