"""Sequence-level sums and preference pairs from packed rows.

`Batch.roles` labels answers; a pair is a chosen sequence and the rejected one that follows it in its row.
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
    """Batch contents that a preference or reward-model loss requires."""

    rows: Literal["pairs", "answers", "answers_and_others", "steps"]
    """Row layout: pairs of chosen and rejected answers; single answers; single answers with mismatched prompts added
    (KTO); answers with labelled steps."""
    reference: bool
    """Requires `Batch.ref_logps`."""
    prompts: bool = False
    """Requires a loss weight on the prompts of chosen answers."""
    margins: bool = False
    """Requires `Batch.margins`."""
    squares: bool = False
    """Requires `TokenStats.log_squares`."""


@runtime_checkable
class PairLoss(Protocol):
    """Preference or reward-model loss: a callable of (stats, batch) with the attribute `needs`."""

    @property
    def needs(self) -> Needs: ...


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Answer sums of policy and reference for every sequence of every row, by segment id."""

    roles: Float[Array, "B S"]
    logps: Float[Array, "B S"]
    """Sums of weighted log-probabilities; 0 for unused segment ids."""
    ref_logps: Float[Array, "B S"] | None
    lengths: Float[Array, "B S"]
    """Sums of `loss_weight`. An answer without weighted tokens does not count."""

    def mean_logps(self) -> Float[Array, "B S"]:
        return self.logps / jnp.maximum(self.lengths, 1.0)


@dataclass(frozen=True, kw_only=True)
class PairedSequences:
    """Chosen and rejected sequences aligned by pair; entries that are not `valid` are 0."""

    valid: Bool[Array, "B S"]
    chosen: Sequences
    rejected: Sequences

    def total(self, values: Float[Array, "B S"]) -> Mean:
        """Sum over pairs, with their number as weight."""
        return Mean(total=jnp.where(self.valid, values, 0.0).sum(), weight=self.count)

    @property
    def count(self) -> Float[Array, ""]:
        return self.valid.sum().astype(self.chosen.lengths.dtype)


def sequences_of(stats: TokenStats, batch: Batch, tail_weight: float = 1.0) -> Sequences:
    """Sums over answers; `tail_weight`: factor on log-probabilities beyond the length of a pair's shorter answer.

    Raises ValueError if the batch has no roles.
    """
    segments, weight = jnp.asarray(batch.segments), answer_weight(batch)
    roles, lengths = roles_of(batch), sequence_sums(weight, segments)
    counted = weight if tail_weight == 1.0 else _discount_tail(weight, roles, segments, tail_weight)

    def sums(values: Array | HostArray) -> Array:
        # Mask before the product: a masked token may hold inf or NaN.
        return sequence_sums(jnp.where(weight > 0, jnp.asarray(values), 0.0) * counted, segments)

    return Sequences(
        roles=roles,
        logps=sums(stats.logps),
        ref_logps=None if batch.ref_logps is None else sums(batch.ref_logps),
        lengths=lengths,
    )


def answer_weight(batch: Batch) -> Float[Array, "B T"]:
    """`loss_weight` on answer tokens, else 0."""
    return jnp.where(_roles(batch) != 0, jnp.asarray(batch.loss_weight), 0.0)


def roles_of(batch: Batch) -> Float[Array, "B S"]:
    """Role of each sequence's answer."""
    roles, segments = _roles(batch), jnp.asarray(batch.segments)
    weight = jnp.asarray(batch.loss_weight)
    counts = sequence_sums((roles != 0).astype(weight.dtype), segments)
    return sequence_sums(roles.astype(weight.dtype), segments) / jnp.maximum(counts, 1.0)


def _roles(batch: Batch) -> Int[Array, "B T"]:
    if batch.roles is None:
        raise ValueError("batch.roles is None but a preference loss needs it: 1 chosen, -1 rejected")
    return jnp.asarray(batch.roles)


def pairs_of(sequences: Sequences) -> PairedSequences:
    """Pair each chosen sequence with the rejected one that follows it."""
    counts = sequences.lengths > 0
    first = (sequences.roles == 1) & counts
    second = _next_sequence((sequences.roles == -1) & counts)
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

    return PairedSequences(valid=valid, chosen=side(lambda x: x), rejected=side(_next_sequence))


def log_ratios(sequences: Sequences, loss: str) -> Float[Array, "B S"]:
    """log policy - log reference per sequence. Raises ValueError without a reference."""
    if sequences.ref_logps is None:
        raise ValueError(f"{loss}: batch.ref_logps is None; compute them with the reference model")
    return sequences.logps - sequences.ref_logps


def _discount_tail(
    weight: Float[Array, "B T"], roles: Float[Array, "B S"], segments: Int[Array, "B T"], tail_weight: float
) -> Float[Array, "B T"]:
    """`weight`, multiplied by `tail_weight` beyond the length of a pair's shorter answer. LD-DPO, arXiv:2409.06411."""
    counted = (weight > 0).astype(weight.dtype)
    lengths = sequence_sums(counted, segments)
    other = jnp.where(roles > 0, _next_sequence(lengths), jnp.pad(lengths[:, :-1], ((0, 0), (1, 0))))
    # Index of each token within its answer.
    number = jnp.cumsum(counted, axis=1) - to_tokens(jnp.cumsum(lengths, axis=1) - lengths, segments)
    return jnp.where(number <= to_tokens(other, segments), weight, weight * tail_weight)


def pair_metrics(
    pairs: PairedSequences, chosen_rewards: Float[Array, "B S"], rejected_rewards: Float[Array, "B S"]
) -> dict[str, Mean]:
    """Metrics of pairs: `rewards/chosen`, `rewards/rejected`, `rewards/margins`, `rewards/accuracies` (share of pairs
    whose chosen answer has the greater reward); `logps/chosen`, `logps/rejected` of whole answers."""
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
    """Token mean of -log p over the weighted tokens of chosen sequences: answers, and prompts if weighted."""
    segments, weight = jnp.asarray(batch.segments), jnp.asarray(batch.loss_weight)
    return token_mean(-stats.logps, jnp.where(to_tokens(roles_of(batch), segments) == 1, weight, 0.0), segments)


def with_nll(loss: Mean, nll: Mean, coef: float) -> Mean:
    """mean(loss) + coef * mean(nll) over the whole batch, with the weight of `loss`."""
    scale = loss.weight / jnp.maximum(nll.weight, 1.0)
    return Mean(total=loss.total + coef * nll.total * scale, weight=loss.weight)


def output(loss: Mean, metrics: dict[str, Mean], stats: TokenStats, batch: Batch) -> LossOutput:
    return LossOutput(loss=loss, metrics=metrics | entropy_metric(stats, batch))


def _next_sequence(values: Array) -> Array:
    """Value of the row's next sequence."""
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
