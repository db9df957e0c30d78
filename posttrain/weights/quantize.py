"""Weight quantization on loading and for samplers, with its error; lazily merged weights."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, Sharding
from jaxtyping import Float

from posttrain.config import Quantize, RolloutQuantize
from posttrain.kernels.platform import has_fp8, platform_of
from posttrain.mesh import param_sharding
from posttrain.models.decoder import Decoder
from posttrain.models.layers import Adaptable
from posttrain.models.quant import Quantized, dequantized, quantized, quantized_shape, squared_error
from posttrain.models.vision.tower import Tower, TowerMatrix
from posttrain.runtime import processes
from posttrain.tracking.console import console
from posttrain.weights.lora import Site, merge_lora, sites
from posttrain.weights.pieces import ParameterReader, Sources, write
from posttrain.weights.state import ADAPTER, ModelWeights, Weights, WeightShapes

LOGGER = logging.getLogger("posttrain.weights")
CODES, SCALES = ".codes", ".scales"

Errors = dict[str, Float[Array, " 2"]]
"""`squared_error` by parameter path."""


def quantizable(model: Decoder) -> dict[str, Site]:
    """Quantizable matrices of the layers by parameter; not routers, embeddings, head, norms and biases."""
    return {site.param: site for site in sites(model).values() if site.layers is not None and not site.routes}


def quantize_model(model: Decoder, kind: Quantize) -> Errors:
    """Quantize the layers' matrices in place, layer by layer, after merging their adapters."""
    errors = {}
    for path, site in quantizable(model).items():
        graph, state = nnx.split(site.owner)
        codes, scales, squares = _quantized_layers(graph, site.name, kind, state)
        dims, dtype = site.matrix.get_metadata("dims"), site.matrix.dtype
        setattr(site.owner, site.name, Quantized(codes, scales, dims, kind=kind, dtype=dtype))
        site.owner.adapters.pop(site.name, None)
        errors[path] = squares.sum(axis=0)
    return errors


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _quantized_layers(graph: Any, name: str, kind: Quantize, state: Any) -> tuple[Array, Array, Float[Array, "L 2"]]:
    def one(layer: Any) -> tuple[Array, Array, Array]:
        return _with_error(nnx.merge(graph, layer).merged(name), kind)

    return jax.lax.map(one, state)


def _with_error(matrix: Array, kind: Quantize) -> tuple[Array, Array, Float[Array, " 2"]]:
    codes, scales = quantized(matrix, kind)
    return codes, scales, squared_error(matrix, dequantized(codes, scales, kind, matrix.dtype))


def quantized_outline(outline: Decoder, kind: Quantize) -> Decoder:
    """Quantized shapes of an abstract model. Raises ConfigError for matrices that do not divide into tiles."""
    changed = nnx.merge(*nnx.split(outline))
    for site in quantizable(changed).values():
        setattr(site.owner, site.name, quantized_shape(site.matrix, kind))
    return changed


def read_quantized(
    reader: ParameterReader, path: str, outline: Quantized, sharding: NamedSharding | None, sources: Sources
) -> tuple[Weights, Float[Array, " 2"]]:
    """Read and quantize a parameter layer by layer; return codes, scales and `squared_error`."""
    parts = {path + CODES: outline.codes, path + SCALES: outline.scales}
    placed = {p: _sharding(sharding, p, part.get_metadata("dims"), part.shape) for p, part in parts.items()}
    arrays = {p: jnp.zeros(part.shape, part.dtype, device=placed[p]) for p, part in parts.items()}
    squares = []
    for layer in range(outline.shape[0]):
        layer_sources = {(0, *index[1:]): source for index, source in sources.items() if index[0] == layer}
        matrix = reader.read((1, *outline.shape[1:]), outline.dtype, sharding, layer_sources)
        *pieces, square = _quantized_piece(outline.kind, tuple(placed.values()), matrix)
        squares.append(square)
        # Reading may be at most one layer ahead of the devices.
        jax.block_until_ready(squares[-2:-1])
        start = np.asarray([layer] + [0] * len(outline.shape[1:]), np.int32)
        arrays = {
            p: write(array, piece, start, placed[p]) for (p, array), piece in zip(arrays.items(), pieces, strict=True)
        }
    return arrays, sum(squares[1:], squares[0])


