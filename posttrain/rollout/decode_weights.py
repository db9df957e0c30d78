"""Weights for decoding: their placement over devices, where none travels at each token, and their derived form."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from posttrain.config import MESH_AXES, SamplerTensor
from posttrain.errors import ConfigError
from posttrain.kernels.platform import platform_of
from posttrain.mesh import RULES, mesh_of_arrays, num_slices, param_sharding
from posttrain.models.config import ModelConfig
from posttrain.models.decoder import Decoder, FusedPart
from posttrain.weights.state import ModelWeights, Weights, WeightShapes

LOGGER = logging.getLogger("posttrain.rollout")

SHARE = 4
"""Part of a device's memory, one over this, that weights made for sampling may take."""


@dataclass(frozen=True)
class Placement:
    """Devices of a sampler's rows, cache and weights."""

    mesh: Mesh | None
    """None: one device."""
    fuse: tuple[FusedPart, ...]
    """On accelerators `attention`, whose projections each dispatch would lay out anew otherwise, and `mlp` where the
    weights are copied anyway."""


def choose_placement(
    wanted: SamplerTensor, source: ModelWeights, arrays: Mapping[str, Array | jax.ShapeDtypeStruct], memory: int | None
) -> Placement:
    """The smallest number of devices to split weights over whose part takes at most 1 / `SHARE` of `memory`, the bytes
    of a device (None: unknown, any fits); the trainer's mesh where no weight is split over `fsdp`, and where nothing
    fits. ConfigError for a number that the mesh or the model does not allow.
    """
    trained = mesh_of_arrays(next(iter(arrays.values())).sharding)
    on_cpu = platform_of(source.model.compute.mesh if trained is None else trained) == "cpu"

    unchanged = Placement(trained, () if on_cpu else ("attention",))
    if trained is None:
        if wanted not in ("auto", "trained", 1):
            raise ConfigError(f"rollout.tensor={wanted}: the model is on one device; use auto")
        return unchanged
    copied: tuple[FusedPart, ...] = () if on_cpu else ("attention", "mlp")
    if isinstance(wanted, int):
        mesh = _sampling_mesh(trained, wanted)
        if mesh is None:
            raise ConfigError(
                f"rollout.tensor={wanted}: must be one of {_sizes(trained)}, for "
                + ", ".join(f"mesh.{axis}={trained.shape[axis]}" for axis in MESH_AXES[1:])
            )
        if mesh != trained and not _divides(source.model.config, wanted):
            least = min(block.attention.num_kv_heads for block in source.model.config.blocks)
            name = source.model.config.model_type
            raise ConfigError(f"rollout.tensor={wanted} must divide num_kv_heads={least} of {name}")
        try:
            _bytes(source, arrays, mesh)
        except ConfigError as error:
            raise ConfigError(f"rollout.tensor={wanted}: {error}") from error
        return unchanged if mesh == trained else Placement(mesh, copied)
    if wanted == "trained" or _sampling_mesh(trained, trained.shape["tensor"]) == trained:
        return unchanged
    for size in _sizes(trained):
        mesh = _sampling_mesh(trained, size)
        if mesh is None or size < trained.shape["tensor"] or not _divides(source.model.config, size):
            continue
        if _fits(source, arrays, mesh, memory):
            LOGGER.info("rollout: weights are split over %d devices while samples run, from fsdp", size)
            return Placement(mesh, copied)
    LOGGER.warning(
        "rollout: no copy of the weights fits 1/%d of a device's memory, so they are gathered from fsdp at every "
        "token; rollout.tensor makes one all the same",
        SHARE,
    )
    return unchanged


def _sizes(mesh: Mesh) -> list[int]:
    """Numbers of devices of one slice that weights can be split over. Those of `expert` keep their place in the order
    of devices."""
    if mesh.shape["expert"] > 1:
        return [mesh.shape["tensor"]]
    near = mesh.shape["fsdp"] // num_slices(mesh.devices[0].flat)
    devices = near * mesh.shape["context"] * mesh.shape["tensor"]
    return [size for size in range(1, devices + 1) if devices % size == 0]


def _sampling_mesh(mesh: Mesh, tensor: int) -> Mesh | None:
    """The same devices in the same order, none of them along an axis that gathers weights; None where it cannot be.

    With `expert` those of `context` have the same rows.
    """
    if tensor not in _sizes(mesh):
        return None
    expert = mesh.shape["expert"]
    context = mesh.shape["context"] if expert > 1 else 1
    if mesh.shape["fsdp"] == mesh.shape["context"] == 1 and mesh.shape["tensor"] == tensor:
        return mesh
    grid = mesh.devices.reshape(-1, 1, expert, context, tensor)
    axes = MESH_AXES if context == 1 else tuple("copies" if axis == "context" else axis for axis in MESH_AXES)
    return Mesh(grid, axes, axis_types=mesh.axis_types)


