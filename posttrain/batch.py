"""Batch: rows of tokens with per-token arrays, and the statistics, losses and protocols over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from jax import Array
from jaxtyping import Float, Int, UInt8

from posttrain.tree import Mean, Metric, pytree, replace, static

# Shape legend, used in every signature of the package:
#
#     B rows      T tokens of a row      S sequences in a row    P prompts     G samples of one prompt
#     D embed     N heads                K kv heads              H head dim    F mlp
#     V vocabulary                       E experts               L layers
#     P also image patches beside a row  C values of a patch
#
# Alignment: `x[b, t]` describes `tokens[b, t]` itself, never the next token. Masks come from lengths, never from token
# ids.

HostArray = np.ndarray


IMAGE_ARRAYS = ("rope_positions", "image_rows", "images", "patches", "patch_images", "patch_places")
"""Arrays of `Batch` for images."""
NO_ID = 2**31 - 1
"""Placeholder for a teacher's id without a token in the student's vocabulary."""


@pytree
class TopK:
    """Teacher top-k per token: the K most probable ids of the distribution that predicts it."""

    ids: Int[Array | HostArray, "*B K"]
    """Ids in the student's vocabulary; larger ids have no student token."""
    logps: Float[Array | HostArray, "*B K"]
    """Log-probabilities at temperature 1."""
    tail: Float[Array | HostArray, "*B"]
    """Log-probability of all other ids together."""
    scaled_tail: Float[Array | HostArray, "*B"]
    """Log of the sum of p^(1 / temperature) over all other ids, at the temperature of the divergence."""
    token_logps: Float[Array | HostArray, "*B"]
    """Log-probability of the token itself; of the whole group if tokens are merged."""
    back: Int[Array | HostArray, "*B"] | None = None
    """Offset back to the first token of this token's group, if tokens are merged with the student's; negative: no
    group."""


@pytree
class ImageFeatures:
    """Features of images: those in place of embeddings, and those that the first K layers add."""

    features: Float[Array | HostArray, "*B N D"]
    deeper: Float[Array | HostArray, "*B K N D"] | None

    @property
    def nbytes(self) -> int:
        return int(self.features.nbytes + (0 if self.deeper is None else self.deeper.nbytes))


