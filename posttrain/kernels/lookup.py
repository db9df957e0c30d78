"""Lookup in a token table that is sharded over D, with a gradient that moves slices of tokens, never the table."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from posttrain.mesh import row_axes, row_shards

SLICE_AXIS, COPY_AXIS = "fsdp", "data"
"""Mesh axes that split D of the table, and that hold copies of all of it."""


def lookup(
    table: Float[Array, "V D"], tokens: Int[Array, "B T"], dtype: DTypeLike, mesh: Mesh | None
) -> Float[Array, "B T D"]:
    """table[tokens] in `dtype`."""
    if mesh is None or mesh.size == 1 or tokens.shape[0] % row_shards(mesh):
        return jnp.take(table, tokens, axis=0).astype(dtype)
    return _lookup(table, tokens, jnp.dtype(dtype), mesh)


# Shardings change step by step, by one all-to-all between rows and slices of D; in one step XLA gathers all rows on
# every device. Without the sharding of rows it would split D in the whole model.


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table: Array, tokens: Array, dtype: DTypeLike, mesh: Mesh) -> Array:
    x = jnp.take(table, _placed(mesh, tokens, COPY_AXIS), axis=0).astype(dtype)
    x = _placed(mesh, _placed(mesh, x, COPY_AXIS, None, SLICE_AXIS), (COPY_AXIS, SLICE_AXIS))
    return _placed(mesh, x, row_axes(mesh))


def _forward(table: Array, tokens: Array, dtype: DTypeLike, mesh: Mesh) -> tuple[Array, tuple[Array, Array]]:
    return _lookup(table, tokens, dtype, mesh), (jnp.zeros_like(table, jnp.float32), tokens)


def _backward(
    dtype: DTypeLike, mesh: Mesh, saved: tuple[Array, Array], gradient: Float[Array, "B T D"]
) -> tuple[Array, None]:
    """Scatter-add in float32, of slices that travel in `dtype`. Either all copies of the table get all rows, or each
    adds its own and the tables are summed, whichever sends less."""
    zeros, tokens = saved
    rows = _placed(mesh, _placed(mesh, gradient, row_axes(mesh)), (COPY_AXIS, SLICE_AXIS))
    slices, ids = _placed(mesh, rows, COPY_AXIS, None, SLICE_AXIS), _placed(mesh, tokens, COPY_AXIS)
    if tokens.size <= 2 * zeros.shape[0]:
        slices, ids = _placed(mesh, slices, None, None, SLICE_AXIS), _placed(mesh, ids)
    table = zeros.at[ids].add(slices.astype(jnp.float32), mode="drop")
    return _placed(mesh, table, "tensor", SLICE_AXIS), None


def _placed(mesh: Mesh, x: Array, *spec: str | tuple[str, ...] | None) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


_lookup.defvjp(_forward, _backward)
