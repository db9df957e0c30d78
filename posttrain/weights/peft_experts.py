"""Adapters on MoE experts in PEFT's format: `target_parameters` on stacked `gate_up_proj` and `down_proj`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

from posttrain.models.names import CheckpointTensor, ParamSlice

PER_EXPERT = re.compile(r"(.+)\.experts\.\d+\.(\w+)\.weight")
"""CheckpointTensor name of a single expert's matrix in a checkpoint."""


ROUTER = re.compile(r".+\.mlp\.(gate|router)")
"""Router module names in transformers 5, which PEFT treats as a parameter. Gemma 4's router is a module."""


def in_memory(name: str) -> str:
    """Map a checkpoint's module name to the name in transformers (differs for Mixtral)."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def expert_parameters(every: Iterable[CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """Stacked expert parameters by name, such as `model.layers.0.mlp.experts.gate_up_proj`.

    Shape [experts, out, in], or as in the checkpoint. `every`: all tensors of the checkpoint.
    """
    stacked: dict[str, CheckpointTensor] = {}
    alone: dict[str, dict[str, list[CheckpointTensor]]] = {}
    for tensor in every:
        if len(tensor.shape) == 3 and ".experts." in tensor.parts[0].param:
            stacked[tensor.name] = tensor
        elif match := PER_EXPERT.fullmatch(tensor.name):
            stem = in_memory(f"{match[1]}.experts")
            param = tensor.parts[0].param
            name = f"{stem}.{'down' if param.endswith('.down') else 'gate_up'}_proj"
            alone.setdefault(name, {}).setdefault(param, []).append(tensor)
    return stacked | {name: _stack_experts(name, of) for name, of in alone.items()}


def _stack_experts(name: str, of: Mapping[str, list[CheckpointTensor]]) -> CheckpointTensor:
    """Stack single experts into one tensor; several parameters are concatenated along its output dimension."""
    parts, stop = [], 0
    for param, tensors in sorted(of.items()):
        start, stop = stop, stop + tensors[0].shape[0]
        parts.append(ParamSlice(param=param, index=tensors[0].parts[0].index[:1], columns=slice(start, stop)))
    experts = next(iter(of.values()))
    shape = (len(experts), stop, experts[0].shape[1])
    return CheckpointTensor(name=name, shape=shape, transpose=True, parts=tuple(parts))


def per_expert_suffixes(every: Iterable[CheckpointTensor]) -> set[str]:
    """Name suffixes of matrices that a checkpoint stores per expert.

    PEFT applies a `target_modules` entry with such a suffix to the stacked parameters of all experts.
    """
    return {match[2] for tensor in every if (match := PER_EXPERT.fullmatch(tensor.name))}


def shape_of(tensor: CheckpointTensor) -> tuple[int, ...]:
    """Logical shape ([experts,] in, out) of a tensor."""
    *experts, before, after = tensor.shape
    return (*experts, after, before) if tensor.transpose else tensor.shape


def wrappers(names: Iterable[str]) -> dict[str, str]:
    """PEFT module path of each expert parameter's adapter: for several in a module, the last is the outermost
    wrapper."""
    by_module: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: name.endswith(".down_proj")):
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: module + ".base_layer" * (len(of) - 1 - i)
        for module, of in by_module.items()
        for i, name in enumerate(of)
    }


def stack(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reshape A [experts, r, in] and B [experts, out, r] to PEFT's [experts r, in] and [out, r experts]; 2-D pairs pass
    through."""
    if a.ndim == 2:
        return a, b
    return a.reshape(-1, a.shape[-1]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)


def unstack(a: np.ndarray, b: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Inverse of `stack`."""
    return a.reshape(num_experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, num_experts).transpose(2, 0, 1)
