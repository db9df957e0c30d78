"""Weights prepared for decoding (`Decoder.for_decoding`), computed once per weight version."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from posttrain.mesh import RULES, param_sharding
from posttrain.models.decoder import Decoder
from posttrain.rollout.lanes import mesh_of
from posttrain.rollout.placement import Placement
from posttrain.weights.state import ModelWeights, Weights, WeightShapes


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


class Readied(NamedTuple):
    """The arguments of a program: the model's own arrays that serve as they lie, and those made of the others."""

    weights: Weights | WeightShapes
    made: Sequence[Array | jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class _Recipe:
    """`Decoder.for_decoding` of all weights of one layout, each where the sampler's placement has it."""

    compiled: jax.stages.Compiled
    made: Sequence[jax.ShapeDtypeStruct]
    """Shapes of the derived arrays."""
    tree: Any
    names: Sequence[str | None]
    """Parameter path of each leaf of the tree; None for a derived array."""

    @classmethod
    def of(cls, loaded: Loaded) -> _Recipe:
        source, placement = loaded.source, loaded.placement  # not `loaded`, whose arrays would live as long
        mesh = placement.mesh
        lying = {path: array.sharding for path, array in loaded.arrays.items()}
        trained = mesh_of(next(iter(lying.values())))
        found: list[tuple[Any, list[str | None], list[NamedSharding | None]]] = []

        def make(weights: Weights) -> list[Array]:
            model = _prepared(source.bind(weights), placement)
            leaves, tree = jax.tree.flatten(nnx.split(model))
            variables = {id(v.get_value()): (path, v.get_metadata()["dims"], v.shape) for path, v in _variables(model)}
            dims = {key: of for key, (_, of, _) in variables.items()}
            places = {} if mesh is None else {key: param_sharding(mesh, *of) for key, of in variables.items()}
            own = {id(w): p for p, w in weights.items() if _lies(lying[p], places.get(id(w)), w.ndim)}
            names = [own.get(id(leaf)) for leaf in leaves]
            made = [leaf for leaf, name in zip(leaves, names, strict=True) if name is None]
            wanted = [places.get(id(leaf)) for leaf in made]
            found.append((tree, names, wanted))
            if mesh == trained:
                return made
            return [_moved(leaf, place, dims.get(id(leaf), ())) for leaf, place in zip(made, wanted, strict=True)]

        jax.eval_shape(make, loaded.arrays)
        tree, names, places = found[0]
        lowered = (jax.jit(make) if mesh is None else jax.jit(make, out_shardings=places)).lower(loaded.arrays)
        compiled = lowered.compile()
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for x, sharding in zip(lowered.out_info, compiled.output_shardings, strict=True)
        ]
        return cls(compiled, shapes, tree, names)

    def readied(self, loaded: Loaded) -> Readied:
        return Readied(self._own(loaded), self.compiled(loaded.arrays))

    def shapes(self, loaded: Loaded) -> Readied:
        """Shapes of the arguments, for weights that may be shapes."""
        return Readied(self._own(loaded), self.made)

    def _own(self, loaded: Loaded) -> Weights | WeightShapes:
        arrays: Any = loaded.arrays
        return {name: arrays[name] for name in self.names if name is not None}

    def model(self, readied: Readied) -> Decoder:
        made = iter(readied.made)
        leaves = [next(made) if name is None else readied.weights[name] for name in self.names]
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
        "data" if RULES.get(dim) == "fsdp" and size % shards == 0 else axis
        for dim, size, axis in zip(dims, array.shape, place.spec, strict=True)
    ]
    return jax.lax.with_sharding_constraint(array, NamedSharding(place.mesh, PartitionSpec(*spec)))


def _lies(now: Sharding, wanted: NamedSharding | None, ndim: int) -> bool:
    """Return True for an array that is where it shall be, in the same mesh: a program takes arrays of one."""
    if wanted is None:
        return True
    return isinstance(now, NamedSharding) and now.mesh == wanted.mesh and now.is_equivalent_to(wanted, ndim)


class DecodingWeights:
    """Cache of the derived decoding weights until `forget`: on CPU a copy of each layer; all that the trainer's layout
    has elsewhere than the sampler's placement."""

    def __init__(self) -> None:
        self._recipes: dict[int, _Recipe] = {}
        self._held: tuple[Loaded, Readied] | None = None
        self.own_bytes = 0
        """Bytes on a device of the latest arrays that were made."""

    def of(self, loaded: Loaded) -> Readied:
        held = self._held
        if held is None or held[0] is not loaded:
            self._held = None  # makes room for the new
            self._held = held = loaded, self._recipe(loaded).readied(loaded)
            self.own_bytes = sum(
                array.addressable_shards[0].data.nbytes for array in held[1].made if isinstance(array, Array)
            )
        return held[1]

    def shapes(self, loaded: Loaded) -> Readied:
        """Shapes of the arguments, for weights that may be shapes."""
        return self._recipe(loaded).shapes(loaded)

    def model_of(self, loaded: Loaded) -> Callable[[Readied], Decoder]:
        """Gives a model as `Decoder.for_decoding` does, of arrays or of tracers for them."""
        return self._recipe(loaded).model

    def arrays(self) -> list[Array]:
        """Arrays that were made and are held."""
        held = self._held  # the thread of the driver may drop it meanwhile
        made = () if held is None else held[1].made
        return [array for array in made if isinstance(array, Array)]

    def forget(self) -> None:
        self._held = None

    def _recipe(self, loaded: Loaded) -> _Recipe:
        if loaded.layout not in self._recipes:
            self._recipes[loaded.layout] = _Recipe.of(loaded)
        return self._recipes[loaded.layout]
