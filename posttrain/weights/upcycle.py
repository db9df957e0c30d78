"""Upcycling: a dense model as an MoE model that computes the same function, for further training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from posttrain.errors import ConfigError
from posttrain.models import hf
from posttrain.models.config import MLPConfig, ModelConfig, MoEConfig, stages_of
from posttrain.models.decoder import Decoder
from posttrain.models.fields import Fields
from posttrain.weights.load import outline_of
from posttrain.weights.state import ModelWeights

TARGETS: Mapping[str, str] = {
    "llama": "mixtral",
    "mistral": "mixtral",
    "qwen2": "qwen2_moe",
    "qwen3": "qwen3_moe",
}
"""Dense family -> MoE family with the same attention."""


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """Upcycling plan. Raises ConfigError for numbers that do not fit.

    `copy`: every expert is a copy of the MLP; a token's `top_k` weights sum to 1, so the result is the MLP's for any
    routing. Sparse upcycling, arXiv:2212.05055.

    `split`: the MLP's columns are split over `top_k` experts, and there are `experts / top_k` such groups. The router
    scores the experts of a group alike, so a token is routed to one whole group with equal weights, and the second
    matrix is scaled by `top_k`: the result is the MLP's, at its cost. Virtual groups, arXiv:2410.07524, section 3.2.
    """

    experts: int
    top_k: int
    mode: Literal["copy", "split"]
    noise: float = 0.0
    """Standard deviation of noise added to each expert's matrices, in units of the matrix's own."""

    def __post_init__(self) -> None:
        if self.experts < 2:
            raise ConfigError(f"upcycle: experts={self.experts} must be at least 2")
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(f"upcycle: top_k={self.top_k} must be from 1 to experts={self.experts}")
        if self.mode == "split" and (self.top_k < 2 or self.experts % self.top_k):
            raise ConfigError(
                f"upcycle: split needs groups of top_k experts that form the whole MLP: experts={self.experts} "
                f"must be a multiple of top_k={self.top_k}, and top_k at least 2; change one of them, or use copy"
            )
        if self.noise < 0:
            raise ConfigError(f"upcycle: noise={self.noise} must not be negative")

    @property
    def parts(self) -> int:
        """Number of experts that the dense MLP is split over."""
        return self.top_k if self.mode == "split" else 1


def upcycled_config(dense: ModelConfig, plan: Upcycling) -> ModelConfig:
    """Configuration of the MoE model. Raises ConfigError if no MoE family can express it."""
    if dense.model_type not in TARGETS:
        raise ConfigError(f"upcycle: model_type={dense.model_type} has no MoE counterpart; known: {', '.join(TARGETS)}")
    target = TARGETS[dense.model_type]
    fields = Fields(json.loads(dense.hf_json))
    hf.family(dense.model_type).config_from_hf(fields)
    # Write out the dense family's defaults, since another family may have different ones.
    known = {key: value for key, value in fields.read.items() if value is not None}
    config = hf.config_from_hf(known | json.loads(dense.hf_json) | _changes(dense, plan, target))
    config = replace(config, generation_json=dense.generation_json)
    if faults := differences(dense, config):
        raise ConfigError(f"upcycle: {target} cannot express {', '.join(faults)} of this {dense.model_type}")
    return config


def _changes(dense: ModelConfig, plan: Upcycling, target: str) -> dict[str, Any]:
    mlp = dense.blocks[0].mlp
    assert isinstance(mlp, MLPConfig)
    if mlp.dim % plan.parts:
        raise ConfigError(
            f"upcycle: top_k={plan.top_k} must divide intermediate_size={mlp.dim} of {dense.model_type}, "
            "whose columns are split; use a divisor, or copy"
        )
    dim = mlp.dim // plan.parts
    common: dict[str, Any] = {
        "model_type": target,
        "architectures": [hf.family(target).ARCHITECTURE],
        "num_experts_per_tok": plan.top_k,
    }
    if target == "mixtral":
        return common | {"intermediate_size": dim, "num_local_experts": plan.experts}
    own: dict[str, Any] = {"num_experts": plan.experts, "moe_intermediate_size": dim, "norm_topk_prob": True}
    own |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    # The family requires a shared expert: one with zero output is added.
    return common | own | ({"shared_expert_intermediate_size": dim} if target == "qwen2_moe" else {})


def differences(dense: ModelConfig, config: ModelConfig) -> list[str]:
    """Fields that differ between a dense model and an MoE model, except for the MLPs."""
    faults = set()
    for dense_block, moe_block in zip(dense.blocks, config.blocks, strict=True):
        assert isinstance(dense_block.mlp, MLPConfig)
        assert isinstance(moe_block.mlp, MoEConfig)
        expert = replace(moe_block.mlp.expert, dim=dense_block.mlp.dim)
        faults |= _differences(dense_block.mlp, expert) | _differences(dense_block.attention, moe_block.attention)
        faults |= _differences(
            replace(dense_block, mlp=expert, attention=moe_block.attention), replace(moe_block, mlp=expert)
        )
    changed: dict[str, Any] = {"model_type": dense.model_type, "hf_json": dense.hf_json, "stages": dense.stages}
    return sorted(faults | _differences(dense, replace(config, **changed)))


def _differences(a: Any, b: Any) -> set[str]:
    if type(a) is not type(b):
        return {type(a).__name__}
    return {name for name, value in vars(a).items() if value != vars(b)[name]}


def upcycled(model: Decoder, plan: Upcycling, *, seed: int) -> Decoder:
    """MoE model from a dense model, sharing unchanged parameters. `seed`: of the router and the noise.

    Raises ConfigError as `upcycled_config`, and if splitting would round the weights.
    """
    config = upcycled_config(model.config, plan)
    assert stages_of(config.blocks) == config.stages
    dtype = model.embed.embedding[...].dtype
    if plan.parts & (plan.parts - 1) and dtype != jnp.float32:
        raise ConfigError(
            f"upcycle: split multiplies weights by top_k={plan.top_k}, which rounds {dtype.name} ones unless it is a "
            "power of two; use one, or copy"
        )
    weights, dense = ModelWeights(outline_of(config, model.compute, dtype)), ModelWeights(model).read()
    draw = np.random.default_rng(seed)
    new = {}
    for path, _, shape in weights.shapes():
        before, inside, name = path.partition(".mlp.")
        if inside and name.startswith("experts."):
            kernel = np.asarray(dense[f"{before}.mlp.{name.removeprefix('experts.')}.kernel"], np.float32)
            new[path] = _experts(kernel, plan, draw, columns_last=not name.endswith("down")).astype(dtype)
        elif path not in dense:
            new[path] = _new(name, shape, config.initializer_range, plan, draw).astype(dtype)
    return weights.bind({path: jnp.asarray(new.get(path, dense.get(path))) for path, _, _ in weights.shapes()})


def _experts(kernel: np.ndarray, plan: Upcycling, draw: np.random.Generator, *, columns_last: bool) -> np.ndarray:
    """Experts [layers, experts, in, out] from the dense [layers, in, out]; groups of experts are consecutive."""
    layers, rows, columns = kernel.shape
    if columns_last:
        parts = kernel.reshape(layers, rows, plan.parts, -1).swapaxes(1, 2)
    else:
        parts = kernel.reshape(layers, plan.parts, -1, columns) * plan.parts
    experts = np.tile(parts, (1, plan.experts // plan.parts, 1, 1))
    if plan.noise:
        experts += plan.noise * parts.std() * draw.standard_normal(experts.shape, np.float32)
    return experts


def _new(name: str, shape: tuple[int, ...], stddev: float, plan: Upcycling, draw: np.random.Generator) -> np.ndarray:
    """Initialize a parameter that the dense model lacks: a router's, or a shared expert's with zero output."""
    if name in ("shared.down.kernel", "shared_gate.kernel"):
        return np.zeros(shape, np.float32)
    if name != "router.proj.kernel":
        return stddev * draw.standard_normal(shape, np.float32)
    groups = stddev * draw.standard_normal((*shape[:-1], shape[-1] // plan.parts), np.float32)
    return np.repeat(groups, plan.parts, axis=-1)
