"""Sequence-level views of packed rows for losses that compare answers: sums per sequence, and which belong together.

`Batch.roles` is the carrier: 1 on the tokens of a chosen or desirable answer, -1 on those of a rejected or undesirable
one. A pair is a chosen sequence and the rejected one that follows it in the same row, so no split of rows into
micro-batches parts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.batch import Batch, HostArray, LossOutput, TokenStats
from posttrain.losses.reduce import sequence_sums, to_tokens, token_mean
from posttrain.tree import Mean


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a loss on judged answers wants in its batches."""

    rows: Literal["pairs", "answers", "answers_and_others", "steps"]
    """Pairs of chosen and rejected; single answers; these with the same prompts under answers to other ones; answers
    whose steps are judged."""
    reference: bool
    """`Batch.ref_logps`."""
    prompts: bool = False
    """A weight on the prompts of chosen answers as well."""
    margins: bool = False
    """`Batch.margins`."""
    squares: bool = False
    """`TokenStats.log_squares`."""


@runtime_checkable
class JudgedLoss(Protocol):
    """A loss that says what it needs; any callable of (stats, batch) with this attribute."""

    @property
    def needs(self) -> Needs: ...


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Of every sequence of every row, by segment id: what policy and reference say of its answer."""

    roles: Float[Array, "B S"]
    logps: Float[Array, "B S"]
    """Sums of weighted log-probabilities; 0 where there is no sequence."""
    ref_logps: Float[Array, "B S"] | None
    lengths: Float[Array, "B S"]
    """Sums of `loss_weight`. An answer without weighted tokens does not count."""

    def mean_logps(self) -> Float[Array, "B S"]:
        return self.logps / jnp.maximum(self.lengths, 1.0)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Chosen and rejected side by side; where `valid` is off, everything is 0."""

    valid: Bool[Array, "B S"]
    chosen: Sequences
    rejected: Sequences

    def total(self, values: Float[Array, "B S"]) -> Mean:
        """The sum over pairs, with their number."""
        return Mean(total=jnp.where(self.valid, values, 0.0).sum(), weight=self.count)

    @property
    def count(self) -> Float[Array, ""]:
        return self.valid.sum().astype(self.chosen.lengths.dtype)


def sequences_of(stats: TokenStats, batch: Batch, tail_weight: float = 1.0) -> Sequences:
    """Sums over the answers; `tail_weight`: of log-probabilities beyond the length of a pair's shorter answer.

    ValueError where the batch has no roles.
    """
    segments, weight = jnp.asarray(batch.segments), answer_weight(batch)
    roles, lengths = roles_of(batch), sequence_sums(weight, segments)
    counted = weight if tail_weight == 1.0 else _less_beyond(weight, roles, segments, tail_weight)

    def sums(values: Array | HostArray) -> Array:
        # Before the product: a masked token may hold inf or NaN.
        return sequence_sums(jnp.where(weight > 0, jnp.asarray(values), 0.0) * counted, segments)

    return Sequences(
        roles=roles,
        logps=sums(stats.logps),
        ref_logps=None if batch.ref_logps is None else sums(batch.ref_logps),
        lengths=lengths,
    )


def answer_weight(batch: Batch) -> Float[Array, "B T"]:
    """`loss_weight` of the tokens of answers."""
    return jnp.where(_roles(batch) != 0, jnp.asarray(batch.loss_weight), 0.0)


def roles_of(batch: Batch) -> Float[Array, "B S"]:
    """The role of each sequence's answer."""
    roles, segments = _roles(batch), jnp.asarray(batch.segments)
    weight = jnp.asarray(batch.loss_weight)
    counts = sequence_sums((roles != 0).astype(weight.dtype), segments)
    return sequence_sums(roles.astype(weight.dtype), segments) / jnp.maximum(counts, 1.0)


def _roles(batch: Batch) -> Int[Array, "B T"]:
    if batch.roles is None:
        raise ValueError("batch.roles is None but a loss that compares answers needs them: 1 chosen, -1 rejected")
    return jnp.asarray(batch.roles)