@pytree
class Batch:
    """Training batch (device or host arrays); optional arrays are present or None, never zeros."""

    tokens: Int[Array | HostArray, "B T"]
    positions: Int[Array | HostArray, "B T"]
    """Position in the sequence, from 0; continues from the parent sequence if there is one."""
    segments: Int[Array | HostArray, "B T"]
    """Sequence ids 1..S within a row, ascending; 0 is padding."""
    loss_weight: Float[Array | HostArray, "B T"]
    """Loss weight; 0 on prompt, tool output, padding and the first token of a sequence."""
    sample_shares: Float[Array | HostArray, "B T"] | None = None
    """Share of its sample's sampled tokens that a sequence has, the same at each of its tokens: 1 for a sample of one
    row. Means over samples read it (`losses.reduce`); None: each sequence is a sample."""
    samples: Int[Array | HostArray, "B T"] | None = None
    """Number of each sampled token's sample in the batch, for returns over all rows of a sample; else 0. None: each
    sequence is a sample."""
    times: Int[Array | HostArray, "B T"] | None = None
    """Place of each sampled token among those of its sample in order of time; beside `samples`."""
    parents: Int[Array | HostArray, "B T"] | None = None
    """Segment of the parent sequence (earlier in the row, visible to this one); 0: none."""
    sampler_temperature: float | None = static(default=None)
    """Temperature at which the tokens were drawn, which must be the trainer's; None: not known."""
    sampler_logps: Float[Array | HostArray, "B T"] | None = None
    """Rollout engine's log-probability of each sampled token under the model's full distribution, before truncation."""
    behaviour_logps: Float[Array | HostArray, "B T"] | None = None
    """Log-probability with which each token was drawn, after penalties, bias and truncation, by the weights that drew
    it: the denominator of importance weights."""
    old_logps: Float[Array | HostArray, "B T"] | None = None
    """Log-probabilities of the proximal policy, the denominator of ratios; None: the trainer's own of this forward
    pass, so that every ratio is exactly 1."""
    staleness: Int[Array | HostArray, "B T"] | None = None
    """Weight updates since each token was sampled; None: all tokens are fresh."""
    ref_logps: Float[Array | HostArray, "B T"] | None = None
    advantages: Float[Array | HostArray, "B T"] | None = None
    old_values: Float[Array | HostArray, "B T"] | None = None
    """Critic's value of the context before each token, before the first update; 0 where `loss_weight` is 0."""
    returns: Float[Array | HostArray, "B T"] | None = None
    """Targets of the critic's values; 0 where `loss_weight` is 0."""
    entropy_coefs: Float[Array | HostArray, "B T"] | None = None
    """Coefficient of the entropy bonus at each token, where it changes from step to step; None: that of the loss."""
    experts: Int[Array | HostArray, "B T M k"] | None = None
    """Experts used by the sampler in each MoE layer; negative: not recorded."""
    roles: Int[Array | HostArray, "B T"] | None = None
    """Role of answer tokens: 1 chosen or desirable, -1 rejected or undesirable, 2 answer to another prompt; else 0. A
    pair is a chosen sequence and the rejected one that follows it in its row."""
    margins: Float[Array | HostArray, "B T"] | None = None
    """Preference margin of a pair, on the chosen answer's tokens; 0 elsewhere."""
    teachers: tuple[TopK, ...] | None = None
    """Precomputed top-k of teachers outside of the step."""
    teacher_weights: Float[Array | HostArray, "B T N"] | None = None
    """Weight of each of N teachers per token; 0: the teacher does not cover it. None: one teacher for all tokens."""
    rope_positions: Int[Array | HostArray, "B T 3"] | None = None
    """Time, row and column that multimodal RoPE turns each token by; `positions` still orders the sequence. None: the
    family turns by `positions`."""
    image_rows: Int[Array | HostArray, "B T"] | None = None
    """Image feature that replaces each token's embedding: j takes feature j - 1 of this row, of patches
    (j - 1) m^2 to j m^2 - 1 where the family merges m x m patches; 0: text."""
    images: Int[Array | HostArray, "B T"] | None = None
    """Number of the image within the row that each token is of, from 1 in the order of the row; 0: text."""
    patches: UInt8[Array | HostArray, "B P C"] | None = None
    """Image patches beside each row, image after image: resized pixels before normalization, ordered [channel, y, x] in
    every family; merged blocks of m x m patches in raster order, within a block the patches too. Padding is 0."""
    patch_images: Int[Array | HostArray, "B P"] | None = None
    """Number of each patch's picture within the row, from 1; 0: padding. Images of several sequences may be of one
    picture."""
    patch_places: Int[Array | HostArray, "B P 2"] | None = None
    """Row and column of each patch in its image's grid of patches; 0 for padding."""
    encoded: tuple[ImageFeatures | None, ...] | None = None
    """Features of the patches by the frozen towers of the model and its teachers in the step, which then do not run in
    it; None in it for a model with another tower, or without one."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, length = self.tokens.shape
        return rows, length

    @property
    def has_images(self) -> bool:
        """True with any array of images."""
        return any(getattr(self, name) is not None for name in IMAGE_ARRAYS)

    def without_images(self) -> Batch:
        """Batch as losses read it, of one shape whatever number of patches is beside its rows."""
        return replace(self, encoded=None, **dict.fromkeys(IMAGE_ARRAYS))


def rows_per_pass(total: int, wanted: int | None, shards: int) -> int:
    """Rows per forward pass over `total`: all or `wanted`, rounded up to a multiple of the row shards."""
    rows = total if wanted is None else min(wanted, total)
    return -(-rows // shards) * shards


def packing_metrics(batch: Batch) -> dict[str, float | Mean]:
    """Metrics `num_tokens` and `data/filled_ratio` of host rows: share of non-padding positions in non-empty rows."""
    filled = np.asarray(batch.segments) > 0
    num_tokens, num_places = int(filled.sum()), int(filled.any(axis=1).sum()) * filled.shape[1]
    return {
        "num_tokens": float(num_tokens),
        "data/filled_ratio": Mean(total=float(num_tokens), weight=float(num_places)),
    }


@pytree
class TokenStats:
    """Token statistics of one forward pass, float32; 0 at the first token of a sequence and at padding."""

    logps: Float[Array, "B T"]
    entropy: Float[Array, "B T"] | None = None
    """Entropy in nats of the distribution that predicts `tokens[b, t]`."""
    sampling_logps: Float[Array, "B T"] | None = None
    """Log-probabilities at the sampler's temperature, if different; without a gradient."""
    mean_logps: Float[Array, "B T"] | None = None
    """Mean log-probability over the vocabulary at this position (label smoothing)."""
    log_squares: Float[Array, "B T"] | None = None
    """Log of the sum of squared probabilities at this position; without a gradient."""
    divergence: Float[Array, "B T"] | None = None
    """Divergence from the teachers as defined by `posttrain.kernels.logits.divergence.Divergence`."""
    teacher_kl: Float[Array, "B T"] | None = None
    """KL(teacher || student) at temperature 1; without a gradient."""
    teacher_logps: Float[Array, "B T"] | None = None
    """Teachers' log-probability of the token at temperature 1; for a token group at its first token."""
    sorted_distance: Float[Array, "B T"] | None = None
    """L1 distance of the sorted probabilities of unshared tokens (cross-tokenizer ULD), at the first token of each
    group."""
    hidden_distance: Float[Array, "B T"] | None = None
    """Distance from a teacher's hidden states at the context that predicts the token."""
    relation_divergence: Float[Array, "B T"] | None = None
    """Divergence from a teacher's attention relations of that context."""


