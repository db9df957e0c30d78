"""From per-token values to `Mean`: sums whose addition over rows and micro-batches is exact.

A sequence is one segment id within one row. Tokens of weight 0 never matter, whatever their value, and a sequence
without weighted tokens does not count: masking a sequence is the same as removing it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from posttrain.tree import Mean

Reduction = Callable[[Float[Array, "B T"], Float[Array, "B T"], Int[Array, "B T"]], Mean]
"""Of (values, weight, segments); a hashable value: one of the functions below or an instance of `ConstantLength`."""


def sequence_sums(values: Float[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B S"]:
    """Sum of each sequence by its segment id; S = T + 1 whatever the packing, and column 0 is the padding."""
    num_segments = segments.shape[1] + 1
    return jax.vmap(lambda x, s: jax.ops.segment_sum(x, s, num_segments=num_segments))(values, segments)


def to_tokens(per_sequence: Float[Array, "B S"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The value of its sequence at every token: the way back from `sequence_sums`."""
    return jnp.take_along_axis(per_sequence, segments, axis=1)


def token_mean(values: Float[Array, "B T"], weight: Float[Array, "B T"], segments: Int[Array, "B T"]) -> Mean:
    """sum(w x) / sum(w) over all tokens: every token counts the same. SFT; DAPO, arXiv:2503.14476 eq. 8."""
    return Mean(total=_weighted(values, weight).sum(), weight=weight.sum())


def sequence_mean(values: Float[Array, "B T"], weight: Float[Array, "B T"], segments: Int[Array, "B T"]) -> Mean:
    """Mean over sequences of each one's token mean: every sequence counts the same. GRPO, arXiv:2402.03300 eq. 3."""
    weights = sequence_sums(weight, segments)
    counts = weights > 0
    means = jnp.where(counts, sequence_sums(_weighted(values, weight), segments) / jnp.where(counts, weights, 1.0), 0.0)
    return Mean(total=means.sum(), weight=counts.sum().astype(weight.dtype))


@dataclass(frozen=True)
class ConstantLength:
    """sum(w x) / (number of sequences * length): no bias towards short or long answers. Dr. GRPO, arXiv:2503.20783.

    `length` is a constant of the run, such as the largest number of sampled tokens. Raises ValueError if it is below 1.
    """

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"ConstantLength.length={self.length} must be at least 1; give the run's max_tokens")

    def __call__(self, values: Float[Array, "B T"], weight: Float[Array, "B T"], segments: Int[Array, "B T"]) -> Mean:
        num_sequences = (sequence_sums(weight, segments) > 0).sum().astype(weight.dtype)
        return Mean(total=_weighted(values, weight).sum(), weight=num_sequences * self.length)


def _weighted(values: Float[Array, "B T"], weight: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.where(weight > 0, values * weight, 0.0)
