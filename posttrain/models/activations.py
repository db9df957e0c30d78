"""Sharding of the residual stream: rows over the row axes, their tokens over `context` and `tensor` (sequence
parallelism, arXiv:2205.05198): sums over `tensor` become a reduce-scatter, inputs of products an all-gather.
"""

from __future__ import annotations

import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from posttrain.kernels.platform import HEAD_AXIS, TOKEN_AXIS, row_axes, row_shards


def split_tokens(x: Float[jax.Array, "B T D"], mesh: Mesh | None) -> Float[jax.Array, "B T D"]:
    """Residual stream of whole rows: tokens over `context` and, where they divide, `tensor`."""
    return _constrained(x, mesh, (TOKEN_AXIS, HEAD_AXIS))


def product_inputs(x: Float[jax.Array, "B T D"], mesh: Mesh | None) -> Float[jax.Array, "B T D"]:
    """Inputs of products whose outputs `tensor` splits: tokens over `context` only."""
    return _constrained(x, mesh, (TOKEN_AXIS,))


def whole_rows(x: Float[jax.Array, "B T D"], mesh: Mesh | None) -> Float[jax.Array, "B T D"]:
    """Hidden states of whole rows on each device."""
    return _constrained(x, mesh, ())


def _constrained(x: jax.Array, mesh: Mesh | None, axes: tuple[str, ...]) -> jax.Array:
    """Unchanged on a mesh that splits no tokens, and where its axes do not divide the rows."""
    if mesh is None or x.shape[0] % row_shards(mesh) or all(mesh.shape[axis] == 1 for axis in (TOKEN_AXIS, HEAD_AXIS)):
        return x
    while axes and x.shape[1] % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(row_axes(mesh), axes)))
