"""Block bookkeeping shared by blockwise attention and short-row attention."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from posttrain.kernels.attention.call import MaskInputs, Variant
from posttrain.kernels.attention.reference import MASKED

FLOOR = 0.1 * MASKED
"""Lower bound of the running maximum: relative to it, masked logits of a fully masked query get weight 0."""


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Static block sizes and options of one attention call, padded to whole blocks."""

    variant: Variant
    same_tokens: bool
    parents: bool
    sinks: bool
    block_q: int
    block_k: int
    num_blocks_k: int

    def key_blocks(self, i: Array | int) -> tuple[Array | int, Array | int]:
        """Return the range `[first, stop)` of key blocks visible to query block `i`; Python ints if `i` is an int.

        Self-attention (`same_tokens`) skips blocks after the diagonal and before the window.
        """
        if not self.same_tokens:
            return 0, self.num_blocks_k
        least, most = (jnp.minimum, jnp.maximum) if isinstance(i, Array) else (min, max)
        first: Array | int = 0
        # A parent segment may be anywhere in the row, so the window bounds nothing.
        if self.variant.window is not None and not self.parents:
            first = most(i * self.block_q - self.variant.window + 1, 0) // self.block_k
        return first, least(((i + 1) * self.block_q - 1) // self.block_k + 1, self.num_blocks_k)


def query_inputs(mask_inputs: MaskInputs) -> tuple[Array | None, ...]:
    return mask_inputs.q_positions, mask_inputs.q_segments, mask_inputs.q_parents


def einsum32(spec: str, x: Array, y: Array) -> Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)
