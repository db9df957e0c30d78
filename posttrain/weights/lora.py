"""LoRA adapters on a decoder: target matching, initialization, merging, parameter counts."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, Sharding

from posttrain.config import LoRA
from posttrain.errors import ConfigError
from posttrain.mesh import param_sharding
from posttrain.models import hf
from posttrain.models.adapter import Adapter
from posttrain.models.decoder import Decoder, first_layers
from posttrain.models.layers import Adaptable, Embedding, Linear
from posttrain.models.names import TOWER, CheckpointTensor, tensors
from posttrain.models.quant import Quantized, plain_shapes
from posttrain.weights.state import ADAPTER, DRAFTER, ModelWeights

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class Site:
    """Matrix that an adapter can be attached to."""

    owner: Adaptable
    name: str
    """Name of the matrix in its owner."""
    param: str
    """Parameter path of the matrix."""
    layers: range | None
    """Layers stacked in the matrix; None: outside the layers."""
    modules: tuple[frozenset[str], ...]
    """Module names in the checkpoint, one set per stacked layer."""

    @property
    def matrix(self) -> Any:
        return self.owner.matrices()[self.name]

    @property
    def adapter(self) -> Adapter | None:
        adapter = self.owner.adapters.get(self.name)
        return adapter if isinstance(adapter, Adapter) else None

    @property
    def adapter_path(self) -> str:
        """Path of the adapter's parameters."""
        return f"{self.param.removesuffix(f'.{self.name}')}{ADAPTER}{self.name}"

    @property
    def drops(self) -> bool:
        """Return True if adapter dropout applies here."""
        return isinstance(self.owner, Linear) and self.layers is not None

    @property
    def routes(self) -> bool:
        """Return True for a router matrix: adapters on it come only from PEFT files."""
        return "router" in self.matrix.get_metadata("dims")


@dataclass(frozen=True, kw_only=True)
class AdapterPlan:
    """Rank and scale of one site's adapter per stacked layer; scale 0: no adapter on the layer."""

    ranks: tuple[int, ...]
    scales: tuple[float, ...]


def base_tensors(model: Decoder) -> list[CheckpointTensor]:
    """Checkpoint tensors of the model's parameters, without adapters."""
    shapes = [shape for shape in plain_shapes(ModelWeights(model).shapes()) if not _beside(shape[0])]
    return tensors(model.config, hf.family(model.config.model_type).NAMES, shapes)


def as_matrix(tensor: CheckpointTensor) -> CheckpointTensor:
    """The tensor as an adapter sees it: a tower's parameters are stored as in the checkpoint, [out, in]."""
    if not tensor.parts[0].param.startswith(TOWER) or len(tensor.shape) != 2:
        return tensor
    columns = slice(0, tensor.shape[0])
    return replace(tensor, transpose=True, parts=tuple(replace(part, columns=columns) for part in tensor.parts))


def _beside(path: str) -> bool:
    """Return True for a parameter of an adapter or of a drafter."""
    return ADAPTER in path or path.startswith(DRAFTER)


def module_of(tensor: CheckpointTensor) -> str:
    """Checkpoint module that owns a tensor."""
    return tensor.name.removesuffix(".weight").removesuffix(".bias")


def sites(model: Decoder) -> dict[str, Site]:
    """Adapter sites by path, such as `stages.0.blocks.0.attention.q`, `stages.0.blocks.0.mlp.experts.up`, `embed`,
    `head`."""
    modules = _modules(model)
    by_path = {}
    for where, node in nnx.iter_graph(model):
        if not isinstance(node, Adaptable):
            continue
        path, matrices = ".".join(map(str, where)), node.matrices()
        for name in matrices:
            param = f"{path}.{name}"
            by_path[param if len(matrices) > 1 else path] = Site(
                owner=node, name=name, param=param, layers=_layers(model, path), modules=modules[param]
            )
    return dict(sorted(by_path.items()))


def _modules(model: Decoder) -> dict[str, tuple[frozenset[str], ...]]:
    """Checkpoint module names of each parameter, per stacked layer."""
    by_layer: dict[str, dict[int, set[str]]] = {}
    for tensor in base_tensors(model):
        for part in tensor.parts:
            layer_names = by_layer.setdefault(part.param, {})
            layer_names.setdefault(part.index[0] if part.index else 0, set()).add(module_of(tensor))
    return {param: tuple(frozenset(names[i]) for i in sorted(names)) for param, names in by_layer.items()}


