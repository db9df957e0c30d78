"""One matrix product per group of rows: the experts of a mixture."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

GroupedKernel = Literal["auto", "reference", "ragged_dot", "buckets", "megablox", "tokamax"]


def grouped_matmul(
    x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Int[Array, " E"], *, kernel: GroupedKernel
) -> Float[Array, "M F"]:
    """x[m] @ w[e] where row m belongs to group e; rows are sorted by group, and those beyond the last group yield 0."""
    return reference(x, w, group_sizes)


def reference(x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Int[Array, " E"]) -> Float[Array, "M F"]:
    """Every row through every group, one of them kept."""
    rows = jnp.arange(x.shape[0], dtype=group_sizes.dtype)
    groups = jnp.searchsorted(jnp.cumsum(group_sizes), rows, side="right")
    chosen = jax.nn.one_hot(groups, w.shape[0], dtype=x.dtype)
    return jnp.einsum("me,md,edf->mf", chosen, x, w)
