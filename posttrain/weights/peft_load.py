"""Loading PEFT adapters (`adapter_config.json`, `adapter_model.safetensors`) into a model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from posttrain.errors import ConfigError
from posttrain.mesh import VOCAB, param_sharding
from posttrain.models.adapter import column_norms
from posttrain.models.config import ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.models.names import CheckpointTensor
from posttrain.models.vision.tower import own_names
from posttrain.runtime import processes
from posttrain.weights.files import find_folder, read_json
from posttrain.weights.lora import (
    AdapterPlan,
    Site,
    as_matrix,
    attach_adapters,
    base_tensors,
    has_lora,
    module_of,
    sites,
)
from posttrain.weights.peft_experts import expert_parameters, in_memory, shape_of, unstack, wrappers
from posttrain.weights.pieces import Gather
from posttrain.weights.quantize import plain_arrays
from posttrain.weights.scalar_head import add_scalar_head
from posttrain.weights.state import ModelWeights

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
CLASSIFIER = "SEQ_CLS"
"""`task_type` of a reward model's adapter, whose scalar head is saved with it."""

READ = {"r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "target_modules"}
READ |= {"modules_to_save", "peft_type", "bias", "init_lora_weights", "ensure_weight_tying", "target_parameters"}
SILENT = {"task_type", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "auto_mapping"}
SILENT |= {
    "eva_config",
    "megatron_core",
    "qalora_group_size",
    "layers_pattern",
    "layers_to_transform",
    "exclude_modules",
}
"""Fields without information beyond the tensors."""

KEY = re.compile(r"(.+)\.lora_(?:(embedding_)?([AB])(?:\.weight)?|(magnitude_vector)(?:\.weight)?)")

MORE = ("use_dora", "modules_to_save")
"""Fields of adapters that are more than low-rank products of single matrices."""

TABLES = ("embed.embedding", "head.kernel")
"""Parameters with a row for every token."""

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class _Module:
    """Adapter tensors of one checkpoint module, or of one stacked expert parameter."""

    a: np.ndarray
    """Shape [r, in], for experts [experts, r, in]."""
    b: np.ndarray
    """Shape [out, r], for experts [experts, out, r]."""
    magnitude: np.ndarray | None
    scale: float


def load_adapter(
    model: Decoder, path: str | Path, *, mesh: Mesh | None = None, text_name: Callable[[str], str | None] | None = None
) -> None:
    """Attach the PEFT adapter of a folder or hub id to the model, to be used, trained, or merged.

    Where added tokens resized the embedding, the model takes the adapter's tables. `text_name`: of a multimodal
    family's `Wrapper`. Raises ConfigError for unsupported options, by name, and for tensors that do not fit the model.
    """
    if has_lora(model):
        raise ConfigError(f"{find_folder(path)}: the model already has an adapter; merge it first")
    _resize(model, adapted_config(model, path, text_name), mesh)
    files = _match_files(model, path, text_name, mesh=mesh)
    _attach(model, files, mesh)
    weights, placed = ModelWeights(model), ModelWeights(model).read()
    new = _adapter_arrays(model, files) | _whole_arrays(model, files.whole)
    arrays = {p: array.astype(placed[p].dtype) for p, array in new.items()}
    weights.write(processes.on_devices(arrays, {p: placed[p].sharding for p in new}))
    weights.set_saved(_saved_params(model, files))


def read_pairs(
    model: Decoder, path: str | Path, *, text_name: Callable[[str], str | None] | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B with its scale of a PEFT adapter, by the path of their matrix; the model is left as it is.

    ConfigError, by name, for what is more than such pairs or does not fit the model.
    """
    folder = find_folder(path)
    config = read_json(folder / CONFIG)
    if more := [name for name in MORE if config.get(name)] or ["task_type"] * (config.get("task_type") == CLASSIFIER):
        raise ConfigError(
            f"{folder / CONFIG}: {more[0]}={config[more[0]]!r} changes more than low-rank products, which is all that "
            "an engine can have beside other adapters; merge it into a model of its own"
        )
    if adapted_config(model, folder, text_name) != model.config:
        raise ConfigError(f"{folder}: added tokens changed the embedding; merge it into a model of its own")
    files, by_path = _match_files(model, folder, text_name), sites(model)
    arrays, pairs = _adapter_arrays(model, files), {}
    for at, plan in files.plans.items():
        site = by_path[at]
        a, b = (arrays[f"{site.adapter_path}.{key}"] for key in ("lora_a", "lora_b"))
        by_layer = [-1, *[1] * (b.ndim - 1)] if b.ndim > 2 else [1, 1]
        pairs[site.param] = a, b * np.reshape(np.asarray(plan.scales, np.float32), by_layer)
    return pairs


def is_table(tensor: CheckpointTensor) -> bool:
    """Return True for embedding and head, which have a row for every token."""
    return tensor.parts[0].param in TABLES


def adapted_config(
    model: Decoder, path: str | Path, text_name: Callable[[str], str | None] | None = None
) -> ModelConfig:
    """Configuration of the model, which may be of shapes, with the vocabulary of a PEFT adapter.

    Raises ConfigError if added tokens resized the embedding, and the file has not all its rows.
    """
    file, config = find_folder(path) / WEIGHTS, model.config
    tables = {tensor.name for tensor in base_tensors(model) if is_table(tensor)}
    rows, whole = dict[str, int](), set[str]()
    for key, (first, *others) in _read(file, own_names(config.vision, text_name), shapes=True).arrays.items():
        match, name = KEY.fullmatch(key), _plain_name(key)
        if match is None and name in tables:
            whole.add(name)
            rows[key] = first
        elif match is not None and f"{match[1]}.weight" in tables:
            embeds, a = match[2] is not None, match[3] == "A"
            rows |= {key: others[0] if embeds else first} if embeds == a and match[3] else {}
    if not set(rows.values()) - {config.vocab_size}:
        return config
    size = max(rows.values(), key=lambda size: (size != config.vocab_size, size))
    if faults := [key for key in rows if rows[key] != size] + [f"{name}, which is absent," for name in tables - whole]:
        raise ConfigError(
            f"{file}: added tokens gave the embedding {size} rows in place of the base's {config.vocab_size}, and "
            f"{min(faults)} does not have them; merge it with PEFT into the resized base, and load the merged model"
        )
    if config.vision is not None:
        raise ConfigError(f"{file}: added tokens resized the embedding, which model.vision does not support")
    fields = json.loads(config.hf_json) | {"vocab_size": size}
    return replace(config, vocab_size=size, resized=True, hf_json=json.dumps(fields))


def _resize(model: Decoder, config: ModelConfig, mesh: Mesh | None) -> None:
    """Give the tables the rows of a configuration; their values are still to be written."""
    if config.vocab_size == model.config.vocab_size:
        return
    weights, placed = ModelWeights(model), ModelWeights(model).read()
    for path, dims, shape in weights.shapes():
        if path in TABLES:
            new = tuple(config.vocab_size if dim == VOCAB else size for dim, size in zip(dims, shape, strict=True))
            sharding = None if mesh is None else param_sharding(mesh, path, dims, new)
            weights.write({path: jnp.zeros(new, placed[path].dtype, device=sharding)})
    model.config = config


def adapter_outline(
    outline: Decoder, path: str | Path, *, text_name: Callable[[str], str | None] | None = None
) -> Decoder:
    """A model of shapes with the shapes of an adapter, trained as `load_adapter` leaves it. ConfigError as there."""
    files = _match_files(outline, path, text_name)

    def attached(model: Decoder) -> Decoder:
        _attach(model, files, None)
        return model

    adapted = nnx.eval_shape(attached, outline)
    ModelWeights(adapted).set_saved(_saved_params(adapted, files))
    return adapted


def absent_targets(
    outline: Decoder, path: str | Path, *, text_name: Callable[[str], str | None] | None = None
) -> list[str]:
    """Names in an adapter's `target_modules` that no module of the model has, which have no effect."""
    targets = read_json(find_folder(path) / CONFIG).get("target_modules")
    named = own_names(outline.config.vision, text_name)
    modules = [module_of(tensor) for tensor in base_tensors(outline)]
    listed = targets if isinstance(targets, list) else []
    return [target for target in listed if not any(_has_suffix(m, _own_module(target, named)) for m in modules)]


def _attach(model: Decoder, found: _AdapterFiles, mesh: Mesh | None) -> None:
    config = found.config
    attach_adapters(
        model,
        found.plans,
        dora=bool(config.get("use_dora")),
        dropout=float(config.get("lora_dropout") or 0.0),
        rslora=bool(config.get("use_rslora")),
        seed=0,
        mesh=mesh,
    )


def _saved_params(model: Decoder, found: _AdapterFiles) -> set[str]:
    """Paths of the parameters that are trained in full beside the adapter."""
    saved = [t for t in base_tensors(model) if t.name in found.whole and _is_saved(found.config, t)]
    return {part.param for tensor in saved for part in tensor.parts}


def _is_saved(config: Mapping[str, Any], tensor: CheckpointTensor) -> bool:
    """Return True for tensors of `modules_to_save`."""
    return _within(module_of(tensor), tuple(config.get("modules_to_save") or ()))


def _within(module: str, names: tuple[str, ...]) -> bool:
    """Return True for a module, or one within a module, whose name ends so, as in PEFT: `norm` is any norm too."""
    parts = module.split(".")
    return any(".".join(parts[:end]).endswith(names) for end in range(1, len(parts) + 1))


@dataclass(frozen=True, kw_only=True)
class _AdapterFiles:
    """Parsed adapter files, matched with the model."""

    config: Mapping[str, Any]
    modules: Mapping[str, _Module]
    whole: Arrays
    tensors: Mapping[str, CheckpointTensor]
    plans: Mapping[str, AdapterPlan]


def _match_files(
    model: Decoder, path: str | Path, text_name: Callable[[str], str | None] | None, *, mesh: Mesh | None = None
) -> _AdapterFiles:
    folder = find_folder(path)
    config = read_json(folder / CONFIG)
    _check_config(folder, config, model)
    if config.get("task_type") == CLASSIFIER:
        add_scalar_head(model, seed=0, mesh=mesh)
    named = own_names(model.config.vision, text_name)
    config |= {"target_parameters": [named(t) or t for t in config.get("target_parameters") or []]}
    for field in ("target_modules", "modules_to_save"):
        if isinstance(listed := config.get(field), list):
            config |= {field: [_own_module(module, named) for module in listed]}
    stored = _read(folder / WEIGHTS, named)
    tensors = {module_of(t): as_matrix(t) for t in base_tensors(model) if not t.name.endswith(".bias")}
    tensors |= expert_parameters(tensors.values()) | {in_memory(name): t for name, t in tensors.items()}
    modules, whole = _match_tensors(folder, config, stored, tensors, model)
    plans = _plans(folder, sites(model), modules, tensors)
    return _AdapterFiles(config=config, modules=modules, whole=whole, tensors=tensors, plans=plans)


def _check_config(folder: Path, config: Mapping[str, Any], model: Decoder) -> None:
    def refuse(what: str) -> None:
        raise ConfigError(f"{folder / CONFIG}: {what} is not supported; merge it with PEFT and load the merged model")

    if config.get("peft_type") != "LORA":
        refuse(f"peft_type={config.get('peft_type')!r}")
    if config.get("bias", "none") != "none":
        refuse(f"bias={config['bias']!r}")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start not in ("gaussian", "orthogonal", "eva"):
        refuse(f"init_lora_weights={start!r}, which changes the base,")
    for key, value in config.items():
        if value and key not in READ | SILENT:
            refuse(f"{key}={value!r}")
    if "r" not in config or "lora_alpha" not in config:
        raise ConfigError(f"{folder / CONFIG}: needs r and lora_alpha")
    names = [*(config.get("target_modules") or []), *(config.get("modules_to_save") or [])]
    outer = {"embed_tokens", "lm_head"} & {name.rsplit(".", 1)[-1] for name in names}
    if model.config.tie_embeddings and outer and not config.get("ensure_weight_tying"):
        refuse(f"{min(outer)} of a model whose head is the embedding, without ensure_weight_tying,")


def _own_module(name: str, named: Callable[[str], str | None]) -> str:
    """Name of a module, or an end of it, as the model has it."""
    return (named(f"{name}.weight") or f"{name}.weight").removesuffix(".weight")


class _Stored(NamedTuple):
    arrays: dict[str, Any]
    """Tensors by the model's names of modules."""
    modules: dict[str, str]
    """Names of modules in the file, which PEFT matches with patterns, by the model's."""


def _read(file: Path, text_name: Callable[[str], str | None], *, shapes: bool = False) -> _Stored:
    """Read the tensors, or only their shapes."""
    if not file.is_file():
        raise ConfigError(f"{file}: not found; adapters in other formats, such as .bin, are not supported")
    try:
        with safe_open(file, framework="numpy") as handle:
            read = (lambda key: handle.get_slice(key).get_shape()) if shapes else handle.get_tensor
            stored = {key.removeprefix(PREFIX): read(key) for key in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: damaged or incomplete ({error}); copy it again") from error
    renamed, modules = dict[str, Any](), dict[str, str]()
    for key, array in stored.items():
        module, mark, rest = key.partition(".lora_")
        name = text_name(f"{module}.weight" if mark else module)
        # Beside a module saved whole, PEFT may write the base's, which it does not use.
        if name is not None and not name.endswith(".original_module.weight"):
            renamed[name.removesuffix(".weight") + mark + rest if mark else name] = array
            modules[name.removesuffix(".weight")] = module.removesuffix(".weight")
    return _Stored(renamed, modules)


def _match_tensors(
    folder: Path, config: Mapping[str, Any], stored: _Stored, tensors: Mapping[str, CheckpointTensor], model: Decoder
) -> tuple[dict[str, _Module], Arrays]:
    """Low-rank pairs by module, and fully saved tensors by name. Raises one ConfigError listing all mismatches."""
    parts: dict[str, Arrays] = {}
    parameters = _parameters(folder, config, tensors)
    whole, faults = Arrays(), list[str]()
    known = {t.name: t for t in base_tensors(model)}
    outlined = isinstance(model.embed.embedding.get_value(), jax.ShapeDtypeStruct)
    base = Gather({} if outlined else plain_arrays(model))
    for key, array in stored.arrays.items():
        match = KEY.fullmatch(key)
        name = _plain_name(key)
        module = parameters.get(match[1], match[1]) if match is not None else None
        if model.config.tie_embeddings and (module or name).startswith("lm_head"):
            continue  # a copy of the tied embedding
        if match is not None and module is not None and module in tensors:
            parts.setdefault(module, {})[match[3] or "magnitude"] = array
        elif module is None and name in known and array.shape == known[name].shape:
            if _is_saved(config, known[name]) or (model.config.resized and is_table(known[name])):
                whole[name] = array
            elif not outlined and not np.array_equal(base.tensor(known[name]), array):
                faults.append(f"{key} differs from the base and is not in modules_to_save")
        else:
            faults.append(f"{key} {array.shape} matches no parameter of the model")
    modules = {}
    for module, tensors_of in parts.items():
        *experts, into, out = shape_of(tensors[module])
        ranks = tensors_of["A"].shape[0] if "A" in tensors_of else 0
        shapes = {"A": (ranks, into), "B": (out, ranks)} | ({"magnitude": (out,)} if config.get("use_dora") else {})
        got = {name: array.shape for name, array in tensors_of.items()}
        if got != shapes or ranks % math.prod(experts):
            of = f", with a multiple of the {experts[0]} experts in place of {ranks}" if experts else ""
            faults.append(f"{module} has shapes {got}, expected {shapes}{of}")
        else:
            a, b = (
                unstack(tensors_of["A"], tensors_of["B"], *experts) if experts else (tensors_of["A"], tensors_of["B"])
            )
            name = _pattern_name(config, module)
            scale = _scale(config, stored.modules.get(name, name), a.shape[-2])
            modules[module] = _Module(a=a, b=b, magnitude=tensors_of.get("magnitude"), scale=scale)
    faults += _missing(config, modules, whole, tensors)
    if faults:
        raise ConfigError(f"{folder / WEIGHTS}: {'; '.join(faults)}")
    return modules, whole


def _parameters(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, CheckpointTensor]) -> dict[str, str]:
    """Expert parameters by the file's module names. Raises ConfigError for targets that match no matrix."""
    targets = list(config.get("target_parameters") or [])
    experts = expert_parameters(tensors.values())
    matrices = [*experts, *(f"{name}.weight" for name, tensor in tensors.items() if len(tensor.shape) == 2)]
    if unknown := [t for t in targets if not any(_has_suffix(name, t) for name in matrices)]:
        known = ", ".join(sorted({name.split(".", 3)[-1] for name in experts})) or "none"
        raise ConfigError(
            f"{folder / CONFIG}: target_parameters={unknown[0]!r} matches no matrix of the model; "
            f"expert parameters: {known}"
        )
    wrapped = wrappers(name for name in experts if any(_has_suffix(name, t) for t in targets))
    return {module: name for name, module in wrapped.items()}


def _has_suffix(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _pattern_name(config: Mapping[str, Any], module: str) -> str:
    """Name that PEFT matches patterns against."""
    weight = f"{module}.weight"
    return weight if any(_has_suffix(weight, t) for t in config.get("target_parameters") or ()) else module


def _plain_name(key: str) -> str:
    return key.replace(".base_layer.", ".").replace(".modules_to_save.", ".")


def _missing(
    config: Mapping[str, Any], modules: Mapping[str, Any], whole: Mapping[str, Any], tensors: Mapping[str, Any]
) -> list[str]:
    """Modules and parameters listed in the configuration but absent from the file.

    As in PEFT, a name of `target_modules` that no module of the model has is ignored beside others that some have.
    """
    targets = config.get("target_modules")
    listed = targets if isinstance(targets, list) else []
    there = {t: [m for m in tensors if _has_suffix(m, t) and not _excluded(config, m)] for t in listed}
    faults = [f"{t} of target_modules is missing" for t, all_ in there.items() if all_ and not modules.keys() & {*all_}]
    if listed and not any(there.values()):
        faults.append(f"target_modules: the model has none of {', '.join(map(str, listed))}")
    for target in config.get("target_parameters") or []:
        if not any(_has_suffix(_pattern_name(config, module), target) for module in modules):
            faults.append(f"{target} of target_parameters is missing")
    saved_modules = [name.rsplit(".", 1)[0] for name in whole]
    # PEFT lists every name that a classifier's head may have.
    optional = {"classifier", "score"} if config.get("task_type") == CLASSIFIER else set[str]()
    saved = [m for m in config.get("modules_to_save") or [] if m not in optional]
    return faults + [
        f"{m} of modules_to_save is missing" for m in saved if not any(_within(h, (m,)) for h in saved_modules)
    ]


def _excluded(config: Mapping[str, Any], module: str) -> bool:
    """Apply `exclude_modules` by PEFT's rule: ends of names, or one regular expression."""
    excluded = config.get("exclude_modules") or []
    if isinstance(excluded, str):
        return re.fullmatch(excluded, module) is not None
    return any(_has_suffix(module, name) for name in excluded)


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    """Scale by PEFT's rule: the first `alpha_pattern` that matches the end of the name as a regular expression."""
    patterns = config.get("alpha_pattern") or {}
    key = next((p for p in patterns if re.fullmatch(rf"(.*\.)?({p})", name)), None)
    alpha = config["lora_alpha"] if key is None else patterns[key]
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _plans(
    folder: Path, every: Mapping[str, Site], modules: Mapping[str, _Module], tensors: Mapping[str, CheckpointTensor]
) -> dict[str, AdapterPlan]:
    by_param = {site.param: path for path, site in every.items()}
    ranks: dict[str, list[int]] = {}
    scales: dict[str, list[float]] = {}
    for name, module in modules.items():
        for part in tensors[name].parts:
            if part.param not in by_param:
                raise ConfigError(
                    f"{folder}: an adapter on {name} is not supported; merge it with PEFT and load the merged model"
                )
            path, layer = by_param[part.param], part.index[0] if part.index else 0
            num = len(every[path].modules)
            of, scale = ranks.setdefault(path, [0] * num), scales.setdefault(path, [0.0] * num)
            of[layer] = max(of[layer], module.a.shape[-2])
            if scale[layer] not in (0.0, module.scale):
                raise ConfigError(f"{folder}: {name}: different alphas for experts of one layer are not supported")
            scale[layer] = module.scale
    return {path: AdapterPlan(ranks=tuple(ranks[path]), scales=tuple(scales[path])) for path in ranks}


def _adapter_arrays(model: Decoder, files: _AdapterFiles) -> Arrays:
    """Arrays of the planned adapters by path: stacked, in our layout, with the B of fused modules split."""
    every = sites(model)
    by_param = {
        every[path].param: (every[path], _empty(every[path], plan, files)) for path, plan in files.plans.items()
    }
    for name, module in files.modules.items():
        for part in files.tensors[name].parts:
            arrays, rank = by_param[part.param][1], module.a.shape[-2]
            arrays["lora_a"][part.index][..., :rank] = module.a.swapaxes(-1, -2)
            arrays["lora_b"][part.index][..., :rank, :] = module.b.swapaxes(-1, -2)[..., part.columns]
            if module.magnitude is not None:
                arrays["lora_magnitude"][part.index] = module.magnitude[part.columns]
    result: Arrays = {}
    for site, arrays in by_param.values():
        if "lora_magnitude" in arrays:
            # Layers without an adapter have no magnitude in the file, and it has no effect there.
            arrays["lora_magnitude"] -= processes.on_host(column_norms(site.matrix[...]))
        result |= {f"{site.adapter_path}.{key}": array for key, array in arrays.items()}
    return result


def _empty(site: Site, plan: AdapterPlan, files: _AdapterFiles) -> Arrays:
    *lead, before, after = site.matrix.shape
    rank = max(plan.ranks)
    shapes = {"lora_a": (*lead, before, rank), "lora_b": (*lead, rank, after)}
    shapes |= {"lora_magnitude": (*lead, after)} if files.config.get("use_dora") else {}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def _whole_arrays(model: Decoder, whole: Arrays) -> Arrays:
    """Parameters with the fully saved tensors inserted."""
    weights, result = ModelWeights(model).read(), Arrays()
    for tensor in base_tensors(model):
        if tensor.name in whole:
            array = whole[tensor.name].swapaxes(-1, -2) if tensor.transpose else whole[tensor.name]
            for part in tensor.parts:
                if part.param not in weights:
                    raise ConfigError(f"{tensor.name} of modules_to_save is quantized; load the model without quantize")
                target = result.setdefault(part.param, np.array(weights[part.param]))
                target[part.index] = array[..., part.columns]
    return result