def _divides(config: ModelConfig, tensor: int) -> bool:
    return all(block.attention.num_kv_heads % tensor == 0 for block in config.blocks)


def _fits(
    source: ModelWeights, arrays: Mapping[str, Array | jax.ShapeDtypeStruct], mesh: Mesh, memory: int | None
) -> bool:
    try:
        needed = _bytes(source, arrays, mesh)
    except ConfigError:  # an axis does not divide its dimension
        return False
    return memory is None or needed <= memory // SHARE


def _bytes(source: ModelWeights, arrays: Mapping[str, Array | jax.ShapeDtypeStruct], mesh: Mesh) -> int:
    """Bytes of the weights on one device. ConfigError if an axis does not divide its dimension."""
    placed = {path: param_sharding(mesh, path, dims, shape) for path, dims, shape in source.shapes()}
    return sum(math.prod(placed[path].shard_shape(w.shape)) * w.dtype.itemsize for path, w in arrays.items())


def device_memory() -> int | None:
    """Bytes of a local device; None where it does not say, as a CPU."""
    limits: Sequence[int] = [
        stats["bytes_limit"] for device in jax.local_devices() if (stats := device.memory_stats()) is not None
    ]
    return min(limits, default=None)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Weights in use: references to a model's arrays, never copies."""

    source: ModelWeights
    arrays: Weights | WeightShapes
    """Shapes to lower programs only (`Programs.lower`)."""
    version: int
    placement: Placement
    layout: int
    """Number of the layout (structure, shapes, dtypes, devices) that compiled programs depend on."""

    @classmethod
    def of(cls, source: ModelWeights, arrays: Weights | WeightShapes, version: int, placement: Placement) -> Loaded:
        layout = frozenset((path, w.shape, w.dtype, _devices(w)) for path, w in arrays.items())
        number = _number(nnx.graphdef(source.model), layout, placement)
        return cls(source=source, arrays=arrays, version=version, placement=placement, layout=number)

    @property
    def sharding(self) -> Sharding:
        """Sharding of one of the arrays."""
        arrays: Mapping[str, Array | jax.ShapeDtypeStruct] = self.arrays
        array = next(iter(arrays.values()))
        assert array.sharding is not None, "shapes need shardings"
        return array.sharding


def _devices(array: Array | jax.ShapeDtypeStruct) -> Hashable:
    """On one device every sharding is the same, whatever its type."""
    assert array.sharding is not None, "shapes need shardings"
    devices = array.sharding.device_set
    return array.sharding if len(devices) > 1 else frozenset(devices)


_NUMBERS = count()


@cache
def _number(*layout: Hashable) -> int:
    """Equal layouts have one number: a model's structure takes a millisecond to hash."""
    return next(_NUMBERS)


class DecodeWeights(NamedTuple):
    """The arguments of a program: the model's own arrays that serve as they lie, and those derived of the others."""

    own: Weights | WeightShapes
    derived: Sequence[Array | jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class DecodeLayout:
    """`Decoder.for_decoding` of all weights of one layout, each where the sampler's placement has it."""

    compiled: jax.stages.Compiled
    derived: Sequence[jax.ShapeDtypeStruct]
    """Shapes of the derived arrays."""
    tree: Any
    names: Sequence[str | None]
    """Parameter path of each leaf of the tree; None for a derived array."""

    @classmethod
    def of(cls, loaded: Loaded) -> DecodeLayout:
        source, placement = loaded.source, loaded.placement  # not `loaded`, whose arrays would live as long
        mesh = placement.mesh
        lying = {path: array.sharding for path, array in loaded.arrays.items()}
        trained = mesh_of_arrays(next(iter(lying.values())))
        traced: list[tuple[Any, list[str | None], list[NamedSharding | None]]] = []

        def make(weights: Weights) -> list[Array]:
            model = _prepared(source.bind(weights), placement)
            leaves, tree = jax.tree.flatten(nnx.split(model))
            variables = {id(v.get_value()): (path, v.get_metadata()["dims"], v.shape) for path, v in _variables(model)}
            dims = {key: of for key, (_, of, _) in variables.items()}
            places = {} if mesh is None else {key: param_sharding(mesh, *of) for key, of in variables.items()}
            own = {id(w): p for p, w in weights.items() if _lies(lying[p], places.get(id(w)), w.ndim)}
            names = [own.get(id(leaf)) for leaf in leaves]
            derived = [leaf for leaf, name in zip(leaves, names, strict=True) if name is None]
            wanted = [places.get(id(leaf)) for leaf in derived]
            traced.append((tree, names, wanted))
            if mesh == trained:
                return derived
            return [_moved(leaf, place, dims.get(id(leaf), ())) for leaf, place in zip(derived, wanted, strict=True)]

        jax.eval_shape(make, loaded.arrays)
        tree, names, places = traced[0]
        lowered = (jax.jit(make) if mesh is None else jax.jit(make, out_shardings=places)).lower(loaded.arrays)
        compiled = lowered.compile()
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for x, sharding in zip(lowered.out_info, compiled.output_shardings, strict=True)
        ]
        return cls(compiled, shapes, tree, names)

    def weights(self, loaded: Loaded) -> DecodeWeights:
        return DecodeWeights(self._own(loaded), self.compiled(loaded.arrays))

    def shapes(self, loaded: Loaded) -> DecodeWeights:
        """Shapes of the arguments, for weights that may be shapes."""
        return DecodeWeights(self._own(loaded), self.derived)

    def _own(self, loaded: Loaded) -> Weights | WeightShapes:
        arrays: Any = loaded.arrays
        return {name: arrays[name] for name in self.names if name is not None}

    def model(self, weights: DecodeWeights) -> Decoder:
        derived = iter(weights.derived)
        leaves = [next(derived) if name is None else weights.own[name] for name in self.names]
        return nnx.merge(*jax.tree.unflatten(self.tree, leaves))


