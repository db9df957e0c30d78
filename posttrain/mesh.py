"""Device meshes, the table of parameter dimensions and their shardings, and constraints on rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Float

from posttrain.config import MESH_AXES, ROW_AXES, MeshSection
from posttrain.errors import ConfigError

RULES: Mapping[str, str | None] = {
    "layers": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "head_dim": None,
    "expert": "expert",
    "router": None,
    "latent": None,
    "rank": None,
    "score": None,
}
"""Parameter dimension name -> mesh axis."""

TILES = "_tiles"
"""Name suffix of a dimension that counts tiles of another: sharded like it if the axis divides the number of tiles."""

VOCAB = "vocab"
"""Dimension that an axis need not divide: it is then stored whole, and the loss pads it to split its logits."""

HEAD_AXIS = "tensor"
"""Mesh axis that splits attention heads."""

TOKEN_AXIS = "context"
"""Mesh axis that splits the tokens of a row."""

BATCH_SPEC = PartitionSpec(ROW_AXES)
"""Batch rows are sharded over `ROW_AXES`. Their tokens are not; the model splits its activations."""


def make_mesh(section: MeshSection, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Create the mesh of a configuration. Raises ConfigError if the sizes do not multiply to the number of devices."""
    devices = jax.devices() if devices is None else devices
    grid = np.asarray(devices).reshape(mesh_sizes(section, len(devices)))
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def mesh_sizes(section: MeshSection, num_devices: int) -> tuple[int, ...]:
    """Sizes of `MESH_AXES` for `num_devices`. Raises ConfigError if they do not multiply to it."""
    wanted = section.sizes
    fixed = math.prod(size for size in wanted if size != -1)
    sizes = tuple(num_devices // fixed if size == -1 else size for size in wanted)
    if math.prod(sizes) != num_devices:
        named = ", ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, wanted, strict=True))
        rule = f": the product of the others, {fixed}, must divide" if -1 in wanted else " must multiply to"
        raise ConfigError(f"mesh: {named}{rule} the number of devices, {num_devices}")
    return sizes


def single_device_mesh() -> Mesh:
    return make_mesh(MeshSection(data=1, fsdp=1, tensor=1), jax.devices()[:1])


def row_axes(mesh: Mesh | AbstractMesh | None) -> tuple[str, ...]:
    """Axes of the mesh that shard the rows of a batch."""
    return () if mesh is None else tuple(axis for axis in ROW_AXES if axis in mesh.axis_names)


def row_shards(mesh: Mesh | AbstractMesh | None) -> int:
    """Number of shards of a batch's rows."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in row_axes(mesh))


def head_shards(mesh: Mesh | None) -> int:
    return mesh.shape[HEAD_AXIS] if mesh is not None and HEAD_AXIS in mesh.axis_names else 1


def token_shards(mesh: Mesh | None) -> int:
    return mesh.shape[TOKEN_AXIS] if mesh is not None and TOKEN_AXIS in mesh.axis_names else 1


def param_sharding(mesh: Mesh, name: str, dims: Sequence[str], shape: Sequence[int]) -> NamedSharding:
    """Sharding of a parameter by its dimension names. Raises ConfigError if an axis does not divide its dimension."""
    spec: list[str | None] = []
    for dim, size in zip(dims, shape, strict=True):
        axis = split_axis(dim, size, mesh.shape)
        if axis is not None and size % mesh.shape[axis]:
            raise ConfigError(
                f"mesh.{axis}={mesh.shape[axis]} must divide the dimension {dim!r} ({size}) of {name}; "
                f"use a divisor of {size}"
            )
        spec.append(axis)
    return NamedSharding(mesh, PartitionSpec(*spec))


def split_axis(dim: str, size: int, sizes: Mapping[str, int]) -> str | None:
    """Mesh axis that splits a parameter's dimension, by the sizes of the axes; the caller checks that it divides."""
    axis = RULES[dim.removesuffix(TILES)]
    optional = dim.endswith(TILES) or dim == VOCAB
    return None if axis is None or (optional and size % sizes[axis]) else axis


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


T = TypeVar("T")


# Decode rows: each shard of the data axes (a lane) holds and samples its own.


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