def _layers(model: Decoder, path: str) -> range | None:
    match = re.match(r"stages\.(\d+)\.blocks\.(\d+)\.", path)
    if match is None:
        return None
    stage, block = int(match[1]), int(match[2])
    first, period = first_layers(model.config)[stage].layer, len(model.config.stages[stage].blocks)
    return range(first + block, first + model.config.stages[stage].num_layers, period)


def _matches(pattern: str, path: str, modules: Iterable[str]) -> bool:
    """Return True for a pattern that is found in a path, or ends a module's name.

    The vision tower has modules of the same names as the language model: its paths must match from their beginning, or
    the whole name.
    """
    if path.startswith(TOWER):
        return pattern in modules or re.match(pattern, path) is not None
    named = any(module == pattern or module.endswith(f".{pattern}") for module in modules)
    return named or re.search(pattern, path) is not None


def attach_lora(model: Decoder, lora: LoRA, *, seed: int, mesh: Mesh | None = None) -> None:
    """Attach adapters with zero effect to the matrices matched by the targets; mark `modules_to_save` as trained.

    Each device draws only its shard. Raises ConfigError for patterns that match nothing or a matrix without adapter
    support, and for a model that already has an adapter.
    """
    if has_lora(model):
        raise ConfigError("lora: the model already has an adapter; merge it first")
    all_sites = sites(model)
    plans = _plans(lora, all_sites, model.config.num_layers)
    saved = _saved(lora, model, {all_sites[path].param for path in plans})
    attach_adapters(model, plans, dora=lora.dora, dropout=lora.dropout, rslora=lora.rslora, seed=seed, mesh=mesh)
    ModelWeights(model).set_saved(saved)


def planned_scales(model: Decoder, lora: LoRA) -> dict[str, tuple[float, ...]]:
    """Scales per layer of every matrix that would get an adapter, by parameter path."""
    all_sites = sites(model)
    return {
        all_sites[path].param: plan.scales for path, plan in _plans(lora, all_sites, model.config.num_layers).items()
    }


def _plans(lora: LoRA, all_sites: Mapping[str, Site], num_layers: int) -> dict[str, AdapterPlan]:
    if unknown := [layer for layer in lora.layers or () if layer >= num_layers]:
        raise ConfigError(f"lora.layers: {unknown[0]} is not a layer of the model; use 0 to {num_layers - 1}")
    all_sites = {path: site for path, site in all_sites.items() if not site.routes}
    chosen = {path for target in lora.targets for path in _named(target, all_sites)}
    if lora.dropout and (path := next((path for path in sorted(chosen) if not all_sites[path].drops), None)):
        raise ConfigError(
            f"lora.dropout={lora.dropout} does not apply to {path}; remove it from targets, or set dropout to 0"
        )
    used, plans = set[str](), dict[str, AdapterPlan]()
    reached, adapted = set[str](), set[int]()
    for path in sorted(chosen):
        site, ranks, scales = all_sites[path], [], []
        for index, modules in enumerate(site.modules):
            here = site.layers is None or lora.layers is None or site.layers[index] in lora.layers
            targets = [target for target in lora.targets if here and targeted(target, path, site, modules)]
            if not targets:
                ranks.append(0)
                scales.append(0.0)
                continue
            reached |= {*targets}
            adapted |= set() if site.layers is None else {site.layers[index]}
            rank_key = next((key for key in lora.rank_pattern if _matches(key, path, modules)), None)
            alpha_key = next((key for key in lora.alpha_pattern if _matches(key, path, modules)), None)
            used |= {key for key in (rank_key, alpha_key) if key is not None}
            rank = lora.rank if rank_key is None else lora.rank_pattern[rank_key]
            alpha = lora.alpha if alpha_key is None else lora.alpha_pattern[alpha_key]
            ranks.append(rank)
            scales.append(2.0 if alpha is None else alpha / (math.sqrt(rank) if lora.rslora else rank))
        if any(scales):
            plans[path] = AdapterPlan(ranks=tuple(ranks), scales=tuple(scales))
    if lora.layers is not None and (idle := [target for target in lora.targets if target not in reached]):
        raise ConfigError(f"lora.layers={list(lora.layers)}: {idle[0]!r} of targets matches no matrix of these layers")
    if idle_layers := [layer for layer in lora.layers or () if layer not in adapted]:
        raise ConfigError(f"lora.layers: layer {idle_layers[0]} has no matrix that targets match; remove it")
    for name, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        if idle := [pattern for pattern in patterns if pattern not in used]:
            raise ConfigError(f"lora.{name}: {idle[0]!r} matches no adapter; available: {_site_names(plans)}")
    return plans