def _sharding(
    like: NamedSharding | None, path: str, dims: tuple[str, ...], shape: tuple[int, ...]
) -> NamedSharding | None:
    if like is None:
        return None
    assert isinstance(like.mesh, Mesh)
    return param_sharding(like.mesh, path, dims, shape)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _quantized_piece(
    kind: Quantize, shardings: tuple[NamedSharding | None, ...], matrix: Array
) -> tuple[Array, Array, Float[Array, " 2"]]:
    codes, scales, squares = _with_error(matrix, kind)
    return _placed(codes, shardings[0]), _placed(scales, shardings[1]), squares


def _placed(array: Array, sharding: Sharding | None) -> Array:
    return array if sharding is None else jax.lax.with_sharding_constraint(array, sharding)


def copy_summary(kind: RolloutQuantize, model: Decoder, own: Weights) -> str:
    """Log line about a sampler's copy whose own arrays are `own`."""
    compute = model.compute
    size, plain = (sum(w.nbytes for w in of) / 2**20 for of in (own.values(), ModelWeights(model).read().values()))
    line = f"rollout: samples from a copy of {size:,.1f} MiB besides the model's {plain:,.1f} MiB"
    if kind == "none":
        return line
    line += f", its matrices stored in {kind} and dequantized per layer for products in {compute.dtype}"
    if kind == "fp8" and not has_fp8(compute.mesh):
        line += f"; {platform_of(compute.mesh)} has no native fp8 and emulates it: int8 is as small and more accurate"
    return line


class _CopyProgram(NamedTuple):
    outline: ModelWeights
    kept: frozenset[str]
    program: jax.stages.Wrapped


@dataclass(frozen=True, kw_only=True)
class CopyShapes:
    """A copy of a model's weights, before it is made."""

    outline: ModelWeights
    shared: WeightShapes
    """Parameters of the model itself."""
    own: WeightShapes
    lowered: jax.stages.Lowered
    """Program that makes its own parameters of all those of the model."""


class Copies:
    """Copies of a model's current weights for a sampler, adapters merged and then quantized, by one program.

    A copy is an abstract model and its arrays. Unchanged parameters are shared with the model. Raises ConfigError for
    "none" with an adapter on a quantized matrix, since merging would need a plain matrix.
    """

    def __init__(self, kind: RolloutQuantize):
        self.kind = kind
        self.own_bytes = 0
        """Bytes of the latest copy not shared with the model, over all devices."""
        self._programs: dict[Hashable, _CopyProgram] = {}

    def __call__(self, model: Decoder) -> tuple[ModelWeights, Weights]:
        source, graph = ModelWeights(model), nnx.graphdef(model)
        if graph not in self._programs:
            self._programs[graph] = self._make(source)
        copy_program, arrays = self._programs[graph], source.read()
        shared, own = {path: arrays[path] for path in copy_program.kept}, copy_program.program(arrays)
        if not self.own_bytes:
            LOGGER.info("%s", copy_summary(self.kind, model, own))
        self.own_bytes = sum(array.nbytes for array in own.values())
        return copy_program.outline, {**shared, **own}

    def shapes(self, model: Decoder, arrays: WeightShapes) -> CopyShapes:
        """Copy of a model of shapes, whose arrays lie as these do."""
        made, mesh = self._make(ModelWeights(model)), model.compute.mesh
        own = {path: x for path, x in made.outline.structs().items() if path not in made.kept}
        if mesh is not None:
            dims = made.outline.dims()
            own = {path: _struct(x, param_sharding(mesh, path, dims[path], x.shape)) for path, x in own.items()}
        shared = {path: arrays[path] for path in made.kept}
        return CopyShapes(outline=made.outline, shared=shared, own=own, lowered=made.program.lower(arrays))

    def _make(self, source: ModelWeights) -> _CopyProgram:
        def copied(arrays: Weights) -> Decoder:
            copy = source.bind(arrays)
            if self.kind != "none":
                quantize_model(copy, self.kind)
            merge_lora(copy)
            return copy

        outline = ModelWeights(nnx.eval_shape(copied, source.structs()))
        old = source.dims().keys()
        changed = {re.sub(re.escape(ADAPTER) + r"(.+)\.\w+", r".\1", path) for path in old if ADAPTER in path}
        new = {path: (dims, shape) for path, dims, shape in outline.shapes()}
        unchanged = frozenset(p for p in new if p in old and p not in changed and not p.endswith((CODES, SCALES)))
        mesh = source.model.compute.mesh

        def program(arrays: Weights) -> Weights:
            changed_arrays = ModelWeights(copied(arrays)).read(lambda path: path not in unchanged)
            if mesh is None:
                return changed_arrays
            return {path: _placed(w, param_sharding(mesh, path, *new[path])) for path, w in changed_arrays.items()}

        return _CopyProgram(outline=outline, kept=unchanged, program=jax.jit(program))


