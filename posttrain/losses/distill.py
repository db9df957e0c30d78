"""Distillation losses against a teacher's distribution."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from posttrain.batch import Batch, DraftStats, LossOutput, TokenStats
from posttrain.losses.policy import distance_metrics
from posttrain.losses.reduce import token_mean
from posttrain.losses.sft import likelihood_metrics, masked
from posttrain.tree import Mean, Metric


@dataclass(frozen=True)
class DistillLoss:
    """Distillation loss (1 - c) divergence + c nll per token, c = `cross_entropy`: sum(w x) / sum(w). GKD,
    arXiv:2306.13649.

    Additional terms: `hidden` * distance of hidden states, `attention` * divergence of attention relations; and for
    token groups (GOLD) `uld` * L1 distance over unshared tokens, as a part of the divergence.

    The divergence and its temperature are the trainer's `terms.divergence`. Tokens without a teacher have only the nll
    term and do not count in the metrics `distill/...`; `distill/covered_tokens` is the share of the others.
    """

    cross_entropy: float
    hidden: float = 0.0
    attention: float = 0.0
    uld: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.cross_entropy < 1:
            raise ValueError(
                f"DistillLoss.cross_entropy={self.cross_entropy} must be at least 0 and less than 1; with 1 the "
                "teacher would have no effect: use SFTLoss"
            )

    @property
    def linear_in(self) -> tuple[str, ...]:
        others = {
            "logps": self.cross_entropy,
            "sorted_distance": self.uld,
            "hidden_distance": self.hidden,
            "relation_divergence": self.attention,
        }
        return ("divergence", *(name for name, factor in others.items() if factor))

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        """Raises ValueError if the trainer has no teacher, or a weighted term has no statistics."""
        if stats.divergence is None or stats.teacher_kl is None or stats.teacher_logps is None:
            raise ValueError("DistillLoss: stats.divergence is None; give the trainer terms and a teacher")
        weight, segments = jnp.asarray(batch.loss_weight), jnp.asarray(batch.segments)
        c = self.cross_entropy
        loss = (1 - c) * masked(stats.divergence, batch)
        if self.uld:
            loss += (1 - c) * self.uld * masked(self._sorted(stats), batch)
        if c:
            loss -= c * masked(stats.logps, batch)
        features = self._features(stats)
        for factor, values in features.values():
            loss += factor * masked(values, batch)
        covered = weight * teacher_weight(batch)
        # Each statistic is already weighted over teachers, so a token counts by its total teacher weight.
        metrics: dict[str, Metric] = {
            "distill/divergence": Mean(total=_total(stats.divergence, weight), weight=covered.sum()),
            "distill/kl": Mean(total=_total(stats.teacher_kl, weight), weight=covered.sum()),
            "distill/student_nll": Mean(
                total=_total(-stats.logps * teacher_weight(batch), weight), weight=covered.sum()
            ),
            "distill/teacher_nll": Mean(total=_total(-stats.teacher_logps, weight), weight=covered.sum()),
        }
        if stats.sorted_distance is not None:
            metrics["distill/sorted_l1"] = Mean(total=_total(stats.sorted_distance, weight), weight=covered.sum())
        metrics |= {n: Mean(total=_total(x, weight), weight=weight.sum()) for n, (_, x) in features.items()}
        if batch.teacher_weights is not None:
            metrics["distill/covered_tokens"] = Mean(total=covered.sum(), weight=weight.sum())
        if batch.sampler_logps is not None:
            metrics |= distance_metrics(stats, batch, weight > 0)
        return LossOutput(
            loss=token_mean(loss, weight, segments), metrics={**metrics, **likelihood_metrics(stats, batch)}
        )

    def _sorted(self, stats: TokenStats) -> Float[Array, "B T"]:
        if stats.sorted_distance is None:
            raise ValueError(
                f"DistillLoss.uld={self.uld}: stats.sorted_distance is None; give the trainer a cross-tokenizer teacher"
            )
        return stats.sorted_distance

    def _features(self, stats: TokenStats) -> dict[str, tuple[float, Float[Array, "B T"]]]:
        """Weighted feature terms by metric name."""
        features = {}
        for name, factor, values in (
            ("hidden", self.hidden, stats.hidden_distance),
            ("attention", self.attention, stats.relation_divergence),
        ):
            if factor and values is None:
                raise ValueError(
                    f"DistillLoss.{name}={factor}: no statistics for it; give the trainer a layer matching"
                )
            if factor and values is not None:
                features[f"distill/{name}"] = (factor, values)
        return features


def teacher_weight(batch: Batch) -> Float[Array, "B T"]:
    """Total weight of all teachers per token."""
    if batch.teacher_weights is None:
        return jnp.ones(batch.tokens.shape, jnp.float32)
    return jnp.sum(jnp.asarray(batch.teacher_weights), axis=-1)


def _total(values: Float[Array, "B T"], weight: Float[Array, "B T"]) -> Array:
    return jnp.where(weight > 0, values * weight, 0.0).sum()


PLACE_DECAY = 0.8
"""Weight of a place in a block relative to the one before: a draft counts only if all before it are accepted."""


@dataclass(frozen=True)
class BlockDraftLoss:
    """Divergence KL(target || drafter) over the places of blocks, those behind others with less weight, as in DFlash
    (arXiv:2602.06036).

    `drafter/overlap`: share of first places that the best coupling accepts; `drafter/length`: tokens of a pass of the
    target, one and those that it accepts, if the places of a block agree independently.
    """

    def __call__(self, stats: DraftStats, batch: Batch) -> LossOutput:
        trained = (stats.order > 0) & (jnp.asarray(batch.loss_weight) > 0)
        weight = jnp.where(trained, jnp.asarray(batch.loss_weight) * PLACE_DECAY ** (stats.order - 1), 0.0)
        first = trained & (stats.order == 1)
        blocks = jnp.sum(first, dtype=jnp.float32)

        def mean(values: Float[Array, "B T"], weights: Array) -> Mean:
            return Mean(total=jnp.sum(jnp.where(weights > 0, values * weights, 0.0)), weight=jnp.sum(weights * 1.0))

        reached = jnp.sum(jnp.where(trained, stats.reached, 0.0))
        metrics: dict[str, Metric] = {
            "drafter/kl": mean(stats.divergence, trained),
            "drafter/overlap": mean(stats.overlap, first),
            "drafter/length": Mean(total=blocks + reached, weight=blocks),
        }
        return LossOutput(loss=mean(stats.divergence, weight), metrics=metrics)
