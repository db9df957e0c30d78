"""Sharding of the residual stream: rows over the row axes, their tokens over `context` and `tensor` (sequence
parallelism, arXiv:2205.05198): sums over `tensor` become a reduce-scatter, inputs of products an all-gather.
"""

from __future__ import annotations

import math
from functools import partial

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from posttrain.kernels.platform import HEAD_AXIS, TOKEN_AXIS, row_axes, row_shards

Axes = tuple[str, ...]
SPLIT: Axes = (TOKEN_AXIS, HEAD_AXIS)
GATHERED: Axes = (TOKEN_AXIS,)
"""Inputs of products whose outputs `tensor` splits, and gradients of what such products add up to."""


def split_tokens(x: Float[jax.Array, "B T D"], mesh: Mesh | None) -> Float[jax.Array, "B T D"]:
    """Outputs of a layer in the residual stream: tokens over `context` and, where they divide, `tensor`."""
    return _laid_out(x, mesh, SPLIT, GATHERED)


def product_inputs(x: Float[jax.Array, "B T D"], mesh: Mesh | None) -> Float[jax.Array, "B T D"]:
    """Inputs of a layer: tokens over `context` only."""
    return _laid_out(x, mesh, GATHERED, SPLIT)


def whole_rows(x: Float[jax.Array, "B T D"], mesh: Mesh | None) -> Float[jax.Array, "B T D"]:
    """Hidden states of whole rows on each device."""
    return _laid_out(x, mesh, (), SPLIT)


def _laid_out(x: jax.Array, mesh: Mesh | None, forward: Axes, backward: Axes) -> jax.Array:
    """Unchanged on a mesh that splits no tokens, and where its axes do not divide the rows."""
    if mesh is None or x.shape[0] % row_shards(mesh) or all(mesh.shape[axis] == 1 for axis in SPLIT):
        return x
    return _with_gradient(x, mesh, forward, backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _with_gradient(x: jax.Array, mesh: Mesh, forward: Axes, backward: Axes) -> jax.Array:
    """Layouts of values and gradients differ: one that is given by the other's would move weights or hidden widths."""
    return _constrained(x, mesh, forward)


def _forward(x: jax.Array, mesh: Mesh, forward: Axes, backward: Axes) -> tuple[jax.Array, None]:
    return _constrained(x, mesh, forward), None


def _backward(mesh: Mesh, forward: Axes, backward: Axes, saved: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (_constrained(gradient, mesh, backward),)


_with_gradient.defvjp(_forward, _backward)


def _constrained(x: jax.Array, mesh: Mesh, axes: Axes) -> jax.Array:
    while axes and x.shape[1] % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(row_axes(mesh), axes)))
