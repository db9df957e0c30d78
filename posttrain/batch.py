"""The one sequence format: rows of tokens with per-token arrays beside them.

Shape legend, used in every signature of the package:

    B rows      T tokens of a row      S sequences in a row    P prompts     G samples of one prompt
    D embed     N heads                K kv heads              H head dim    F mlp
    V vocabulary                       E experts               L layers

Alignment: `x[b, t]` describes `tokens[b, t]` itself, never the next token. Lengths make masks, token ids never do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from jax import Array
from jaxtyping import Float, Int

from posttrain.tree import Mean, pytree, replace

HostArray = np.ndarray


NO_ID = 2**31 - 1
"""Placeholder for a teacher's id that stands for no token of the student."""


@pytree
class TopK:
    """What a teacher said of each token: the K most probable ids of the distribution that it was drawn from."""

    ids: Int[Array | HostArray, "*B K"]
    """Of the student's vocabulary; one outside of it stands for none."""
    logps: Float[Array | HostArray, "*B K"]
    """At temperature 1."""
    tail: Float[Array | HostArray, "*B"]
    """Log of the probability of all other ids together."""
    scaled_tail: Float[Array | HostArray, "*B"]
    """Log of the sum of p^(1 / temperature) over all other ids, at the temperature of the divergence."""
    token_logps: Float[Array | HostArray, "*B"]
    """Of the token itself; of the whole group where tokens are merged."""
    back: Int[Array | HostArray, "*B"] | None = None
    """Where the teacher's tokens are merged in groups with the student's: how many tokens before this one its group
    begins; negative for a token in none."""