def _struct(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


class Merged:
    """Lazily merged matrix: dequantized, adapter merged, in its dtype, computed per layer on request."""

    def __init__(self, owner: Adaptable, name: str):
        owner = TowerMatrix(owner, name) if isinstance(owner, Tower) else owner
        self._graph, self._state = nnx.split(owner)
        self._name = name
        matrix = owner.matrices()[name]
        self.dtype = np.dtype(matrix.dtype)
        self.nbytes = math.prod(matrix.shape) * self.dtype.itemsize
        self._computed: tuple[tuple[int, ...], Array] | None = None

    def part(self, index: tuple[int, ...]) -> Array:
        """Return a layer, or an expert of it; the latest layer is cached on the device."""
        layer = index[:1]
        if self._computed is None or self._computed[0] != layer:
            self._computed = None
            computed = _merged_layer(self._graph, self._name, self._state, layer[0] if layer else None)
            self._computed = layer, computed
        return self._computed[1] if len(index) < 2 else self._computed[1][index[1]]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _merged_layer(graph: Any, name: str, state: Any, index: int | Array | None) -> Array:
    if index is not None:
        state = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, index, keepdims=False), state)
    return nnx.merge(graph, state).merged(name)


def plain_arrays(model: Decoder) -> dict[str, Array | Merged]:
    """Parameters as if the model had neither adapter nor quantized matrices, computed lazily."""
    plain: dict[str, Array | Merged] = {
        path: array
        for path, array in ModelWeights(model).read().items()
        if ADAPTER not in path and not path.endswith((CODES, SCALES))
    }
    for site in sites(model).values():
        if site.adapter is not None or isinstance(site.matrix, Quantized):
            plain[site.param] = Merged(site.owner, site.name)
    return plain


@dataclass(frozen=True, kw_only=True)
class WeightError:
    """Relative quantization error of one module type."""

    kind: str
    relative: float
    """Root mean square of the differences divided by that of the weights."""


def error_rows(errors: Mapping[str, Array]) -> list[WeightError]:
    """Errors by module type: `attention.q`, `mlp.up`, `mlp.experts.down`, ..., and over all."""
    sums: dict[str, np.ndarray] = {}
    for path, squares in processes.on_host(dict(errors)).items():
        kind = re.sub(r"^stages\.\d+\.blocks\.\d+\.", "", path).removesuffix(".kernel")
        for name in (kind, "all"):
            sums[name] = sums.get(name, np.zeros(2)) + squares
    order = sorted(sums.items(), key=lambda item: (item[0] == "all", item[0]))
    return [WeightError(kind=kind, relative=float(np.sqrt(e / max(w, 1e-30)))) for kind, (e, w) in order]


def print_errors(errors: Mapping[str, Array], kind: Quantize) -> None:
    from rich.table import Table

    table = Table(title=f"base quantized to {kind}", title_justify="left")
    table.add_column("weights")
    table.add_column("relative RMS error", justify="right")
    for row in error_rows(errors):
        table.add_row(row.kind, f"{row.relative:.2%}")
    console().print(table)
