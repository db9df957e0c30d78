"""What attention in loops over blocks and attention of short rows share."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from posttrain.kernels.attention.reference import MASKED
from posttrain.kernels.attention.request import Places, Variant

FLOOR = 0.1 * MASKED
"""Least running maximum: beside it even the masked logits of a query that sees nothing have weight 0."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Static facts of one call, padded to whole blocks."""

    variant: Variant
    same_tokens: bool
    parents: bool
    sinks: bool
    block_q: int
    block_k: int
    num_blocks_k: int

    def keys_of(self, i: Array | int) -> tuple[Array | int, Array | int]:
        """First and last + 1 block of keys that queries of block `i` can see; numbers where `i` is one.

        Where queries and keys are the same tokens, that is neither after the diagonal nor before the window.
        """
        if not self.same_tokens:
            return 0, self.num_blocks_k
        least, most = (jnp.minimum, jnp.maximum) if isinstance(i, Array) else (min, max)
        first: Array | int = 0
        # What a segment goes on from may lie before others: anywhere in the row.
        if self.variant.window is not None and not self.parents:
            first = most(i * self.block_q - self.variant.window + 1, 0) // self.block_k
        return first, least(((i + 1) * self.block_q - 1) // self.block_k + 1, self.num_blocks_k)


def of_queries(places: Places) -> tuple[Array | None, ...]:
    return places.q_positions, places.q_segments, places.q_parents


def product(spec: str, x: Array, y: Array) -> Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)
