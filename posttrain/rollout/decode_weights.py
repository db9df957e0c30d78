"""Weights for decoding: their placement over devices, where none travels at each token, and their derived form."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from posttrain.config import MESH_AXES, SamplerTensor
from posttrain.errors import ConfigError, placed
from posttrain.kernels.platform import CHIPS, Chip, chip_of, platform_of
from posttrain.mesh import RULES, devices_of, mesh_of_arrays, num_slices, param_sharding, replicated, row_shards
from posttrain.models.config import ModelConfig, StageConfig
from posttrain.models.decoder import Decoder, FusedPart, decoding_config
from posttrain.runtime.xla import Recent
from posttrain.weights.state import ModelWeights, Weights, WeightShapes

LOGGER = logging.getLogger("posttrain.rollout")

PIECE_BYTES = 64 << 20
"""Bytes of a table, over all devices, that move at once."""

TILE_ROWS = 16
"""Rows of a tile of bfloat16 on TPU."""

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
    wanted: SamplerTensor,
    source: ModelWeights,
    arrays: Mapping[str, Array | jax.ShapeDtypeStruct],
    memory: int | None,
    *,
    slots: int,
) -> Placement:
    """The number of devices to split weights over by `best_mesh`, whose part takes at most 1 / `SHARE` of `memory`, the
    bytes of a device (None: unknown, any fits); the trainer's mesh where no weight is split over `fsdp`, and where
    nothing fits. ConfigError for a number that the mesh or the model does not allow.
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
        with placed(f"rollout.tensor={wanted}: "):
            _bytes(source, arrays, mesh)
        return unchanged if mesh == trained else Placement(mesh, copied)
    if wanted == "trained" or _sampling_mesh(trained, trained.shape["tensor"]) == trained:
        return unchanged
    sizes = [size for size in _sizes(trained) if size >= trained.shape["tensor"]]
    meshes = [mesh for size in sizes if (mesh := _sampling_mesh(trained, size)) is not None]
    best = best_mesh(meshes, source, arrays, None if memory is None else memory // SHARE, slots)
    if best is not None:
        count = best.shape["tensor"]
        LOGGER.info("rollout: weights are split over %d devices while samples run, from fsdp", count)
        return Placement(best, copied)
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


def best_mesh(
    meshes: Sequence[Mesh],
    source: ModelWeights,
    arrays: Mapping[str, Array | jax.ShapeDtypeStruct],
    limit: int | None,
    slots: int,
) -> Mesh | None:
    """Mesh with the fastest token of `slots` rows on TPU, elsewhere the first one, of those that divide heads and
    weights, with at most `limit` bytes of weights on a device. None where nothing fits."""
    fitting = []
    for mesh in meshes:
        try:
            needed = _bytes(source, arrays, mesh)
        except ConfigError:  # an axis does not divide its dimension
            continue
        if _divides(source.model.config, mesh.shape["tensor"]) and (limit is None or needed <= limit):
            fitting.append(mesh)
    chip = chip_of(fitting[0].devices.flat[0]) if fitting else None
    if chip is None:
        return next(iter(fitting), None)
    return min(fitting, key=lambda mesh: _token_seconds(source, arrays, mesh, chip, slots))


def _token_seconds(
    source: ModelWeights,
    arrays: Mapping[str, Array | jax.ShapeDtypeStruct],
    mesh: Mesh,
    chip: Chip,
    slots: int,
) -> float:
    """Seconds of a token of all rows, as far as the split matters: weights that a device reads, sums of its rows'
    activations over `tensor`, two in a layer and that of the embedding, and the exchange of logits. Not the cache, of
    which a device reads as much whether rows or heads are split."""
    config, tensor = source.model.config, mesh.shape["tensor"]
    rows = -(-slots // row_shards(mesh))
    read = 0.0
    for path, dims, _ in source.shapes():
        share = 1.0
        if "expert" in dims and config.mixtures:
            mixture = config.mixtures[0]
            share -= (1 - mixture.top_k / mixture.num_experts) ** (rows * mesh.shape["expert"])
        if not path.startswith("embed.") or config.tie_embeddings:
            read += share * _bytes(source, {path: arrays[path]}, mesh)
    seconds = read / chip.memory_bandwidth
    if tensor > 1:
        activations = rows * config.embed_dim * source.model.compute.dtype.itemsize
        logits = rows * config.vocab_size * 4 // tensor
        seconds += (2 * config.num_layers + 1) * chip.sum_seconds(activations, tensor)
        seconds += chip.sum_seconds(logits, tensor) / 2
    return seconds


def _bytes(source: ModelWeights, arrays: Mapping[str, Array | jax.ShapeDtypeStruct], mesh: Mesh) -> int:
    """Bytes of the weights on one device. ConfigError if an axis does not divide its dimension."""
    placed = {path: param_sharding(mesh, path, dims, shape) for path, dims, shape in source.shapes() if path in arrays}
    return sum(math.prod(placed[path].shard_shape(w.shape)) * w.dtype.itemsize for path, w in arrays.items())


LAYER_S = 10e-6
"""Seconds of a layer beside its arithmetic: its kernels are started."""


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """Seconds of a forward pass on a device, by its data sheet and the model's shapes: whoever decides by them decides
    the same in every run, as no measured time would."""

    bandwidth: float
    """Bytes per second."""
    flops: float
    dense_bytes: float
    dense_size: float
    """Parameters that every token is multiplied by."""
    expert_bytes: float
    expert_size: float
    active: float
    """Share of the experts that a token is multiplied by."""
    expert_devices: int
    """Devices that split the experts, whose tokens a device shares."""
    layers: int

    @classmethod
    def of(cls, loaded: Loaded) -> PassCost:
        """Costs of weights that may be shapes, from what one of their devices holds."""
        config, mesh = loaded.source.model.config, loaded.placement.mesh
        device: Any = next(iter(loaded.sharding.device_set))
        chip = chip_of(device) or next(chip for chip in CHIPS.values() if chip.platform == device.platform)
        arrays: Mapping[str, Array | jax.ShapeDtypeStruct] = loaded.arrays
        sums = {False: np.zeros(2), True: np.zeros(2)}
        for path, dims, _ in loaded.source.shapes():
            # Of an embedding that is not the head's matrix a pass reads a few rows.
            if path not in arrays or (path.startswith("embed.") and not config.tie_embeddings):
                continue
            array = arrays[path]
            assert array.sharding is not None, "shapes need shardings"
            size = math.prod(array.sharding.shard_shape(array.shape))
            sums["expert" in dims] += size * array.dtype.itemsize, size
        mixture = config.mixtures[0] if config.mixtures else None
        return cls(
            bandwidth=chip.memory_bandwidth,
            flops=chip.flops,
            dense_bytes=float(sums[False][0]),
            dense_size=float(sums[False][1]),
            expert_bytes=float(sums[True][0]),
            expert_size=float(sums[True][1]),
            active=0.0 if mixture is None else mixture.top_k / mixture.num_experts,
            expert_devices=1 if mesh is None else mesh.shape["expert"],
            layers=config.num_layers,
        )

    def seconds(self, tokens: int) -> float:
        """Seconds of a pass over `tokens` of each device's rows: what it reads or what it computes, and its start."""
        routed = tokens * self.expert_devices
        read = self.dense_bytes + self.expert_bytes * (1 - (1 - self.active) ** routed)
        computed = 2 * (tokens * self.dense_size + routed * self.active * self.expert_size)
        return max(read / self.bandwidth, computed / self.flops) + self.layers * LAYER_S


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

    lowered: jax.stages.Lowered
    """Program that derives arrays from the weights, all of which are its arguments."""
    derived: Sequence[jax.ShapeDtypeStruct]
    """Shapes of the derived arrays."""
    tree: Any
    names: Sequence[str | None]
    """Parameter path of each leaf of the tree; None for a derived array."""

    @classmethod
    def of(cls, loaded: Loaded) -> DecodeLayout:
        lying = {path: array.sharding for path, array in loaded.arrays.items()}
        # Not of `loaded`, nor of its model, whose arrays would live as long.
        derivation = _Derivation(loaded.source.outline(), loaded.placement, lying)
        traced: list[tuple[Any, list[_Leaf]]] = []
        jax.eval_shape(lambda weights: traced.append(derivation.leaves(weights)), loaded.arrays)
        tree, leaves = traced[0]
        derived = [leaf for leaf in leaves if not leaf.serves]
        mesh = devices_of(loaded.sharding)
        alone = loaded.sharding if mesh is None else replicated(mesh)
        places = [alone if leaf.place is None else leaf.place for leaf in derived]
        program = jax.jit(derivation.derive, out_shardings=places, keep_unused=True)
        shapes = [
            jax.ShapeDtypeStruct(leaf.array.shape, leaf.array.dtype, sharding=place)
            for leaf, place in zip(derived, places, strict=True)
        ]
        names = [leaf.parameter if leaf.serves else None for leaf in leaves]
        return cls(program.lower(loaded.arrays), shapes, tree, names)

    @cached_property
    def compiled(self) -> jax.stages.Compiled:
        return self.lowered.compile()

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


class _Leaf(NamedTuple):
    """Array of the model for decoding."""

    path: str
    array: Array
    dims: tuple[str, ...]
    place: NamedSharding | None
    parameter: str | None
    """Path of the parameter that it is; None for one that is computed."""
    serves: bool
    """True if the parameter lies in its place already."""


@dataclass(frozen=True, eq=False)
class _Derivation:
    """Derived arrays of a model's parameters, which lie as `lying` has them.

    Stacks are derived layer by layer and tables are moved in pieces: beside what it reads and what it makes, the
    program has no more in memory than it needs for a layer or a few pieces.
    """

    source: ModelWeights
    placement: Placement
    lying: Mapping[str, Any]

    def derive(self, weights: Weights) -> list[Array]:
        derived = [leaf for leaf in self.leaves(weights)[1] if not leaf.serves]
        made: dict[str, Array] = {}
        for number, stage in enumerate(self._stages):
            prefix = f"stages.{number}."
            # What has one number for each layer may be the layer's own, which a single layer does not know.
            mine = [leaf for leaf in derived if leaf.path.startswith(prefix) and leaf.dims != ("layers",)]
            if stage.repeats > 1 and mine:
                made |= self._by_layer(weights, prefix, stage.repeats, mine)
        return [made[leaf.path] if leaf.path in made else self._in_pieces(leaf) for leaf in derived]

    def leaves(self, weights: Weights) -> tuple[Any, list[_Leaf]]:
        """Tree of the model for decoding, and its leaves in order."""
        mesh = self.placement.mesh
        model = _prepared(self.source.bind(weights), self.placement)
        arrays, tree = jax.tree.flatten(nnx.split(model))
        variables = {id(variable.get_value()): (path, variable) for path, variable in _variables(model)}
        parameters = {id(array): path for path, array in weights.items()}

        def leaf(array: Array) -> _Leaf:
            path, variable = variables[id(array)]
            dims, parameter = variable.get_metadata()["dims"], parameters.get(id(array))
            place = None if mesh is None else param_sharding(mesh, path, dims, array.shape)
            serves = parameter is not None and _lies(self.lying[parameter], place, array.ndim)
            return _Leaf(path, array, dims, place, parameter, serves)

        return tree, list(map(leaf, arrays))

    @property
    def _stages(self) -> Sequence[StageConfig]:
        """Stages whose layers stay together."""
        config = self.source.model.config
        mesh = self.source.model.compute.mesh if self.placement.mesh is None else self.placement.mesh
        return config.stages if decoding_config(config, mesh) is config else ()

    def _by_layer(self, weights: Weights, prefix: str, repeats: int, wanted: Sequence[_Leaf]) -> dict[str, Array]:
        """Derived arrays of a stage. Each layer is cut out where it lies: else the compiler would move the stack."""

        def layer(index: Array) -> list[Array]:
            cut = {
                path: _constrained(jax.lax.dynamic_slice_in_dim(array, index, 1), self.lying[path])
                if path.startswith(prefix)
                else array
                for path, array in weights.items()
            }
            found = {leaf.path: leaf for leaf in self.leaves(cut)[1]}
            return [self._moved(found[leaf.path]) for leaf in wanted]

        made = jax.lax.map(layer, jnp.arange(repeats))
        return {leaf.path: array.reshape(leaf.array.shape) for leaf, array in zip(wanted, made, strict=True)}

    def _in_pieces(self, leaf: _Leaf) -> Array:
        """A parameter in its place, moved by rows of every device's shard; what is computed and what is small at
        once."""
        lying, place, array = self.lying.get(leaf.parameter or ""), leaf.place, leaf.array
        if place is None or not isinstance(lying, NamedSharding) or array.size * array.dtype.itemsize <= PIECE_BYTES:
            return self._moved(leaf)
        axis = next(number for number, dim in enumerate(leaf.dims) if dim != "layers")
        # A part has as many rows as the smaller of the shards before and after.
        rows = math.gcd(*(sharding.shard_shape(array.shape)[axis] for sharding in (lying, place)))
        each = -(-rows * PIECE_BYTES // (array.size * array.dtype.itemsize))
        each = min(rows, -(-each // TILE_ROWS) * TILE_ROWS)
        split = (*array.shape[:axis], -1, rows, *array.shape[axis + 1 :])
        whole = (*array.shape[:axis], -1, *array.shape[axis + 1 :])
        view = array.reshape(split)

        def move(number: Array, moved: Array) -> Array:
            piece = jax.lax.dynamic_slice_in_dim(view, number * each, each, axis + 1)
            piece = self._moved(leaf._replace(array=_constrained(piece.reshape(whole), lying)))
            piece = piece.reshape(*split[: axis + 1], each, *split[axis + 2 :])
            return jax.lax.dynamic_update_slice_in_dim(moved, piece, number * each, axis + 1)

        spec = [*place.spec, *[None] * (array.ndim - len(place.spec))]
        empty = _constrained(
            jnp.zeros(view.shape, array.dtype),
            NamedSharding(place.mesh, PartitionSpec(*spec[: axis + 1], None, *spec[axis + 1 :])),
        )
        # The last piece begins where it ends with the rows, and so overlaps the one before.
        moved: Array = jax.lax.fori_loop(0, -(-rows // each), move, empty)
        return moved.reshape(array.shape)

    def _moved(self, leaf: _Leaf) -> Array:
        """The array in its place, by way of a split over `data` of what `fsdp` split: an exchange along `tensor` and
        one gather, where the compiler would bring the whole array together first."""
        array, place = leaf.array, leaf.place
        if place is None:
            return array
        if "tensor" in place.spec and place.mesh.shape["tensor"] > 1 and place.mesh != self._trained:
            shards = place.mesh.shape["data"]
            spec = [
                "data" if "fsdp" in RULES.get(dim, ()) and size % shards == 0 else axis
                for dim, size, axis in zip(leaf.dims, array.shape, place.spec, strict=True)
            ]
            array = _constrained(array, NamedSharding(place.mesh, PartitionSpec(*spec)))
        return _constrained(array, place)

    @property
    def _trained(self) -> Mesh | None:
        return mesh_of_arrays(next(iter(self.lying.values())))


def _constrained(array: Array, sharding: Any) -> Array:
    return array if mesh_of_arrays(sharding) is None else jax.lax.with_sharding_constraint(array, sharding)


def _variables(model: Decoder) -> Iterator[tuple[str, nnx.Variable[Array]]]:
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable):
            yield ".".join(map(str, path)), variable


def _lies(now: Sharding, wanted: NamedSharding | None, ndim: int) -> bool:
    """Return True for an array that is where it shall be, in the same mesh: a program takes arrays of one."""
    if wanted is None:
        return True
    return isinstance(now, NamedSharding) and now.mesh == wanted.mesh and now.is_equivalent_to(wanted, ndim)


_LAYOUTS = Recent[DecodeLayout](1)


class DecodeWeightsCache:
    """Cache of the derived decoding weights until `forget`: on CPU a copy of each layer; all that the trainer's layout
    has elsewhere than the sampler's placement."""

    def __init__(self) -> None:
        self._layouts: dict[int, DecodeLayout] = {}
        self._latest: dict[int, tuple[Loaded, DecodeWeights]] = {}
        """The latest weights of each layout: of one model, or of a draft model too."""
        self.own_bytes = 0
        """Bytes on a device of the latest arrays that were derived."""

    def of(self, loaded: Loaded) -> DecodeWeights:
        latest = self._latest.get(loaded.layout)
        if latest is None or latest[0] is not loaded:
            latest = None
            self._latest.pop(loaded.layout, None)  # makes room for the new
            weights = self.layout_of(loaded).weights(loaded)
            self._latest[loaded.layout] = loaded, weights
            self.own_bytes = sum(array.addressable_shards[0].data.nbytes for array in self.arrays())
            return weights
        return latest[1]

    def shapes(self, loaded: Loaded) -> DecodeWeights:
        """Shapes of the arguments, for weights that may be shapes."""
        return self.layout_of(loaded).shapes(loaded)

    def model_of(self, loaded: Loaded) -> Callable[[DecodeWeights], Decoder]:
        """Gives a model as `Decoder.for_decoding` does, of arrays or of tracers for them."""
        return self.layout_of(loaded).model

    def arrays(self) -> list[Array]:
        """Derived arrays of the latest weights."""
        latest = list(self._latest.values())  # the thread of the driver may drop them meanwhile
        return [array for _, weights in latest for array in weights.derived if isinstance(array, Array)]

    def forget(self) -> None:
        self._latest = {}

    def layout_of(self, loaded: Loaded) -> DecodeLayout:
        """Layout of weights that may be shapes."""
        if loaded.layout not in self._layouts:
            self._layouts[loaded.layout] = _LAYOUTS.of(loaded.layout, lambda: DecodeLayout.of(loaded))
        return self._layouts[loaded.layout]
