"""Sequence-level views of packed rows for losses that compare answers: sums per sequence, and which belong together.

`Batch.signs` is the carrier: 1 on a chosen or desirable sequence, -1 on a rejected or undesirable one. A pair is a
chosen sequence and the rejected one that follows it in the same row, so no split of rows into micro-batches parts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from posttrain.batch import Batch, HostArray, LossOutput, TokenStats
from posttrain.losses.reduce import sequence_sums, to_tokens, token_mean
from posttrain.tree import Mean


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Of every sequence of every row, by segment id: what the policy and the reference say of its weighted tokens."""

    signs: Float[Array, "B S"]
    logps: Float[Array, "B S"]
    """Sums of weighted log-probabilities; 0 where there is no sequence."""
    ref_logps: Float[Array, "B S"] | None
    lengths: Float[Array, "B S"]
    """Sums of `loss_weight`. A sequence without weighted tokens does not count."""

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


def sequences_of(stats: TokenStats, batch: Batch, weight: Float[Array, "B T"] | None = None) -> Sequences:
    """Sums over each sequence; of log-probabilities by another weight, if given. ValueError where the batch has no signs."""
    segments = jnp.asarray(batch.segments)
    weight = jnp.asarray(batch.loss_weight) if weight is None else weight

    def sums(values: Array | HostArray) -> Array:
        # Before the product: a masked token may hold inf or NaN.
        return sequence_sums(jnp.where(weight > 0, jnp.asarray(values), 0.0) * weight, segments)

    return Sequences(
        signs=signs_of(batch),
        logps=sums(stats.logps),
        ref_logps=None if batch.ref_logps is None else sums(batch.ref_logps),
        lengths=sequence_sums(jnp.asarray(batch.loss_weight), segments),
    )


def signs_of(batch: Batch) -> Float[Array, "B S"]:
    """The sign of each sequence."""
    if batch.signs is None:
        raise ValueError("batch.signs is None but a loss that compares answers needs them: 1 chosen, -1 rejected")
    segments = jnp.asarray(batch.segments)
    counts = sequence_sums(jnp.ones(segments.shape), segments)
    return sequence_sums(jnp.asarray(batch.signs, counts.dtype), segments) / jnp.maximum(counts, 1.0)


def pairs_of(sequences: Sequences) -> Pairs:
    """Each chosen sequence with the rejected one that follows it."""
    counts = sequences.lengths > 0
    first = (sequences.signs == 1) & counts
    second = _following((sequences.signs == -1) & counts)
    valid = first & second

    def side(move: Callable[[Array], Array]) -> Sequences:
        def at(values: Array) -> Array:
            return jnp.where(valid, move(values), 0.0)

        ref = sequences.ref_logps
        return Sequences(
            signs=at(sequences.signs),
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


def shared_length_weight(batch: Batch, tail_weight: float) -> Float[Array, "B T"]:
    """`loss_weight`, times `tail_weight` beyond the length of the shorter answer of a pair. LD-DPO, arXiv:2409.06411."""
    weight, segments = jnp.asarray(batch.loss_weight), jnp.asarray(batch.segments)
    if tail_weight == 1.0:
        return weight
    counted = (weight > 0).astype(weight.dtype)
    lengths, signs = sequence_sums(counted, segments), signs_of(batch)
    before = jnp.pad(lengths[:, :-1], ((0, 0), (1, 0)))
    other = jnp.where(signs > 0, _following(lengths), before)
    # Of each token: how many weighted tokens of its sequence there are up to it.
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


def nll_of_chosen(stats: TokenStats, batch: Batch, *, on_prompt: bool) -> Mean:
    """Token mean of -log p over the chosen answers, with `on_prompt` over their prompts as well."""
    segments = jnp.asarray(batch.segments)
    weight = jnp.asarray(batch.loss_weight)
    if on_prompt:
        first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        weight = ((segments > 0) & ~first).astype(weight.dtype)
    weight = jnp.where(to_tokens(signs_of(batch), segments) == 1, weight, 0.0)
    return token_mean(-stats.logps, weight, segments)


def with_nll(loss: Mean, nll: Mean, coef: float) -> Mean:
    """mean of the one + coef * mean of the other, over the whole batch, under the weight of the first."""
    scale = loss.weight / jnp.maximum(nll.weight, 1.0)
    return Mean(total=loss.total + coef * nll.total * scale, weight=loss.weight)


def output(loss: Mean, metrics: dict[str, Mean], stats: TokenStats, batch: Batch) -> LossOutput:
    return LossOutput(loss=loss, metrics=metrics | entropy_metric(stats, batch))


def _following(values: Array) -> Array:
    """What the next sequence of the row has."""
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
