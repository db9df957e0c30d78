"""Device meshes in the order of the torus, the table of parameter dimensions and their shardings, and constraints on
rows."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Float

from posttrain.config import MESH_AXES, ROW_AXES, MeshSection
from posttrain.errors import ConfigError

LOGGER = logging.getLogger("posttrain.mesh")

RULES: Mapping[str, tuple[str, ...]] = {
    "layers": (),
    "embed": ("fsdp", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "head_dim": (),
    "expert": ("expert",),
    "router": (),
    "latent": (),
    "rank": (),
    "score": (),
    "tower": ("fsdp", "context"),
}
"""Parameter dimension name -> mesh axes. The first one must divide the dimension; a further one is taken if it does."""

TILES = "_tiles"
"""Name suffix of a dimension that counts tiles of another: sharded like it if the axis divides the number of tiles."""

VOCAB = "vocab"
"""Dimension that an axis need not divide: it is then stored whole, and the loss pads it to split its logits."""

OPTIONAL = (VOCAB, "tower")
"""Dimensions that are stored whole where the axis does not divide them."""

HEAD_AXIS = "tensor"
"""Mesh axis that splits attention heads."""

TOKEN_AXIS = "context"
"""Mesh axis that splits the tokens of a row, and weights beside `fsdp`."""

BATCH_SPEC = PartitionSpec(ROW_AXES)
"""Batch rows are sharded over `ROW_AXES`. Their tokens are not; the model splits its activations."""

Sizes = tuple[int, ...]

RING_2D = 16
"""Chips of a dimension of v5e and v6e whose ends are linked."""
CUBE = 4
"""Chips of each dimension of a v4 or v5p cube; slices of whole cubes have links between the ends of all dimensions."""


def make_mesh(section: MeshSection, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Create the mesh of a configuration. Raises ConfigError if the sizes do not multiply to the number of devices, or
    the slices are not those of the devices."""
    devices = jax.devices() if devices is None else devices
    sizes, outer = mesh_sizes(section, len(devices)), MESH_AXES.index(section.slice_axis)
    inner = tuple(size // section.slices if axis == outer else size for axis, size in enumerate(sizes))
    grids = [arranged(group, inner) for group in by_slice(devices, section.slices)]
    return Mesh(np.concatenate(grids, axis=outer), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def mesh_sizes(section: MeshSection, num_devices: int) -> tuple[int, ...]:
    """Sizes of `MESH_AXES` for `num_devices`. Raises ConfigError if they do not multiply to it."""
    wanted = section.sizes
    fixed = math.prod(size for size in wanted if size != -1)
    sizes = tuple(num_devices // fixed if size == -1 else size for size in wanted)
    if math.prod(sizes) != num_devices:
        named = ", ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, wanted, strict=True))
        rule = f": the product of the others, {fixed}, must divide" if -1 in wanted else " must multiply to"
        across = f" (mesh.slices={section.slices} included)" if section.slices > 1 else ""
        raise ConfigError(f"mesh: {named}{across}{rule} the number of devices, {num_devices}")
    if (size := sizes[MESH_AXES.index(section.slice_axis)]) % section.slices:
        raise ConfigError(f"mesh.slices={section.slices} must divide {section.slice_axis}, here {size} devices")
    return sizes


def num_slices(devices: Iterable[Any]) -> int:
    """Number of TPU slices that devices are of; 1 for other devices."""
    return len({_slice_of(device) for device in devices})


def by_slice(devices: Sequence[Any], wanted: int) -> list[list[Any]]:
    """Devices of each slice. ConfigError if these are not as many as `wanted`, or have not as many devices each."""
    found: dict[int, list[Any]] = {}
    for number, device in enumerate(devices):
        part = number * wanted // len(devices)
        found.setdefault(_slice_of(device) if device.platform == "tpu" else part, []).append(device)
    counts = [len(group) for group in found.values()]
    if len(counts) != wanted or min(counts) < max(counts):
        parts = " and ".join(map(str, counts))
        remedy = f"set mesh.slices={len(counts)}" if min(counts) == max(counts) else "take as many of each"
        raise ConfigError(f"mesh.slices={wanted}: the TPU devices are of {len(counts)} slices, {parts}; {remedy}")
    return list(found.values())


def _slice_of(device: Any) -> int:
    # Devices that only a compiler has are without it where there is one slice; that of a GPU is something else.
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def torus_note(mesh: Mesh) -> str | None:
    """Note on how near devices are on the torus of a TPU slice; None on other machines, and for one device."""
    if mesh.size == 1 or mesh.devices.flat[0].platform != "tpu":
        return None
    slices = num_slices(mesh.devices.flat)
    outer = 0 if num_slices(mesh.devices[0].flat) == 1 else 1
    inner = mesh.devices.take(range(mesh.devices.shape[outer] // slices), outer)
    hops = ring_hops(inner)
    if hops is None:
        return "the devices are no box of the torus and keep their order"
    far = ", ".join(f"{axis} {n:.3g}" for axis, n, size in zip(MESH_AXES, hops, inner.shape, strict=True) if size > 1)
    across = f"; {MESH_AXES[outer]} continues over {slices} slices" if slices > 1 else ""
    return f"links between neighbours on a ring: {far or 'none'}{across}"


# Devices of a slice stand in a mesh so that neighbours on each axis are neighbours on the torus, or nearly.


class Box(NamedTuple):
    """Devices of a whole box of a torus."""

    dims: Sizes
    """Devices of each dimension; the last one counts those of one chip."""
    linked: tuple[bool, ...]
    """Dimensions whose ends are linked."""
    places: tuple[Sizes, ...]
    """Coordinates of each device, from 0."""

    @classmethod
    def of(cls, devices: Sequence[Any]) -> Box | None:
        """None for other devices than TPUs, and for those that are no whole box."""
        if any(device.platform != "tpu" for device in devices):
            return None
        found = np.asarray([(*device.coords, device.core_on_chip) for device in devices])
        places = found - found.min(axis=0)
        dims = tuple((places.max(axis=0) + 1).tolist())
        if math.prod(dims) != len(devices) or len({*map(tuple, places.tolist())}) < len(devices):
            return None
        flat = "lite" in devices[0].device_kind
        cubes = all(size % CUBE == 0 for size in dims[:3])
        linked = tuple(size >= RING_2D if flat else cubes for size in dims[:3])
        return cls(dims, (*linked, False), tuple(map(tuple, places.tolist())))

    def hops(self, one: Sequence[int], other: Sequence[int]) -> int:
        """Links between two places."""
        return _hops(one, other, self.dims, self.linked)


class Part(NamedTuple):
    """Share of a mesh axis in each dimension of a box."""

    factors: Sizes
    strides: Sizes
    """Places between two neighbours in each dimension."""


def arranged(devices: Sequence[Any], sizes: Sizes) -> np.ndarray:
    """Devices in the shape of a mesh, its inner axes nearest to each other; as they come if they are no box of TPUs."""
    grid = np.asarray(devices, dtype=object)
    box = Box.of(devices)
    if box is None:
        if len(devices) > 1 and devices[0].platform == "tpu":
            LOGGER.warning("mesh: the %d devices are no box of the torus and keep their order", len(devices))
        return grid.reshape(sizes)
    at = dict(zip(box.places, devices, strict=True))
    rings = [_ring(part, box.dims, box.linked) for part in _split(sizes, box.dims, box.linked)]
    ordered = [at[tuple(map(sum, zip(*steps, strict=True)))] for steps in itertools.product(*rings)]
    for index, device in enumerate(ordered):
        grid[index] = device
    return grid.reshape(sizes)


def ring_hops(grid: np.ndarray) -> list[float] | None:
    """Mean number of links between neighbours on a ring of each mesh axis; None if the devices are no box of TPUs."""
    box = Box.of(grid.ravel().tolist())
    if box is None:
        return None
    place = np.asarray(box.places).reshape(*grid.shape, -1)
    means = []
    for axis in range(grid.ndim):
        one, other = (x.reshape(-1, x.shape[-1]).tolist() for x in (place, np.roll(place, -1, axis)))
        means.append(sum(map(box.hops, one, other)) / len(one))
    return means


def _split(sizes: Sizes, dims: Sizes, linked: tuple[bool, ...]) -> list[Part]:
    """Parts of the axes with the fewest links of a ring step, an axis counting four times as much as the one
    outside of it."""

    def cost(parts: list[Part]) -> tuple[float, int]:
        weighted = sum(4.0**n * _mean(_ring(p, dims, linked), dims, linked) for n, p in enumerate(parts))
        return weighted, sum(factor > 1 for part in parts for factor in part.factors)

    return min(_splits(sizes, dims, (1,) * len(dims)), key=cost)


def _splits(sizes: Sizes, dims: Sizes, strides: Sizes) -> Iterator[list[Part]]:
    """All ways to give the factors of the dimensions to the axes, inner axes nearest."""
    if not sizes:
        yield []
        return
    left = [size // stride for size, stride in zip(dims, strides, strict=True)]
    for factors in itertools.product(*([n for n in range(1, size + 1) if size % n == 0] for size in left)):
        if math.prod(factors) == sizes[-1]:
            further = tuple(factor * stride for factor, stride in zip(factors, strides, strict=True))
            for outer in _splits(sizes[:-1], dims, further):
                yield [*outer, Part(factors, strides)]


@cache
def _ring(part: Part, dims: Sizes, linked: tuple[bool, ...]) -> tuple[Sizes, ...]:
    """Places of an axis, from that of its first device, in the order with the fewest links."""
    wide = [dim for dim, factor in enumerate(part.factors) if factor > 1]
    orders: list[tuple[Sizes, ...]] = []
    for order in itertools.permutations(wide):
        for steps in _tours(tuple(part.factors[dim] for dim in order)):
            places = []
            for step in steps:
                at = dict(zip(order, step, strict=True))
                places.append(tuple(at.get(dim, 0) * stride for dim, stride in enumerate(part.strides)))
            orders.append(tuple(places))
    return min(orders, key=lambda places: _mean(places, dims, linked))


def _tours(shape: Sizes) -> Iterator[list[Sizes]]:
    """Visits of all places of a grid: where one exists, a cycle whose halves are boxes, and back and forth."""
    columns, rows = (shape[0], _path(shape[1:])) if len(shape) > 1 else (0, [])
    if rows and len(rows) % 2 == 0:
        there = [range(1, columns) if n % 2 == 0 else range(columns - 1, 0, -1) for n in range(len(rows))]
        forth = [(column, *row) for row, turn in zip(rows, there, strict=True) for column in turn]
        back = [(0, *row) for row in reversed(rows)]
        half = len(rows) // 2
        yield [*back[half:], *forth, *back[:half]]
    yield _path(shape)


def _path(shape: Sizes) -> list[Sizes]:
    """Places of a grid, each beside the one before."""
    places: list[Sizes] = [()]
    for size in reversed(shape):
        turns = (places if n % 2 == 0 else places[::-1] for n in range(size))
        places = [(n, *place) for n, turn in enumerate(turns) for place in turn]
    return places


def _mean(places: Sequence[Sizes], dims: Sizes, linked: tuple[bool, ...]) -> float:
    """Mean links of a ring step."""
    after = (*places[1:], places[0])
    return sum(_hops(one, other, dims, linked) for one, other in zip(places, after, strict=True)) / len(places)


def _hops(one: Sequence[int], other: Sequence[int], dims: Sizes, linked: Sequence[bool]) -> int:
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return sum(min(n, size - n) if ends else n for n, size, ends in zip(apart, dims, linked, strict=True))


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
    return NamedSharding(mesh, param_spec(mesh, name, dims, shape))


def param_spec(mesh: Mesh | AbstractMesh, name: str, dims: Sequence[str], shape: Sequence[int]) -> PartitionSpec:
    """Mesh axes of each dimension of a parameter, as `param_sharding`."""
    spec: list[str | tuple[str, ...] | None] = []
    for dim, size in zip(dims, shape, strict=True):
        axes = split_axes(dim, size, mesh.shape)
        if axes and size % mesh.shape[axes[0]]:
            raise ConfigError(
                f"mesh.{axes[0]}={mesh.shape[axes[0]]} must divide the dimension {dim!r} ({size}) of {name}; "
                f"use a divisor of {size}"
            )
        spec.append(axes if len(axes) > 1 else next(iter(axes), None))
    return PartitionSpec(*spec)


def split_axes(dim: str, size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes that split a parameter's dimension, by their sizes; the caller checks that the first one divides it."""
    axes = RULES[dim.removesuffix(TILES)]
    optional = dim.endswith(TILES) or dim in OPTIONAL
    if not axes or (optional and size % sizes[axes[0]]):
        return ()
    taken = axes[:1]
    for axis in axes[1:]:
        if sizes.get(axis, 1) > 1 and size % math.prod(sizes[one] for one in (*taken, axis)) == 0:
            taken = (*taken, axis)
    return taken


# Inside `jax.shard_map`, where each device has its part of an array.


def whole_array(part: Array, spec: PartitionSpec, mesh: Mesh) -> Array:
    """Gather an array of which each device has its part."""
    for dim, axes in _split_dims(spec, mesh):
        part = jax.lax.all_gather(part, axes, axis=dim, tiled=True)
    return part


def part_of_sum(x: Array, spec: PartitionSpec, mesh: Mesh) -> Array:
    """Sum the arrays of all devices; each keeps its part."""
    split = _split_dims(spec, mesh)
    for dim, axes in split:
        x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    taken = {axis for _, axes in split for axis in axes}
    rest = tuple(axis for axis in mesh.axis_names if axis not in taken and mesh.shape[axis] > 1)
    return jax.lax.psum(x, rest) if rest else x


def _split_dims(spec: PartitionSpec, mesh: Mesh) -> list[tuple[int, tuple[str, ...]]]:
    """Dimensions that several devices split, with their axes."""
    named = [(dim, (axes,) if isinstance(axes, str) else tuple(axes or ())) for dim, axes in enumerate(spec)]
    many = [(dim, tuple(axis for axis in axes if mesh.shape[axis] > 1)) for dim, axes in named]
    return [(dim, axes) for dim, axes in many if axes]


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


def by_heads(weight: Array, mesh: Mesh | None, *, dim: int) -> Array:
    """Constrain dimension `dim` of a weight to be split over `tensor`, where that divides it, and the others to be
    whole."""
    if mesh is None or weight.shape[dim] % mesh.shape["tensor"]:
        return weight
    return jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, PartitionSpec(*[None] * dim, "tensor")))


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