def targeted(target: str, path: str, site: Site, modules: Iterable[str]) -> bool:
    """Return True for a target that names a layer of the site."""
    return site.layers is not None if target == ALL_LINEAR else _matches(target, path, modules)


def _named(target: str, all_sites: Mapping[str, Site]) -> list[str]:
    """Sites matched by a target. Raises ConfigError if there is none."""
    _check_pattern("targets", target)
    matched = [
        p for p, site in all_sites.items() if any(targeted(target, p, site, modules) for modules in site.modules)
    ]
    if not matched:
        raise ConfigError(
            f"lora.targets: {target!r} matches no matrix that supports adapters; available: {_site_names(all_sites)}"
        )
    return matched


def _site_names(paths: Iterable[str]) -> str:
    short = {path if path.startswith(TOWER) else path.split("blocks.")[-1].split(".", 1)[-1] for path in paths}
    return ", ".join(sorted(short))


def _check_pattern(field: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"lora.{field}: {pattern!r} is not a valid regular expression: {error}") from error


def _saved(lora: LoRA, model: Decoder, adapted: Collection[str]) -> set[str]:
    """Parameters of the `modules_to_save`."""
    modules, declared = _modules(model), ModelWeights(model).parameters()
    constant = {path for path, parameter in declared.items() if parameter.role in ("buffer", "correction")}
    quantized = {site.param for site in sites(model).values() if isinstance(site.matrix, Quantized)}
    saved: set[str] = set()
    for pattern in lora.modules_to_save:
        _check_pattern("modules_to_save", pattern)
        matched = {p for p, names in modules.items() if any(_matches(pattern, p.rsplit(".", 1)[0], n) for n in names)}
        if not matched:
            kinds = _site_names(path.rsplit(".", 1)[0] for path in modules)
            raise ConfigError(f"lora.modules_to_save: {pattern!r} matches no module; available: {kinds}")
        if bare := sorted(p for p in matched if p.startswith(TOWER) and not p.endswith((".weight", ".bias"))):
            raise ConfigError(
                f"lora.modules_to_save: {pattern!r} matches {bare[0]}, which is no module but a parameter of one; set "
                "model.vision to projector or tower, which trains it too"
            )
        if not matched - constant:
            raise ConfigError(
                f"lora.modules_to_save: {pattern!r} matches {min(matched)} alone, which no gradient trains; remove it"
            )
        if both := sorted(matched & set(adapted)):
            raise ConfigError(f"lora.modules_to_save: {pattern!r} matches {both[0]}, which has an adapter; choose one")
        if fixed := sorted(matched & quantized):
            raise ConfigError(
                f"lora.modules_to_save: {pattern!r} matches {fixed[0]}, which model.quantize freezes; "
                "give it an adapter"
            )
        saved |= matched - constant
    return saved


