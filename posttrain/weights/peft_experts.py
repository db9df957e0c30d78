"""Experts as transformers 5 and PEFT hold them: for each layer `gate_up_proj` and `down_proj` of all, which PEFT calls
`target_parameters`; a checkpoint may hold each expert's matrices alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

from posttrain.models.names import Part, Tensor

ALONE = re.compile(r"(.+)\.experts\.\d+\.(\w+)\.weight")
"""A matrix of one expert in a checkpoint."""


ROUTER = re.compile(r".+\.mlp\.(gate|router)")
"""A router in transformers 5, which PEFT takes for a parameter. That of Gemma 4 is a module."""


def in_memory(name: str) -> str:
    """What transformers calls what the checkpoint calls so: Mixtral's modules have other names in it."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def expert_parameters(every: Iterable[Tensor]) -> dict[str, Tensor]:
    """By name, such as `model.layers.0.mlp.experts.gate_up_proj`, of shape [experts, out, in] or as the checkpoint's.

    `every`: the tensors of the checkpoint, all of them.
    """
    found: dict[str, Tensor] = {}
    alone: dict[str, dict[str, list[Tensor]]] = {}
    for tensor in every:
        if len(tensor.shape) == 3 and ".experts." in tensor.parts[0].param:
            found[tensor.name] = tensor
        elif match := ALONE.fullmatch(tensor.name):
            stem = in_memory(f"{match[1]}.experts")
            param = tensor.parts[0].param
            name = f"{stem}.{'down' if param.endswith('.down') else 'gate_up'}_proj"
            alone.setdefault(name, {}).setdefault(param, []).append(tensor)
    return found | {name: _together(name, of) for name, of in alone.items()}


def _together(name: str, of: Mapping[str, list[Tensor]]) -> Tensor:
    """One tensor of all experts; of several parameters in turn along its output dimension."""
    parts, stop = [], 0
    for param, tensors in sorted(of.items()):
        start, stop = stop, stop + tensors[0].shape[0]
        parts.append(Part(param=param, index=tensors[0].parts[0].index[:1], columns=slice(start, stop)))
    experts = next(iter(of.values()))
    shape = (len(experts), stop, experts[0].shape[1])
    return Tensor(name=name, shape=shape, transpose=True, parts=tuple(parts))


def words_of_experts(every: Iterable[Tensor]) -> set[str]:
    """Last words of the names of matrices that a checkpoint holds for each expert alone.

    PEFT takes a `target_modules` that ends so for the parameters of all experts.
    """
    return {match[2] for tensor in every if (match := ALONE.fullmatch(tensor.name))}


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """([experts,] in, out)"""
    *experts, before, after = tensor.shape
    return (*experts, after, before) if tensor.transpose else tensor.shape


def wrappers(names: Iterable[str]) -> dict[str, str]:
    """In whose name PEFT stores the adapter of each parameter of experts: the last of a module is outermost."""
    of_module: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: name.endswith(".down_proj")):
        of_module.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: module + ".base_layer" * (len(of) - 1 - i)
        for module, of in of_module.items()
        for i, name in enumerate(of)
    }


def stack(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A [experts, r, in] and B [experts, out, r] as PEFT's [experts r, in] and [out, r experts]; those of one module as
    they are."""
    if a.ndim == 2:
        return a, b
    return a.reshape(-1, a.shape[-1]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)


def unstack(a: np.ndarray, b: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `stack`."""
    return a.reshape(num_experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, num_experts).transpose(2, 0, 1)
