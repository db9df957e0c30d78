"""A model's adapter as the files of PEFT, `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from posttrain.config import ConfigError
from posttrain.models.adapter import Adapter, column_norms
from posttrain.models.decoder import Decoder
from posttrain.models.names import Tensor
from posttrain.weights.lora import base_tensors, has_lora, module_of, sites
from posttrain.weights.peft_load import CLASSIFIER, CONFIG, PREFIX, WEIGHTS, Arrays
from posttrain.weights.pieces import Gather
from posttrain.weights.state import ModelWeights


def save_adapter(model: Decoder, path: str | Path, *, base: str | None = None) -> None:
    """Write the model's adapter, and what is trained in full beside it, as a folder that PEFT loads; it appears whole.

    `base`: folder or hub id of the model without the adapter, which PEFT's `AutoPeftModel` reads. ConfigError where the
    model has no adapter, for what PEFT cannot hold, and for a folder that holds something else.
    """
    if not has_lora(model):
        raise ConfigError("save_adapter: the model has no adapter; use save_model")
    target = Path(path).expanduser().resolve()
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not (target / CONFIG).is_file())):
        raise ConfigError(f"save_adapter: {target} is not an adapter's folder; give a new or empty folder")
    exported = _Export(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        config = json.dumps(exported.config(base), indent=2, sort_keys=True)
        (new / CONFIG).write_text(config + "\n", encoding="utf-8")
        save_file(exported.tensors, new / WEIGHTS, metadata={"format": "pt"})
        if target.exists():
            target.rename(Path(temporary) / "old")
        new.rename(target)


def refusal(model: Decoder, scales: Mapping[str, Sequence[float]], *, dora: bool) -> str | None:
    """Why PEFT cannot hold an adapter with these scales of each layer, by our path of the matrix; None where it can.

    The model may be without weights, and without the adapter.
    """
    if model.config.tie_embeddings and "embed.embedding" in scales and dora:
        return "PEFT has no DoRA on an embedding that is also the head"
    plain, of_experts = set[str](), set[str]()
    for tensor in base_tensors(model):
        parts = [p for p in tensor.parts if p.param in scales and scales[p.param][p.index[0] if p.index else 0]]
        if not parts:
            continue
        if dora and "experts" in parts[0].param:
            return f"PEFT has no DoRA on experts ({parts[0].param})"
        if len(tensor.shape) != 2:
            return f"{module_of(tensor)} holds all experts in one tensor"
        (plain if len(parts[0].index) < 2 else of_experts).add(module_of(tensor).rsplit(".", 1)[-1])
    if both := sorted(plain & of_experts):
        return f"PEFT takes every {both[0]} for the experts' and would lose the others"
    return None


class _Export:
    """An adapter under the names of PEFT."""

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
        scales = {p: np.atleast_1d(np.asarray(a.lora_scale[...])).tolist() for p, a in self.adapters.items()}
        if reason := refusal(model, scales, dora=self.dora):
            raise ConfigError(f"save_adapter: {reason}; use save_model, which merges")
        saved = ModelWeights(model).saved()
        self.saved = []
        self.of_experts = set[str]()
        self.modules = [module_of(tensor) for tensor in base_tensors(model)]
        for tensor in base_tensors(model):
            if any(part.param in saved for part in tensor.parts):
                self.tensors[PREFIX + tensor.name] = Gather(ModelWeights(model).read()).tensor(tensor)
                self.saved.append(module_of(tensor))
                if model.config.tie_embeddings and tensor.parts[0].param == "embed.embedding":
                    # PEFT asks for both of what is tied.
                    self.tensors[f"{PREFIX}lm_head.weight"] = self.tensors[PREFIX + tensor.name].copy()
            else:
                self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        """One A and one B of all parts of a tensor: where their A differ, side by side, B being zero across."""
        module = module_of(tensor)
        parts = [(p, self.adapters[p.param]) for p in tensor.parts if self._here(p.param, p.index)]
        if not parts:
            return
        pairs = [_trimmed(adapter, p.index) for p, adapter in parts]
        scale = pairs[0][2]
        shared = all(np.array_equal(a, pairs[0][0]) for a, _, _ in pairs)
        rank = pairs[0][0].shape[1] if shared else sum(a.shape[1] for a, _, _ in pairs)
        out, into = tensor.shape if tensor.transpose else tensor.shape[::-1]
        joined_a, joined_b, first = np.zeros((into, rank), np.float32), np.zeros((rank, out), np.float32), 0
        for (part, _), (a, b, own) in zip(parts, pairs, strict=True):
            rows = slice(first, first + a.shape[1])
            joined_a[:, rows] = a
            joined_b[rows, part.columns] = b * (own / scale)
            first += 0 if shared else a.shape[1]
        dtype = parts[0][1].lora_a.dtype
        kind, end = ("embedding_", "") if tensor.parts[0].param == "embed.embedding" else ("", ".weight")
        for letter, array in (("A", joined_a), ("B", joined_b)):
            self.tensors[f"{PREFIX}{module}.lora_{kind}{letter}{end}"] = np.ascontiguousarray(array.T).astype(dtype)
        if self.dora:
            self.tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = self._magnitudes(tensor, out)
        if len(parts[0][0].index) == 2:
            self.of_experts.add(module.rsplit(".", 1)[-1])
        self.ranks[module] = rank
        alpha = scale * (math.sqrt(rank) if self.rslora else rank)
        self.alphas[module] = round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-6) else alpha

    def _here(self, param: str, index: tuple[int, ...]) -> bool:
        """A layer of the parameter has an adapter."""
        return param in self.adapters and bool(np.asarray(self.adapters[param].lora_scale[...])[index[:1]])

    def _magnitudes(self, tensor: Tensor, out: int) -> np.ndarray:
        magnitudes = np.empty(out, np.float32)
        for part in tensor.parts:
            magnitudes[part.columns] = np.asarray(column_norms(self.matrices[part.param][part.index]))
            if self._here(part.param, part.index):
                trained = self.adapters[part.param].lora_magnitude[...][part.index]
                magnitudes[part.columns] += np.asarray(trained, np.float32)
        return magnitudes

    def config(self, base: str | None) -> dict[str, Any]:
        # PEFT knows no patterns for experts.
        general = [m for m in self.ranks if m.rsplit(".", 1)[-1] in self.of_experts] or list(self.ranks)
        rank, alpha = (Counter(of[m] for m in general).most_common(1)[0][0] for of in (self.ranks, self.alphas))
        if self.of_experts and any((self.ranks[m], self.alphas[m]) != (rank, alpha) for m in general):
            raise ConfigError("save_adapter: PEFT has one rank and alpha for all experts; use save_model, which merges")
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
            "target_modules": self._short(list(self.ranks)),
            "modules_to_save": self._short(self.saved) or None,
            "rank_pattern": {re.escape(m): r for m, r in self.ranks.items() if r != rank},
            "alpha_pattern": {re.escape(m): a for m, a in self.alphas.items() if a != alpha},
            "ensure_weight_tying": tied and any(m.endswith("embed_tokens") for m in (*self.ranks, *self.saved)),
        }

    def _short(self, modules: list[str]) -> list[str]:
        """Last words of names, where all modules that end so are meant; else the whole name."""
        total, meant = (Counter(m.rsplit(".", 1)[-1] for m in set(names)) for names in (self.modules, modules))
        return sorted({m if total[w := m.rsplit(".", 1)[-1]] != meant[w] else w for m in modules})


def _trimmed(adapter: Adapter, index: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, float]:
    """A [in, r], B [r, out] and scale of one layer, without the columns that other layers have more."""
    a, b = (np.asarray(x[...][index], np.float32) for x in (adapter.lora_a, adapter.lora_b))
    used = a.any(axis=0) | b.any(axis=1)
    return a[:, used], b[used], float(np.asarray(adapter.lora_scale[...])[index[:1]])