def attach_adapters(
    model: Decoder,
    plans: Mapping[str, AdapterPlan],
    *,
    dora: bool,
    dropout: float,
    rslora: bool,
    seed: int,
    mesh: Mesh | None,
) -> None:
    """Attach an adapter at each planned site. ConfigError for one of a matrix that is trained in full."""
    vision = model.config.vision
    if vision is not None and (both := [path for path in sorted(plans) if path.startswith(vision.trained)]):
        raise ConfigError(
            f"lora.targets: {both[0]} has an adapter, and model.vision={vision.train} trains it in full; set "
            "model.vision to frozen, or leave it out of the targets"
        )
    all_sites, dtype = sites(model), model.embed.embedding.dtype
    dims = {path: _dims(all_sites[path].matrix.get_metadata("dims"), dora=dora) for path in plans}

    def draw(seed: Array) -> dict[str, dict[str, Array]]:
        # Fold in a constant, because `init_model` draws the base from the same seed.
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), max(1, len(plans)))
        drawn = _draw_arrays({p: (key, all_sites[p], plans[p]) for key, p in zip(keys, sorted(plans), strict=False)})
        initial = {p: _init_arrays(drawn[p], all_sites[p], plans[p], dtype) for p in plans}
        return {path: {name: arrays[name] for name in dims[path]} for path, arrays in initial.items()}

    shardings = None if mesh is None else _shardings(mesh, dims, jax.eval_shape(draw, jnp.uint32(0)))
    for path, arrays in jax.jit(draw, out_shardings=shardings)(jnp.uint32(seed)).items():
        site = all_sites[path]
        rate = dropout if site.drops else 0.0
        site.owner.adapters[site.name] = Adapter(arrays, dims[path], dropout=rate, rslora=rslora)


def _dims(dims: tuple[str, ...], *, dora: bool) -> dict[str, tuple[str, ...]]:
    *lead, before, after = dims
    dims_of = {"lora_a": (*lead, before, "rank"), "lora_b": (*lead, "rank", after), "lora_scale": tuple(lead[:1])}
    return dims_of | ({"lora_magnitude": (*lead, after)} if dora else {})


def _shardings(mesh: Mesh, dims: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, dict[str, Sharding]]:
    return {
        path: {
            name: param_sharding(mesh, f"{path}.{name}", dims[path][name], shape.shape) for name, shape in of.items()
        }
        for path, of in shapes.items()
    }


def _draw_arrays(sites: Mapping[str, tuple[Array, Site, AdapterPlan]]) -> dict[str, Array]:
    """Initial values, each from its own key: A uniform, of an embedding B normal, as in PEFT. Arrays of one shape are
    drawn together, since every draw takes a while to compile."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for path, (_, site, plan) in sites.items():
        *lead, before, after = site.matrix.shape
        normal, rank = isinstance(site.owner, Embedding), max(plan.ranks)
        groups.setdefault((normal, *lead, *((rank, after) if normal else (before, rank))), []).append(path)
    values_of: dict[str, Array] = {}
    for (normal, *shape), paths in groups.items():
        draw = functools.partial(jax.random.normal if normal else _uniform, shape=tuple(shape))
        values = jax.vmap(draw)(jnp.stack([sites[path][0] for path in paths]))
        values_of |= {path: values[i] for i, path in enumerate(paths)}
    return values_of


def _uniform(key: Array, shape: tuple[int, ...]) -> Array:
    bound = shape[-2] ** -0.5
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def _init_arrays(drawn: Array, site: Site, plan: AdapterPlan, dtype: np.dtype) -> dict[str, Array]:
    """Initial adapter arrays: one of A and B is drawn, the other 0. Columns beyond a layer's rank are 0."""
    *lead, before, after = site.matrix.shape
    rank, stacked = max(plan.ranks), tuple(lead[:1])
    used = np.arange(rank) < np.reshape(plan.ranks, (*stacked, *(1 for _ in lead[1:]), 1, 1))
    a, b = jnp.zeros((*lead, before, rank), dtype), jnp.zeros((*lead, rank, after), dtype)
    if isinstance(site.owner, Embedding):
        b = jnp.where(used.swapaxes(-1, -2), drawn, 0.0).astype(dtype)
    else:
        a = jnp.where(used, drawn, 0.0).astype(dtype)
    scales = jnp.asarray(plan.scales, jnp.float32).reshape(stacked)
    return {"lora_a": a, "lora_b": b, "lora_scale": scales, "lora_magnitude": jnp.zeros((*lead, after), dtype)}


def has_lora(model: Decoder) -> bool:
    return any(isinstance(node, Adapter) for _, node in nnx.iter_graph(model))


