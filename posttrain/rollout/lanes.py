"""Sharding of decode rows: each shard of the data axes (lane) holds and samples its own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Float

from posttrain.config import ROW_AXES
from posttrain.mesh import BATCH_SPEC

T = TypeVar("T")


def mesh_of_arrays(placement: Sharding) -> Mesh | None:
    """Return the mesh of arrays on several devices, else None."""
    if not isinstance(placement, NamedSharding) or placement.mesh.size == 1:
        return None
    assert isinstance(placement.mesh, Mesh)
    return placement.mesh


def devices_of(placement: Sharding) -> Mesh | None:
    """Return the mesh of arrays, that of one device too; None for arrays without a mesh."""
    if not isinstance(placement, NamedSharding):
        return None
    assert isinstance(placement.mesh, Mesh)
    return placement.mesh


def by_rows(tree: T, mesh: Mesh | None, *, dim: int = 0) -> T:
    """Constrain dimension `dim` of each array to be split over the data axes."""
    if mesh is None:
        return tree
    free = [PartitionSpec.UNCONSTRAINED] * dim
    placement = NamedSharding(mesh, PartitionSpec(*free, *BATCH_SPEC))
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, placement), tree)


def by_rows_and_vocab(logits: Float[Array, "R V"], mesh: Mesh | None) -> Float[Array, "R V"]:
    """Constrain logits to be split over the data axes and, as the head that makes them is, over `tensor`: else the
    compiler may bring the head together for a function of whole rows."""
    if mesh is None or logits.shape[1] % mesh.shape["tensor"]:
        return logits
    return jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, PartitionSpec(ROW_AXES, "tensor")))


def on_each_shard(function: Callable[..., T], mesh: Mesh | None) -> Callable[..., T]:
    """Map a function of row-leading arrays, logits first, over all devices where these divide the rows, else over the
    data shards.

    Left to itself the compiler would split a row's vocabulary over `tensor`, and a sampler looks at all of it many
    times: exchanging parts of rows for whole rows once is less.
    """
    if mesh is None:
        return function

    def split(first: Array, *rest: Any) -> T:
        rows = first.shape[0]
        spec = PartitionSpec((*ROW_AXES, "tensor")) if rows % mesh.size == 0 else BATCH_SPEC
        shard: Callable[..., T] = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        # Else the compiler would split the rows like this wherever they come from, in all layers.
        return by_rows(shard(first, *by_rows(rest, mesh)), mesh)

    return split