def _prepared(model: Decoder, placement: Placement) -> Decoder:
    if placement.mesh is not None and model.compute.mesh is not None:
        model.compute = replace(model.compute, mesh=placement.mesh)
    return model.for_decoding(fuse=placement.fuse)


def _variables(model: Decoder) -> Iterator[tuple[str, nnx.Variable[Array]]]:
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable):
            yield ".".join(map(str, path)), variable


def _moved(array: Array, place: NamedSharding | None, dims: tuple[str, ...]) -> Array:
    """The array in its place, by way of a split over `data` of what `fsdp` split: an exchange along `tensor` and one
    gather, where the compiler would bring the whole array together first."""
    if place is None or "tensor" not in place.spec or place.mesh.shape["tensor"] == 1:
        return array
    shards = place.mesh.shape["data"]
    spec = [
        "data" if "fsdp" in RULES.get(dim, ()) and size % shards == 0 else axis
        for dim, size, axis in zip(dims, array.shape, place.spec, strict=True)
    ]
    return jax.lax.with_sharding_constraint(array, NamedSharding(place.mesh, PartitionSpec(*spec)))


def _lies(now: Sharding, wanted: NamedSharding | None, ndim: int) -> bool:
    """Return True for an array that is where it shall be, in the same mesh: a program takes arrays of one."""
    if wanted is None:
        return True
    return isinstance(now, NamedSharding) and now.mesh == wanted.mesh and now.is_equivalent_to(wanted, ndim)


class DecodeWeightsCache:
    """Cache of the derived decoding weights until `forget`: on CPU a copy of each layer; all that the trainer's layout
    has elsewhere than the sampler's placement."""

    def __init__(self) -> None:
        self._layouts: dict[int, DecodeLayout] = {}
        self._latest: tuple[Loaded, DecodeWeights] | None = None
        self.own_bytes = 0
        """Bytes on a device of the latest arrays that were derived."""

    def of(self, loaded: Loaded) -> DecodeWeights:
        latest = self._latest
        if latest is None or latest[0] is not loaded:
            self._latest = None  # makes room for the new
            self._latest = latest = loaded, self._layout(loaded).weights(loaded)
            self.own_bytes = sum(
                array.addressable_shards[0].data.nbytes for array in latest[1].derived if isinstance(array, Array)
            )
        return latest[1]

    def shapes(self, loaded: Loaded) -> DecodeWeights:
        """Shapes of the arguments, for weights that may be shapes."""
        return self._layout(loaded).shapes(loaded)

    def model_of(self, loaded: Loaded) -> Callable[[DecodeWeights], Decoder]:
        """Gives a model as `Decoder.for_decoding` does, of arrays or of tracers for them."""
        return self._layout(loaded).model

    def arrays(self) -> list[Array]:
        """Derived arrays of the latest weights."""
        latest = self._latest  # the thread of the driver may drop it meanwhile
        derived = () if latest is None else latest[1].derived
        return [array for array in derived if isinstance(array, Array)]

    def forget(self) -> None:
        self._latest = None

    def _layout(self, loaded: Loaded) -> DecodeLayout:
        if loaded.layout not in self._layouts:
            self._layouts[loaded.layout] = DecodeLayout.of(loaded)
        return self._layouts[loaded.layout]
