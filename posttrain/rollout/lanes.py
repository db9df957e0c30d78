"""Sharding of decode rows: each shard of the data axes (lane) holds and samples its own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from posttrain.mesh import BATCH_SPEC

T = TypeVar("T")


def mesh_of(placement: Sharding) -> Mesh | None:
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


def on_each_shard(function: Callable[..., T], mesh: Mesh | None) -> Callable[..., T]:
    """Map a function of row-leading arrays over the data shards, without communication.

    Left to itself the compiler would split a row's vocabulary over `tensor`, and a sampler looks at all of it many
    times: bringing the logits together once is less.
    """
    if mesh is None:
        return function

    def split(*arrays: Any) -> T:
        shard: Callable[..., T] = jax.shard_map(
            function, mesh=mesh, in_specs=BATCH_SPEC, out_specs=BATCH_SPEC, check_vma=False
        )
        return shard(*arrays)

    return split
