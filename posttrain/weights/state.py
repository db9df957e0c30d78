"""Model state as plain data: parameters by dotted path, and the structure to bind them to inside `jax.jit`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from flax import nnx
from jax import Array

from posttrain.config import Vision
from posttrain.models.adapter import LoRAParam
from posttrain.models.decoder import Decoder
from posttrain.models.names import TOWER
from posttrain.models.quant import Quantized, QuantizedParam

Weights = dict[str, Array]

WeightShapes = dict[str, jax.ShapeDtypeStruct]
"""Shapes, dtypes and shardings of `Weights`, for programs of devices that need not be there."""

DRAFTER = "drafter."
"""Beginning of the paths of a block drafter's parameters, beside those of its target."""

ADAPTER = ".adapters."
"""Path component of every adapter parameter."""

SAVED = "saved"
"""Metadata key of base parameters that are trained in full beside an adapter (PEFT's `modules_to_save`)."""


class ModelWeights:
    """Access to a model's parameters by path, without traversing it again.

    The model owns its arrays; programs receive them as arguments and `bind` them. After a program that donates them,
    `write` stores the new arrays, so that all holders of the model see the new weights.
    """

    def __init__(self, model: Decoder):
        self.model = model
        self.graph, state = nnx.split(model)
        self._paths = {_dotted(path): path for path in dict(nnx.to_flat_state(state))}
        self._variables = {_dotted(p): v for p, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
        assert self._paths.keys() == self._variables.keys()

    def read(self, keep: Callable[[str], bool] = lambda path: True) -> Weights:
        return {path: v[...] for path, v in self._variables.items() if keep(path)}

    def structs(self) -> WeightShapes:
        """Shape and dtype of every parameter, abstract or not."""
        return {path: jax.ShapeDtypeStruct(v.shape, v.get_value().dtype) for path, v in self._variables.items()}

    def write(self, weights: Mapping[str, Array]) -> None:
        for path, value in weights.items():
            self._variables[path].set_value(value)

    def bind(self, weights: Mapping[str, Array]) -> Decoder:
        """Model with these arrays (or tracers) and the original structure."""
        return nnx.merge(self.graph, nnx.from_flat_state((self._paths[p], w) for p, w in weights.items()))

    def outline(self) -> ModelWeights:
        """The same structure with shapes in place of arrays."""
        shapes = ((self._paths[path], x) for path, x in self.structs().items())
        return ModelWeights(nnx.merge(self.graph, nnx.from_flat_state(shapes)))

    def trainable(self) -> frozenset[str]:
        """Paths of trainable parameters: those of a block drafter if there is one; adapter and `modules_to_save` if
        there is an adapter, else all unquantized ones; of the vision tower those that `VisionConfig.train` names, but
        for buffers."""
        if self.model.drafter is not None:
            return frozenset(path for path in self._variables if path.startswith(DRAFTER))
        adapter = frozenset(path for path, v in self._variables.items() if isinstance(v, LoRAParam))
        plain = frozenset(path for path, v in self._variables.items() if not isinstance(v, QuantizedParam))
        tower = frozenset(path for path in plain if path.startswith(TOWER))
        vision = self.model.config.vision
        trained = frozenset[str]()
        if vision is not None:
            buffers = {f"{TOWER}{key}" for key, tensor in vision.tensors().items() if tensor.buffer}
            trained = frozenset(path for path in tower - buffers if path.startswith(vision.trained))
        return (adapter | self.saved() if adapter else plain - tower) | trained

    @property
    def tower_training(self) -> tuple[Vision, bool]:
        """Reach of the backward pass into the vision tower, as `model.vision`, and whether it is for adapters alone."""
        paths = [path for path in self.trainable() if path.startswith(TOWER)]
        if not paths:
            return "frozen", False
        projector = tuple(f"{TOWER.removesuffix('.')}{part}projector." for part in (".", ADAPTER))
        reach: Vision = "projector" if all(path.startswith(projector) for path in paths) else "tower"
        return reach, all(ADAPTER in path for path in paths)

    def saved(self) -> frozenset[str]:
        """Paths of base parameters that are trained in full beside an adapter."""
        return frozenset(path for path, v in self._variables.items() if v.get_metadata().get(SAVED, False))

    def set_saved(self, paths: Collection[str]) -> None:
        """Train exactly these base parameters in full beside the adapter."""
        for path, variable in self._variables.items():
            variable.set_metadata(SAVED, path in paths)

    def dims(self) -> dict[str, tuple[str, ...]]:
        """Dimension names of each parameter."""
        return {path: v.get_metadata()["dims"] for path, v in self._variables.items()}

    def roles(self) -> dict[str, str]:
        """Role of each trainable parameter. ValueError for one that its layer does not declare."""
        roles: dict[str, Any] = {path: self._variables[path].get_metadata().get("role") for path in self.trainable()}
        if lacking := sorted(path for path, role in roles.items() if role is None):
            raise ValueError(f"{lacking[0]} has no role; its layer declares one beside dims, see models.layers.param")
        return roles

    def shapes(self) -> list[tuple[str, tuple[str, ...], tuple[int, ...]]]:
        """Path, dimension names and shape of every parameter, abstract or not."""
        return [(path, v.get_metadata()["dims"], v.shape) for path, v in self._variables.items()]


def _dotted(path: tuple[object, ...]) -> str:
    return ".".join(map(str, path))


def without_adapter(weights: Weights) -> Weights:
    """Weights with the adapter at 0: the base model in the same program, without a copy.

    Parameters in `modules_to_save` keep their trained values.
    """
    zero = (".lora_b", ".lora_magnitude")
    return {p: jax.numpy.zeros_like(w) if p.endswith(zero) else w for p, w in weights.items()}


def is_quantized(model: Decoder) -> bool:
    return any(isinstance(node, Quantized) for _, node in nnx.iter_graph(model))


def active_parameters(model: Decoder) -> float:
    """Parameters that a token meets: of the experts of an MoE layer as many as it is routed to; no lookup table, and
    nothing of a vision tower, which meets images."""
    total = 0.0
    mixtures = model.config.mixtures
    share = mixtures[0].top_k / mixtures[0].num_experts if mixtures else 1.0
    for path, dims, shape in ModelWeights(model).shapes():
        if path.startswith(TOWER) or (path.startswith("embed.") and not model.config.tie_embeddings):
            continue
        total += math.prod(shape) * (share if "expert" in dims else 1.0)
    return total