@pytree
class Batch:
    """Rows ready for a training step (device or host arrays); optional arrays exist or are `None`, never zeros."""

    tokens: Int[Array | HostArray, "B T"]
    positions: Int[Array | HostArray, "B T"]
    """Restart at 0 in each sequence that does not go on from another, as `parents` says."""
    segments: Int[Array | HostArray, "B T"]
    """1..S within a row, rising; 0 is padding."""
    loss_weight: Float[Array | HostArray, "B T"]
    """0 on prompt, tool output, padding and on the first token of a sequence."""
    parents: Int[Array | HostArray, "B T"] | None = None
    """Of a token whose sequence goes on from an earlier one of its row, and sees that one too: its segment; else 0."""
    sampler_logps: Float[Array | HostArray, "B T"] | None = None
    """The rollout engine's log-probability of each sampled token, before truncation."""
    old_logps: Float[Array | HostArray, "B T"] | None = None
    """The trainer's own log-probability before the first update on this batch, if it was recomputed."""
    ref_logps: Float[Array | HostArray, "B T"] | None = None
    advantages: Float[Array | HostArray, "B T"] | None = None
    experts: Int[Array | HostArray, "B T M k"] | None = None
    """The experts that the sampler used in each mixture of a model; negative where it recorded none."""
    roles: Int[Array | HostArray, "B T"] | None = None
    """On the tokens of answers that are compared: 1 chosen or desirable, -1 rejected or undesirable, 2 an answer to
    another prompt; else 0. A pair is a chosen sequence and the rejected one that follows it in its row."""
    margins: Float[Array | HostArray, "B T"] | None = None
    """By how much a pair's chosen answer is known to be better, on its tokens; 0 elsewhere."""
    teachers: tuple[TopK, ...] | None = None
    """What teachers outside of the step said of each token."""
    teacher_weights: Float[Array | HostArray, "B T N"] | None = None
    """How much each of N teachers counts for a token; 0: it says nothing of it. None: one teacher, of all tokens."""
    returns: Float[Array | HostArray, "B T"] | None = None
    old_values: Float[Array | HostArray, "B T"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, length = self.tokens.shape
        return rows, length


def rows_per_pass(total: int, wanted: int | None, shards: int) -> int:
    """Rows of one forward pass over `total`: all or `wanted`, rounded up to a multiple of the devices they are on."""
    rows = total if wanted is None else min(wanted, total)
    return -(-rows // shards) * shards


def filled(batch: Batch) -> dict[str, float]:
    """Of host rows the metrics `num_tokens` and `data/filled_ratio`: the share of the places that hold a token, of the
    rows that hold any."""
    held = np.asarray(batch.segments) > 0
    num_tokens, num_places = int(held.sum()), int(held.any(axis=1).sum()) * held.shape[1]
    return {"num_tokens": float(num_tokens), "data/filled_ratio": num_tokens / max(num_places, 1)}


@pytree
class TokenStats:
    """What one forward pass says of each token, float32; 0 at the first token of a sequence and at padding."""

    logps: Float[Array, "B T"]
    entropy: Float[Array, "B T"] | None = None
    """Entropy in nats of the distribution that `tokens[b, t]` was drawn from."""
    sampling_logps: Float[Array, "B T"] | None = None
    """Log-probabilities at the temperature of the sampler, where that is another; without a gradient."""
    mean_logps: Float[Array, "B T"] | None = None
    """Mean log-probability of all tokens of the vocabulary in its place."""
    log_squares: Float[Array, "B T"] | None = None
    """Log of the sum of squared probabilities in its place; without a gradient."""
    divergence: Float[Array, "B T"] | None = None
    """From the teachers' distribution, as `posttrain.kernels.logits.divergence.Divergence` says."""
    teacher_kl: Float[Array, "B T"] | None = None
    """KL(teacher || student) at temperature 1; without a gradient."""
    teacher_logps: Float[Array, "B T"] | None = None
    """The teachers' log-probability of the token, at temperature 1; of a group it stands at the first token."""
    sorted_distance: Float[Array, "B T"] | None = None
    """Of groups: the L1 distance of the sorted probabilities of tokens that only one vocabulary has."""
    hidden_distance: Float[Array, "B T"] | None = None
    """From a teacher's hidden states of the context that predicts the token."""
    relation_divergence: Float[Array, "B T"] | None = None
    """From a teacher's relations of that context to those before it."""


DIFFERENTIABLE = (
    "logps",
    "entropy",
    "mean_logps",
    "divergence",
    "sorted_distance",
    "hidden_distance",
    "relation_divergence",
)
"""Statistics that have a gradient."""


@pytree
class ScoreStats:
    """What one forward pass of a model with a scalar head says of each token, float32."""

    scores: Float[Array, "B T"]


@pytree
class RouterStats:
    """Of one mixture-of-experts layer, summed over real tokens; with a leading dimension M, of every such layer."""

    load: Float[Array, "*M E"]
    """How often each expert was chosen."""
    balance: Float[Array, "*M"]
    """Load-balancing loss of each sequence times its length."""
    z: Float[Array, "*M"]
    """Squared log-partition of the router's logits."""
    entropy: Float[Array, "*M"]
    """Of the router's probabilities."""
    replaced: Float[Array, "*M"]
    """Experts that were used though the router itself would have chosen others."""


@pytree
class LossOutput:
    """A loss as a sum with its weight, and metrics that add up in the same way."""

    loss: Mean
    metrics: Mapping[str, Mean]


@runtime_checkable
class TokenLoss(Protocol):
    """Any callable of (stats, batch): sft, policy, preference, distillation, or a user's own."""

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput: ...


@runtime_checkable
class ScoreLoss(Protocol):
    """A loss on the scores of a model with a scalar head: reward models."""

    def __call__(self, stats: ScoreStats, batch: Batch) -> LossOutput: ...


@runtime_checkable
class LinearLoss(Protocol):
    """A loss whose gradient by the statistics does not depend on them: a sum of them, weighted by what is in the batch.

    The trainer then has the head's part of the gradient from the forward pass, and computes logits once.
    """

    @property
    def linear_in(self) -> tuple[str, ...]:
        """Names of the statistics that have a gradient, all of them: others would get none."""


@runtime_checkable
class BatchLoss(Protocol):
    """A loss that may compare sequences across the whole batch, and not only within a row, such as a mean over it.

    Where `needs_whole_batch` is true, the trainer calls it once on all rows of a step, however many micro-batches the
    model takes them in.
    """

    @property
    def needs_whole_batch(self) -> bool: ...


def of_teacher(batch: Batch, number: int) -> Batch:
    """The batch with loss only where this teacher counts."""
    if batch.teacher_weights is None:
        return batch
    counts = np.asarray(batch.teacher_weights)[..., number] > 0
    return replace(batch, loss_weight=np.where(counts, batch.loss_weight, 0.0))