DIFFERENTIABLE = (
    "logps",
    "entropy",
    "mean_logps",
    "divergence",
    "sorted_distance",
    "hidden_distance",
    "relation_divergence",
)
"""Statistics with a gradient."""


@pytree
class ScoreStats:
    """Scalar-head scores per token of one forward pass, float32."""

    scores: Float[Array, "B T"]


@pytree
class DraftStats:
    """Statistics of a block drafter at the tokens that its blocks cover, float32; 0 elsewhere."""

    order: Int[Array, "B T"]
    """Place of a token in its block, from 1."""
    divergence: Float[Array, "B T"]
    """KL(target || drafter) of the distribution that predicts the token."""
    overlap: Float[Array, "B T"]
    """Sum of the smaller probabilities of both: the share of drafts that the best coupling accepts."""
    reached: Float[Array, "B T"]
    """Product of the overlaps of its block up to this place."""


@pytree
class RouterStats:
    """Router statistics of one MoE layer, summed over real tokens; with a leading dimension M, of every MoE layer."""

    load: Float[Array, "*M E"]
    """Selections per expert."""
    balance: Float[Array, "*M"]
    """Load-balancing loss of each sequence times its length."""
    z: Float[Array, "*M"]
    """Squared log-partition of the router's logits."""
    entropy: Float[Array, "*M"]
    """Entropy of the router's probabilities."""
    replaced: Float[Array, "*M"]
    """Number of used experts that the router would not have chosen."""


@pytree
class LossOutput:
    """Loss as a sum with its weight, with additive metrics."""

    loss: Mean
    metrics: Mapping[str, Metric]


@runtime_checkable
class TokenLoss(Protocol):
    """Loss interface: a callable of (stats, batch), for SFT, policy, preference, distillation or custom losses."""

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput: ...


@runtime_checkable
class ScoreLoss(Protocol):
    """Loss interface on scores of a model with a scalar head: reward models."""

    def __call__(self, stats: ScoreStats, batch: Batch) -> LossOutput: ...


@runtime_checkable
class DraftLoss(Protocol):
    """Loss interface on the drafts of a block drafter."""

    def __call__(self, stats: DraftStats, batch: Batch) -> LossOutput: ...


@runtime_checkable
class LinearLoss(Protocol):
    """Loss that is linear in the statistics, with factors from the batch: its gradient does not depend on them.

    The trainer then computes the head's gradient in the forward pass, and logits once.
    """

    @property
    def linear_in(self) -> tuple[str, ...]:
        """Names of all statistics with a gradient; others get none."""


@runtime_checkable
class BatchLoss(Protocol):
    """Loss that may compare sequences across the whole batch, not only within a row, such as a batch mean.

    If `needs_whole_batch` is true, the trainer calls it once on all rows of a step, regardless of micro-batches.
    """

    @property
    def needs_whole_batch(self) -> bool: ...


def teacher_batch(batch: Batch, number: int) -> Batch:
    """Batch with loss weight only on tokens covered by this teacher."""
    if batch.teacher_weights is None:
        return batch
    counts = np.asarray(batch.teacher_weights)[..., number] > 0
    return replace(batch, loss_weight=np.where(counts, batch.loss_weight, 0.0))


def own_routing(batch: Batch) -> Batch:
    """Batch without recorded routing, which is the actor's: the router of the scorer chooses its own experts."""
    return replace(model_inputs(batch), experts=None)


def model_inputs(batch: Batch) -> Batch:
    """Batch without the arrays that no model reads; they would only cause another compilation."""
    return Batch(
        tokens=batch.tokens,
        positions=batch.positions,
        segments=batch.segments,
        loss_weight=batch.loss_weight,
        parents=batch.parents,
        experts=batch.experts,
        encoded=batch.encoded,
        **{name: getattr(batch, name) for name in IMAGE_ARRAYS},
    )
