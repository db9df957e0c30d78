"""Weights prepared for decoding (`Decoder.for_decoding`), computed once per weight version."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array
from jax.sharding import Sharding

from posttrain.models.decoder import Decoder
from posttrain.weights.state import ModelWeights, Weights, WeightShapes


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Weights in use: references to a model's arrays, never copies."""

    source: ModelWeights
    arrays: Weights | WeightShapes
    """Shapes to lower programs only (`Programs.lower`)."""
    version: int
    layout: int
    """Number of the layout (structure, shapes, dtypes, devices) that compiled programs depend on."""

    @classmethod
    def of(cls, source: ModelWeights, arrays: Weights | WeightShapes, version: int) -> Loaded:
        layout = frozenset((path, w.shape, w.dtype, _devices(w)) for path, w in arrays.items())
        return cls(source=source, arrays=arrays, version=version, layout=_number(nnx.graphdef(source.model), layout))

    @property
    def placement(self) -> Sharding:
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
    """The arguments of a program: a model's own arrays, and those that `Decoder.for_decoding` makes of them."""

    weights: Weights | WeightShapes
    made: Sequence[Array | jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class _Recipe:
    """`Decoder.for_decoding` of all weights of one layout."""

    compiled: jax.stages.Compiled
    made: Sequence[jax.ShapeDtypeStruct]
    """Shapes of the derived arrays."""
    tree: Any
    names: Sequence[str | None]
    """Parameter path of each leaf of the tree; None for a derived array."""

    @classmethod
    def of(cls, loaded: Loaded) -> _Recipe:
        source, found = loaded.source, []  # not `loaded`, whose arrays would live as long as the recipe

        def make(weights: Weights) -> list[Array]:
            leaves, tree = jax.tree.flatten(nnx.split(source.bind(weights).for_decoding()))
            own = {id(array): name for name, array in weights.items()}
            names = [own.get(id(leaf)) for leaf in leaves]
            found.append((tree, names))
            return [leaf for leaf, name in zip(leaves, names, strict=True) if name is None]

        lowered = jax.jit(make).lower(loaded.arrays)
        compiled = lowered.compile()
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement)
            for x, placement in zip(lowered.out_info, compiled.output_shardings, strict=True)
        ]
        return cls(compiled, shapes, *found[0])

    def model(self, readied: Readied) -> Decoder:
        made = iter(readied.made)
        leaves = [next(made) if name is None else readied.weights[name] for name in self.names]
        return nnx.merge(*jax.tree.unflatten(self.tree, leaves))


class DecodingWeights:
    """Cache of the derived decoding weights until `forget`; on CPU a copy of each layer."""

    def __init__(self) -> None:
        self._recipes: dict[int, _Recipe] = {}
        self._held: tuple[Loaded, Readied] | None = None

    def of(self, loaded: Loaded) -> Readied:
        held = self._held
        if held is None or held[0] is not loaded:
            self._held = None  # makes room for the new
            made = self._recipe(loaded).compiled(loaded.arrays)
            self._held = held = loaded, Readied(loaded.arrays, made)
        return held[1]

    def shapes(self, loaded: Loaded) -> Readied:
        """Shapes of the arguments, for weights that may be shapes."""
        return Readied(loaded.arrays, self._recipe(loaded).made)

    def model_of(self, loaded: Loaded) -> Callable[[Readied], Decoder]:
        """Gives a model as `Decoder.for_decoding` does, of arrays or of tracers for them."""
        return self._recipe(loaded).model

    def forget(self) -> None:
        self._held = None

    def _recipe(self, loaded: Loaded) -> _Recipe:
        if loaded.layout not in self._recipes:
            self._recipes[loaded.layout] = _Recipe.of(loaded)
        return self._recipes[loaded.layout]