def pairs_of(sequences: Sequences) -> Pairs:
    """Each chosen sequence with the rejected one that follows it."""
    counts = sequences.lengths > 0
    first = (sequences.roles == 1) & counts
    second = _following((sequences.roles == -1) & counts)
    valid = first & second

    def side(move: Callable[[Array], Array]) -> Sequences:
        def at(values: Array) -> Array:
            return jnp.where(valid, move(values), 0.0)

        ref = sequences.ref_logps
        return Sequences(
            roles=at(sequences.roles),
            logps=at(sequences.logps),
            ref_logps=None if ref is None else at(ref),
            lengths=at(sequences.lengths),
        )

    return Pairs(valid=valid, chosen=side(lambda x: x), rejected=side(_following))


def log_ratios(sequences: Sequences, loss: str) -> Float[Array, "B S"]:
    """log policy - log reference. ValueError without a reference."""
    if sequences.ref_logps is None:
        raise ValueError(f"{loss}: batch.ref_logps is None; compute them with the reference model")
    return sequences.logps - sequences.ref_logps


def _less_beyond(
    weight: Float[Array, "B T"], roles: Float[Array, "B S"], segments: Int[Array, "B T"], tail_weight: float
) -> Float[Array, "B T"]:
    """`weight`, times `tail_weight` beyond the length of the shorter answer of a pair. LD-DPO, arXiv:2409.06411."""
    counted = (weight > 0).astype(weight.dtype)
    lengths = sequence_sums(counted, segments)
    other = jnp.where(roles > 0, _following(lengths), jnp.pad(lengths[:, :-1], ((0, 0), (1, 0))))
    # How many tokens of its own answer there are up to each.
    number = jnp.cumsum(counted, axis=1) - to_tokens(jnp.cumsum(lengths, axis=1) - lengths, segments)
    return jnp.where(number <= to_tokens(other, segments), weight, weight * tail_weight)


def pair_metrics(
    pairs: Pairs, chosen_rewards: Float[Array, "B S"], rejected_rewards: Float[Array, "B S"]
) -> dict[str, Mean]:
    """`rewards/chosen`, `rewards/rejected`, `rewards/margins`, `rewards/accuracies`: the share of pairs of which the
    chosen answer has the greater reward; `logps/chosen`, `logps/rejected`: of whole answers."""
    margins = chosen_rewards - rejected_rewards
    return {
        "rewards/chosen": pairs.total(chosen_rewards),
        "rewards/rejected": pairs.total(rejected_rewards),
        "rewards/accuracies": pairs.total((margins > 0).astype(margins.dtype)),
        "rewards/margins": pairs.total(margins),
        "logps/chosen": pairs.total(pairs.chosen.logps),
        "logps/rejected": pairs.total(pairs.rejected.logps),
    }


def entropy_metric(stats: TokenStats, batch: Batch) -> dict[str, Mean]:
    if stats.entropy is None:
        return {}
    counted = (jnp.asarray(batch.loss_weight) > 0).astype(stats.entropy.dtype)
    return {"entropy": token_mean(stats.entropy, counted, jnp.asarray(batch.segments))}


def nll_of_chosen(stats: TokenStats, batch: Batch) -> Mean:
    """Token mean of -log p over all that has a weight in chosen sequences: answers, and prompts where these have."""
    segments, weight = jnp.asarray(batch.segments), jnp.asarray(batch.loss_weight)
    return token_mean(-stats.logps, jnp.where(to_tokens(roles_of(batch), segments) == 1, weight, 0.0), segments)


def with_nll(loss: Mean, nll: Mean, coef: float) -> Mean:
    """mean of the one + coef * mean of the other, over the whole batch, under the weight of the first."""
    scale = loss.weight / jnp.maximum(nll.weight, 1.0)
    return Mean(total=loss.total + coef * nll.total * scale, weight=loss.weight)


def output(loss: Mean, metrics: dict[str, Mean], stats: TokenStats, batch: Batch) -> LossOutput:
    return LossOutput(loss=loss, metrics=metrics | entropy_metric(stats, batch))


def _following(values: Array) -> Array:
    """What the next sequence of the row has."""
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
