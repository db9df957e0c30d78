"""A model as plain data: its parameters by dotted path, and its structure to bind them to inside `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import jax
from flax import nnx
from jax import Array

from posttrain.models.adapter import LoRAParam
from posttrain.models.decoder import Decoder
from posttrain.models.quant import QuantizedParam

Weights = dict[str, Array]

ADAPTER = ".adapters."
"""Stands in the path of every parameter of an adapter."""

SAVED = "saved"
"""Mark, in a parameter's metadata, of what is trained in full beside an adapter."""


class ModelWeights:
    """Reads and writes a model's parameters without walking it again.

    The model owns its arrays; programs get them as arguments and `bind` them. After a program that donates them,
    `write` puts the new arrays back, so that everybody who holds the model sees the new weights.
    """

    def __init__(self, model: Decoder):
        self.model = model
        self._graph, state = nnx.split(model)
        self._paths = {_dotted(path): path for path in dict(nnx.to_flat_state(state))}
        self._variables = {_dotted(p): v for p, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
        assert self._paths.keys() == self._variables.keys()

    def read(self, keep: Callable[[str], bool] = lambda path: True) -> Weights:
        return {path: v[...] for path, v in self._variables.items() if keep(path)}

    def write(self, weights: Mapping[str, Array]) -> None:
        for path, value in weights.items():
            self._variables[path].set_value(value)

    def bind(self, weights: Mapping[str, Array]) -> Decoder:
        """A model over these arrays (tracers, too), with the structure of the original."""
        return nnx.merge(self._graph, nnx.from_flat_state((self._paths[p], w) for p, w in weights.items()))

    def trainable(self) -> frozenset[str]:
        """Paths of the adapter's parameters and those saved beside it if there is one, else of all that can train."""
        adapter = frozenset(path for path, v in self._variables.items() if isinstance(v, LoRAParam))
        plain = frozenset(path for path, v in self._variables.items() if not isinstance(v, QuantizedParam))
        return adapter | self.saved() if adapter else plain

    def saved(self) -> frozenset[str]:
        """Paths of the base's own parameters that are trained in full beside an adapter."""
        return frozenset(path for path, v in self._variables.items() if v.get_metadata().get(SAVED, False))

    def save_whole(self, paths: Collection[str]) -> None:
        """Train these of the base's parameters in full beside the adapter, and no others."""
        for path, variable in self._variables.items():
            variable.set_metadata(SAVED, path in paths)

    def dims(self) -> dict[str, tuple[str, ...]]:
        """The names of each parameter's dimensions."""
        return {path: v.get_metadata()["dims"] for path, v in self._variables.items()}

    def shapes(self) -> list[tuple[str, tuple[str, ...], tuple[int, ...]]]:
        """Path, names of dimensions and shape of every parameter, which need not hold an array yet."""
        return [(path, v.get_metadata()["dims"], v.shape) for path, v in self._variables.items()]


def _dotted(path: tuple[object, ...]) -> str:
    return ".".join(map(str, path))


def without_adapter(weights: Weights) -> Weights:
    """The same arrays with the adapter at 0: the base in the same program, without a copy of it.

    What is saved in full beside an adapter stays as it was trained.
    """
    zero = (".lora_b", ".lora_magnitude")
    return {p: jax.numpy.zeros_like(w) if p.endswith(zero) else w for p, w in weights.items()}