def merge_lora(model: Decoder) -> dict[str, Adapter]:
    """Merge every adapter into its matrix, in float32, and detach it; `unmerge` with the result reverts this.

    Raises ConfigError for adapters on quantized matrices: use `merged_lora`, which dequantizes.

    Exact up to rounding in the matrix's dtype: 2^-24 relative in float32, 2^-9 in bfloat16 each way, in which small
    adapters may vanish.
    """
    detached = {}
    for path, site in sites(model).items():
        if (adapter := site.adapter) is not None:
            if isinstance(site.matrix, Quantized):
                raise ConfigError(f"merge: {path} is quantized, which a merge cannot undo; use merged(model)")
            adapter.fix_gain(site.matrix[...])
            site.matrix.set_value(_by_layer(Adapter.merged, adapter, site.matrix[...]))
            del site.owner.adapters[site.name]
            detached[path] = adapter
    return detached


def unmerge(model: Decoder, detached: Mapping[str, Adapter]) -> None:
    """Subtract the adapters returned by `merge_lora` from their matrices and attach them again."""
    all_sites = sites(model)
    for path, adapter in detached.items():
        site = all_sites[path]
        site.matrix.set_value(_by_layer(Adapter.unmerged, adapter, site.matrix[...]))
        adapter.fixed_gain = nnx.data(None)
        site.owner.adapters[site.name] = adapter


def _by_layer(method: Callable[[Adapter, Array], Array], adapter: Adapter, kernel: Array) -> Array:
    return _mapped(method, *nnx.split(adapter), kernel)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mapped(method: Callable[[Adapter, Array], Array], graph: Any, state: Any, kernel: Array) -> Array:
    """Map over layers to limit memory: only one layer's float32 matrix is alive."""

    def one(inputs: tuple[Any, Array]) -> Array:
        return method(nnx.merge(graph, inputs[0]), inputs[1])

    return one((state, kernel)) if kernel.ndim == 2 else jax.lax.map(one, (state, kernel))


def merged_lora(model: Decoder) -> Decoder:
    """Copy of the model with adapters merged and matrices dequantized, exact up to the rounding of `merge_lora`.

    The original is unchanged; parameters without an adapter are shared.
    """
    weights = ModelWeights(model)
    copy = weights.bind(weights.read())
    for site in sites(copy).values():
        if isinstance(site.matrix, Quantized):
            plain = nnx.Param(
                _merged_layers(site.name, *nnx.split(site.owner)), dims=site.matrix.get_metadata("dims"), role="kernel"
            )
            setattr(site.owner, site.name, plain)
            site.owner.adapters.pop(site.name, None)
    merge_lora(copy)
    ModelWeights(copy).set_saved(())
    return copy


@functools.partial(jax.jit, static_argnums=(0, 1))
def _merged_layers(name: str, graph: Any, state: Any) -> Array:
    return jax.lax.map(lambda layer: nnx.merge(graph, layer).merged(name), state)


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameter count of one module type, or of the whole model."""

    kind: str
    trainable: int
    total: int
    """All parameters, the adapter's included."""

    @property
    def share(self) -> float:
        return self.trainable / self.total


def parameter_rows(model: Decoder) -> list[ParameterCount]:
    """Parameter counts by module type over all layers: `attention.q`, `mlp.up`, `norms`, `head`, ..."""
    weights = ModelWeights(model)
    trainable, numbers = weights.trainable(), dict[str, list[int]]()
    for path, _, shape in plain_shapes(weights.shapes()):
        if path.endswith(".lora_scale"):
            continue
        if path.startswith(TOWER):
            module = path.replace(ADAPTER, ".", 1).rsplit(".", 2 if ADAPTER in path else 1)[0]
        else:
            module = path.split(ADAPTER)[0] if ADAPTER in path else path.rsplit(".", 1)[0]
        kind = re.sub(r"^stages\.\d+\.blocks\.\d+\.", "", module)
        counts = numbers.setdefault("norms" if "norm" in kind else kind, [0, 0])
        counts[0] += math.prod(shape) * (path in trainable)
        counts[1] += math.prod(shape)
    return [ParameterCount(kind=kind, trainable=counts[0], total=counts[1]) for kind, counts in sorted(numbers.items())]


def count_parameters(model: Decoder) -> ParameterCount:
    rows = parameter_rows(model)
    return ParameterCount(
        kind="all", trainable=sum(row.trainable for row in rows), total=sum(row.total for row in rows)
    )
