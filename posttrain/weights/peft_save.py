"""Saving a model's adapter in PEFT's format (`adapter_config.json`, `adapter_model.safetensors`)."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from posttrain.errors import ConfigError
from posttrain.models import hf
from posttrain.models.adapter import column_norms
from posttrain.models.decoder import Decoder
from posttrain.models.names import CheckpointTensor, ParamSlice
from posttrain.runtime.files import check_local, whole_folder
from posttrain.weights.lora import as_matrix, base_tensors, has_lora, module_of, sites
from posttrain.weights.peft_experts import (
    PER_EXPERT,
    ROUTER,
    expert_parameters,
    in_memory,
    per_expert_suffixes,
    shape_of,
    stack,
    wrappers,
)
from posttrain.weights.peft_load import CLASSIFIER, CONFIG, PREFIX, WEIGHTS, Arrays, is_table
from posttrain.weights.pieces import Gather
from posttrain.weights.state import ModelWeights


def save_adapter(model: Decoder, path: str | Path, *, base: str | None = None) -> None:
    """Save the adapter and the parameters trained in full beside it as a folder that PEFT loads; written atomically.

    `base`: folder or hub id of the base model, which PEFT's `AutoPeftModel` reads. Raises ConfigError if the model has
    no adapter, if PEFT cannot represent it, and for a folder with other content.
    """
    if not has_lora(model):
        raise ConfigError("save_adapter: the model has no adapter; use save_model")
    target = Path(check_local(path)).expanduser().resolve()
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not (target / CONFIG).is_file())):
        raise ConfigError(f"save_adapter: {target} is not an adapter folder; give a new or empty folder")
    exported = _Export(model)
    with whole_folder(target) as new:
        config = json.dumps(exported.config(base), indent=2, sort_keys=True)
        (new / CONFIG).write_text(config + "\n", encoding="utf-8")
        save_file(exported.tensors, new / WEIGHTS, metadata={"format": "pt"})


def peft_refusal(model: Decoder, scales: Mapping[str, Sequence[float]], *, dora: bool, dropout: float) -> str | None:
    """Return why PEFT cannot represent an adapter with these scales per layer and parameter path; None if it can.

    The model may be abstract, and without the adapter.
    """
    vision = model.config.vision
    if vision is not None and vision.trained:
        return f"an adapter has no place for what model.vision={vision.train} trains in full of the vision tower"
    if model.config.tie_embeddings and "embed.embedding" in scales and dora:
        return "PEFT does not support DoRA on a tied embedding"
    every = base_tensors(model)
    suffixes = per_expert_suffixes(every)
    for tensor in every:
        if not any(p.param in scales and scales[p.param][p.index[0] if p.index else 0] for p in tensor.parts):
            continue
        if dora and (param := tensor.parts[0].param).rsplit(".", 2)[-2] == "experts":
            return f"PEFT does not support DoRA on experts ({param})"
        if (dora or dropout) and _is_parameter(module_of(tensor), suffixes):
            option = "DoRA" if dora else "dropout"
            return f"PEFT treats {module_of(tensor)} as a parameter, which does not support {option}"
    return None


def _looks_like_experts(module: str, suffixes: Collection[str]) -> bool:
    """Return True if PEFT would confuse the name in `target_modules` with experts: it goes to `target_parameters`."""
    return module.rsplit(".", 1)[-1] in suffixes and not PER_EXPERT.fullmatch(f"{module}.weight")


def _is_parameter(module: str, suffixes: Collection[str]) -> bool:
    """Return True if the module goes to `target_parameters`."""
    return _looks_like_experts(module, suffixes) or ROUTER.fullmatch(in_memory(module)) is not None


class _Export:
    """Adapter tensors and configuration under PEFT's names."""

    def __init__(self, model: Decoder):
        self.model = model
        self.tensors = Arrays()
        self.ranks: dict[str, int] = {}
        self.alphas: dict[str, float] = {}
        by_param = {site.param: site for site in sites(model).values()}
        self.adapters = {param: site.adapter for param, site in by_param.items() if site.adapter is not None}
        self.matrices = {param: site.matrix for param, site in by_param.items()}
        first = next(iter(self.adapters.values()))
        self.rslora, self.dora = first.rslora, first.lora_magnitude is not None
        self.dropout = max(adapter.dropout for adapter in self.adapters.values())
        self.scales = {p: np.atleast_1d(np.asarray(a.lora_scale[...])).tolist() for p, a in self.adapters.items()}
        if reason := peft_refusal(model, self.scales, dora=self.dora, dropout=self.dropout):
            raise ConfigError(f"save_adapter: {reason}; use save_model, which merges")
        named = ((hf.module_name(model.config, tensor.name), tensor) for tensor in base_tensors(model))
        self.every = [replace(tensor, name=name) for name, tensor in named]
        self.suffixes = per_expert_suffixes(self.every)
        self.modules = [module_of(tensor) for tensor in self.every]
        self._masks: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
        self.saved: list[str] = []
        self.targets: list[str] = []
        """Modules with an adapter."""
        self.parameters: list[str] = []
        """Parameters with an adapter, such as stacked experts."""
        self._add_all()

    def _add_all(self) -> None:
        saved, read = ModelWeights(self.model).saved(), ModelWeights(self.model).read()
        experts = expert_parameters(self.every)
        self.per_expert = self._per_expert(experts.values())
        for tensor in self.every:
            module = module_of(tensor)
            whole = any(part.param in saved for part in tensor.parts)
            if whole or (self.model.config.resized and is_table(tensor)):
                name = f"{module}.base_layer.weight" if self._has_adapter(tensor) else tensor.name
                self.tensors[PREFIX + name] = Gather(read).tensor(tensor)
                if self.model.config.tie_embeddings and is_table(tensor):
                    # PEFT needs both tensors of a tied pair.
                    self.tensors[PREFIX + name.replace(module, "lm_head")] = self.tensors[PREFIX + name].copy()
            if whole:
                self.saved.append(module)
            elif self._has_adapter(tensor) and (self.per_expert or ".experts." not in tensor.parts[0].param):
                if _is_parameter(module, self.suffixes):
                    module, name = in_memory(module), in_memory(tensor.name)
                    self.parameters.append(name)
                else:
                    name = module
                    self.targets.append(name)
                self._add(tensor, module, name)
        if not self.per_expert:
            for name, module in wrappers(name for name, tensor in experts.items() if self._has_adapter(tensor)).items():
                self.parameters.append(name)
                self._add(experts[name], module, name)

    def _per_expert(self, experts: Iterable[CheckpointTensor]) -> bool:
        """Return True if PEFT can read per-expert adapters (format of older versions).

        Requires one rank and alpha over all layers, all fused parts adapted or none, no other module with an expert's
        suffix, and no adapter on a router.
        """
        ranks, here = set[tuple[int, float]](), dict[str, set[bool]]()
        for tensor in experts:
            for part in tensor.parts:
                kind_has_adapter = here.setdefault(tensor.name.rsplit(".", 1)[-1], set())
                kind_has_adapter.add(has_adapter := self._scale(part) != 0.0)
                if has_adapter:
                    ranks.add((int(self._used(part).sum()), self._scale(part)))
        routers = any(".router." in param for param in self.scales)
        if (
            routers
            or self.rslora
            or len(ranks) != 1
            or any(len(kind_has_adapter) > 1 for kind_has_adapter in here.values())
        ):
            return False
        return bool(self.suffixes) and not any(_looks_like_experts(module, self.suffixes) for module in self.modules)

    def _scale(self, part: ParamSlice) -> float:
        """Scale of a slice's adapter; 0: no adapter."""
        return self.scales[part.param][part.index[0] if part.index else 0] if part.param in self.scales else 0.0

    def _has_adapter(self, tensor: CheckpointTensor) -> bool:
        return any(self._scale(part) for part in tensor.parts)

    def _used(self, part: ParamSlice) -> np.ndarray:
        """Mask of the columns of A that a layer uses."""
        key = (part.param, part.index[:1])
        if key not in self._masks:
            adapter = self.adapters[part.param]
            pair = (adapter.lora_a[...], adapter.lora_b[...].mT)
            a, b = (np.asarray(x[part.index[:1]], np.float32) for x in pair)
            self._masks[key] = np.any(a, axis=tuple(range(a.ndim - 1))) | np.any(b, axis=tuple(range(b.ndim - 1)))
        return self._masks[key]

    def _pair(self, part: ParamSlice) -> tuple[np.ndarray, np.ndarray]:
        """A [..., in, r] and B [..., r, out]."""
        adapter, used = self.adapters[part.param], self._used(part)
        a, b = (np.asarray(x[...][part.index], np.float32) for x in (adapter.lora_a, adapter.lora_b))
        return a[..., used], b[..., used, :]

    def _add(self, tensor: CheckpointTensor, module: str, name: str) -> None:
        """Add one A and one B for all slices of a tensor: differing A are concatenated, with a block-diagonal B.

        `module`: PEFT's module path. `name`: matched by PEFT's patterns.
        """
        tensor = as_matrix(tensor)
        parts = [part for part in tensor.parts if self._scale(part)]
        pairs = [self._pair(part) for part in parts]
        scale = self._scale(parts[0])
        shared = all(np.array_equal(a, pairs[0][0]) for a, _ in pairs)
        rank = pairs[0][0].shape[-1] if shared else sum(a.shape[-1] for a, _ in pairs)
        *lead, into, out = shape_of(tensor)
        joined_a, joined_b = np.zeros((*lead, into, rank), np.float32), np.zeros((*lead, rank, out), np.float32)
        first = 0
        for part, (a, b) in zip(parts, pairs, strict=True):
            rows = slice(first, first + a.shape[-1])
            joined_a[..., rows] = a
            joined_b[..., rows, part.columns] = b * (self._scale(part) / scale)
            first += 0 if shared else a.shape[-1]
        dtype = self.adapters[parts[0].param].lora_a.dtype
        kind, end = ("embedding_", "") if tensor.parts[0].param == "embed.embedding" else ("", ".weight")
        stacked = stack(joined_a.swapaxes(-1, -2), joined_b.swapaxes(-1, -2))
        for letter, array in zip("AB", stacked, strict=True):
            self.tensors[f"{PREFIX}{module}.lora_{kind}{letter}{end}"] = np.ascontiguousarray(array).astype(dtype)
        if self.dora:
            self.tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = self._magnitudes(tensor, out)
        self.ranks[name] = rank
        alpha = scale * (math.sqrt(rank) if self.rslora else rank)
        self.alphas[name] = round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-6) else alpha

    def _magnitudes(self, tensor: CheckpointTensor, out: int) -> np.ndarray:
        magnitudes = np.empty(out, np.float32)
        for part in as_matrix(tensor).parts:
            magnitudes[part.columns] = np.asarray(column_norms(self.matrices[part.param][part.index]))
            if self._scale(part):
                trained = self.adapters[part.param].lora_magnitude[...][part.index]
                magnitudes[part.columns] += np.asarray(trained, np.float32)
        return magnitudes

    def config(self, base: str | None) -> dict[str, Any]:
        # PEFT has no patterns for single experts.
        per_expert = {name for name in self.ranks if self.per_expert and PER_EXPERT.fullmatch(f"{name}.weight")}
        rank, alpha = (
            Counter(of[m] for m in per_expert or of).most_common(1)[0][0] for of in (self.ranks, self.alphas)
        )
        tied = self.model.config.tie_embeddings
        return {
            "peft_type": "LORA",
            "task_type": CLASSIFIER if self.model.config.scalar_head else "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": self.dropout,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "use_rslora": self.rslora,
            "use_dora": self.dora,
            "target_modules": _short(self.targets, self.modules, _word),
            "target_parameters": _short(self.parameters, self._matrices(), _place) or None,
            "modules_to_save": _short(self.saved, self.modules, _word) or None,
            "rank_pattern": {re.escape(m): r for m, r in self.ranks.items() if r != rank},
            "alpha_pattern": {re.escape(m): a for m, a in self.alphas.items() if a != alpha},
            "ensure_weight_tying": tied and any(m.endswith("embed_tokens") for m in (*self.ranks, *self.saved)),
        }

    def _matrices(self) -> list[str]:
        return [*expert_parameters(self.every), *(f"{in_memory(module)}.weight" for module in self.modules)]


def _short(meant: Collection[str], every: Collection[str], end: Callable[[str], str]) -> list[str]:
    """Shorten names to suffixes where all names with that suffix are included."""
    total, chosen = (Counter(end(name) for name in set(names)) for names in (every, meant))
    return sorted({name if total[e := end(name)] != chosen[e] else e for name in meant})


def _word(name: str) -> str:
    """Last word of a name; the whole name where that is a number, with which names of layers end."""
    word = name.rsplit(".", 1)[-1]
    return name if word.isdigit() else word


def _place(name: str) -> str:
    """Name within its layer."""
    return re.sub(r".*\blayers\.\d+\.", "", name)
