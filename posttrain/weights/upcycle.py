"""Upcycling: a dense model as an MoE model that computes the same function, for further training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from posttrain.errors import ConfigError
from posttrain.models import hf
from posttrain.models.config import AttentionConfig, MLPConfig, ModelConfig, MoEConfig
from posttrain.models.decoder import Decoder
from posttrain.models.fields import Fields
from posttrain.models.names import layers_of
from posttrain.weights.load import outline_of
from posttrain.weights.state import ModelWeights

TARGETS: Mapping[str, str] = {
    "llama": "mixtral",
    "mistral": "mixtral",
    "qwen2": "qwen2_moe",
    "qwen3": "qwen3_moe",
}
"""Dense family -> MoE family with the same attention."""
SHARING = "glm4_moe"
"""MoE family with shared experts and dense first layers as in DeepSeek-V3, over the attention of any of these."""


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
    shared: int = 0
    """Number of shared experts, which every token has. In `copy` they are copies too, and their sum and the routed
    experts' give half of the result each; in `split` the MLP's columns are split over them and `top_k` routed experts.
    DeepSeekMoE, arXiv:2401.06066."""
    dense_layers: int = 0
    """Number of first layers that keep their MLP."""
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
        if self.shared < 0 or self.dense_layers < 0:
            raise ConfigError(
                f"upcycle: shared={self.shared} and dense_layers={self.dense_layers} must not be negative"
            )
        if self.noise < 0:
            raise ConfigError(f"upcycle: noise={self.noise} must not be negative")

    @property
    def parts(self) -> int:
        """Number of experts that the dense MLP is split over."""
        return self.top_k + self.shared if self.mode == "split" else 1

    @property
    def group(self) -> int:
        """Number of consecutive routed experts that are scored alike, and differ."""
        return self.top_k if self.mode == "split" else 1

    @property
    def routed_scale(self) -> float:
        """Factor on the second matrix of routed experts, whose weights sum to 1."""
        return float(self.top_k) if self.mode == "split" else 0.5 if self.shared else 1.0

    @property
    def shared_scale(self) -> float:
        """Factor on the second matrix of shared experts."""
        return 1.0 if self.mode == "split" or not self.shared else 0.5 / self.shared

    def target(self, family: str) -> str:
        """MoE family that can express the plan."""
        own = TARGETS[family]
        return SHARING if self.shared else own


def upcycled_config(dense: ModelConfig, plan: Upcycling) -> ModelConfig:
    """Configuration of the MoE model. Raises ConfigError if no MoE family can express it."""
    if dense.model_type not in TARGETS:
        raise ConfigError(f"upcycle: model_type={dense.model_type} has no MoE counterpart; known: {', '.join(TARGETS)}")
    if plan.dense_layers >= dense.num_layers:
        raise ConfigError(
            f"upcycle: dense_layers={plan.dense_layers} leaves none of the {dense.num_layers} layers to have experts"
        )
    target = plan.target(dense.model_type)
    if plan.dense_layers and target == "mixtral":
        raise ConfigError(
            f"upcycle: dense_layers={plan.dense_layers}: no MoE family has the attention of {dense.model_type}, "
            "dense first layers and no shared expert; add shared experts"
        )
    fields = Fields(json.loads(dense.hf_json))
    hf.family(dense.model_type).config_from_hf(fields)
    # Write out the dense family's defaults, since another family may have different ones.
    known = {key: value for key, value in fields.read.items() if value is not None}
    known |= json.loads(dense.hf_json)
    config = hf.config_from_hf(known | _changes(dense, plan, target, known))
    config = replace(config, generation_json=dense.generation_json)
    if faults := differences(dense, config):
        raise ConfigError(f"upcycle: {target} cannot express {', '.join(faults)} of this {dense.model_type}")
    return config


def _changes(dense: ModelConfig, plan: Upcycling, target: str, known: Mapping[str, Any]) -> dict[str, Any]:
    mlp = dense.blocks[0].mlp
    assert isinstance(mlp, MLPConfig)
    if mlp.dim % plan.parts:
        raise ConfigError(
            f"upcycle: {'top_k + shared' if plan.shared else 'top_k'}={plan.parts} must divide "
            f"intermediate_size={mlp.dim} of {dense.model_type}, whose columns are split; use a divisor, or copy"
        )
    dim = mlp.dim // plan.parts
    common: dict[str, Any] = {
        "model_type": target,
        "architectures": [hf.family(target).ARCHITECTURE],
        "num_experts_per_tok": plan.top_k,
    }
    if target == "mixtral":
        return common | {"intermediate_size": dim, "num_local_experts": plan.experts}
    common |= {"moe_intermediate_size": dim, "norm_topk_prob": True}
    if target == SHARING:
        return common | _sharing(dense, plan, known)
    own: dict[str, Any] = {"num_experts": plan.experts}
    own |= {"decoder_sparse_step": 1, "mlp_only_layers": list(range(plan.dense_layers))}
    # The family requires a shared expert: one with zero output is added.
    return common | own | ({"shared_expert_intermediate_size": dim} if target == "qwen2_moe" else {})


def _sharing(dense: ModelConfig, plan: Upcycling, known: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SHARING`, whose attention has what that of the dense model has."""
    attention = dense.blocks[0].attention
    assert isinstance(attention, AttentionConfig)
    whole = {"partial_rotary_factor": 1.0}
    rope = {"rope_parameters": {**known["rope_parameters"], **whole}} if known.get("rope_parameters") else whole
    return rope | {
        "attention_bias": attention.qkv_bias,
        "use_qk_norm": attention.qk_norm == "head",
        "n_routed_experts": plan.experts,
        "n_shared_experts": plan.shared,
        "first_k_dense_replace": plan.dense_layers,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }


def differences(dense: ModelConfig, config: ModelConfig) -> list[str]:
    """Fields that differ between a dense model and an MoE model, except for the MLPs."""
    faults = set()
    for dense_block, block in zip(dense.blocks, config.blocks, strict=True):
        assert isinstance(dense_block.mlp, MLPConfig)
        mlp = block.mlp.expert if isinstance(block.mlp, MoEConfig) else block.mlp
        mlp = replace(mlp, dim=dense_block.mlp.dim)
        faults |= _differences(dense_block.mlp, mlp) | _differences(dense_block.attention, block.attention)
        faults |= _differences(replace(dense_block, mlp=mlp, attention=block.attention), replace(block, mlp=mlp))
    changed: dict[str, Any] = {"model_type": dense.model_type, "hf_json": dense.hf_json, "stages": dense.stages}
    return sorted(faults | _differences(dense, replace(config, **changed)))


def _differences(a: Any, b: Any) -> set[str]:
    if type(a) is not type(b):
        return {type(a).__name__}
    return {name for name, value in vars(a).items() if value != vars(b)[name]}


def upcycled(model: Decoder, plan: Upcycling, *, seed: int) -> Decoder:
    """MoE model from a dense model, sharing unchanged parameters. `seed`: of the router and the noise.

    Raises ConfigError as `upcycled_config`, and if a factor would round the weights.
    """
    config = upcycled_config(model.config, plan)
    dtype = model.embed.embedding[...].dtype
    for name, scale in {"top_k": plan.routed_scale, "shared": plan.shared_scale}.items():
        if math.frexp(scale)[0] != 0.5 and dtype != jnp.float32:
            raise ConfigError(
                f"upcycle: {plan.mode} multiplies weights by {scale:g}, which rounds {dtype.name} ones unless {name} "
                f"is a power of two; use one{', or copy' if plan.mode == 'split' else ''}"
            )
    outline, source = ModelWeights(outline_of(config, model.compute, dtype)), Layers(model)
    draw = np.random.default_rng(seed)
    arrays = {}
    for path, like in outline.structs().items():
        prefix, name, layers = layers_of(config, path)
        part = name.removeprefix("mlp.")
        if not prefix:
            arrays[path] = source.weights[path]
        elif part.startswith("experts."):
            kernel = np.asarray(source.read(f"mlp.{part.removeprefix('experts.')}.kernel", layers), np.float32)
            arrays[path] = jnp.asarray(_experts(kernel, plan, draw, part).astype(like.dtype))
        elif part.startswith("shared.") and plan.shared:
            kernel = np.asarray(source.read(f"mlp.{part.removeprefix('shared.')}", layers), np.float32)
            arrays[path] = jnp.asarray(_shared(kernel, plan, part).astype(like.dtype))
        elif (name, layers[0]) in source.places:
            arrays[path] = source.read(name, layers)
        else:
            # In its own type: a router's correction is float32 in a model of fewer bits.
            new = _new(part, like.shape, config.initializer_range, plan, draw)
            arrays[path] = jnp.asarray(new.astype(like.dtype))
    return outline.bind(arrays)


class Layers:
    """Parameters of a model's layers, by their name in a block."""

    def __init__(self, model: Decoder):
        self.weights = ModelWeights(model).read()
        self.places: dict[tuple[str, int], tuple[str, int]] = {}
        """Name and layer -> path and index there."""
        for path in self.weights:
            prefix, name, layers = layers_of(model.config, path)
            if prefix:
                self.places |= {(name, layer): (path, index) for index, layer in enumerate(layers)}

    def read(self, name: str, layers: Sequence[int]) -> Array:
        """Parameter of these layers, stacked; the model's own array if these are all of its layers, in order."""
        places = [self.places[name, layer] for layer in layers]
        whole = self.weights[places[0][0]]
        if places == [(places[0][0], index) for index in range(len(whole))]:
            return whole
        return jnp.stack([self.weights[path][index] for path, index in places])


def _split(kernel: np.ndarray, plan: Upcycling, name: str) -> np.ndarray:
    """Parts [layers, parts, in, out] of the dense matrix [layers, in, out]."""
    layers, rows, columns = kernel.shape
    if ".down" in name:
        return kernel.reshape(layers, plan.parts, -1, columns)
    return kernel.reshape(layers, rows, plan.parts, -1).swapaxes(1, 2)


def _experts(kernel: np.ndarray, plan: Upcycling, draw: np.random.Generator, name: str) -> np.ndarray:
    """Routed experts [layers, experts, in, out]; groups of experts are consecutive."""
    parts = _split(kernel, plan, name)[:, -plan.group :]
    if ".down" in name:
        parts = parts * np.float32(plan.routed_scale)
    experts = np.tile(parts, (1, plan.experts // plan.group, 1, 1))
    if plan.noise:
        experts += plan.noise * parts.std() * draw.standard_normal(experts.shape, np.float32)
    return experts


def _shared(kernel: np.ndarray, plan: Upcycling, name: str) -> np.ndarray:
    """Shared experts as one MLP [layers, in, out]: the first parts of the dense one, or copies of it."""
    parts = _split(kernel, plan, name)
    parts = parts[:, : plan.shared] if plan.mode == "split" else np.repeat(parts, plan.shared, axis=1)
    layers, count, rows, columns = parts.shape
    if ".down" in name:
        return parts.reshape(layers, count * rows, columns) * np.float32(plan.shared_scale)
    return parts.swapaxes(1, 2).reshape(layers, rows, count * columns)


def _new(name: str, shape: tuple[int, ...], stddev: float, plan: Upcycling, draw: np.random.Generator) -> np.ndarray:
    """Initialize a parameter that the dense model lacks: a router's, or a shared expert's with zero output."""
    if name in ("shared.down.kernel", "shared_gate.kernel", "router.correction"):
        return np.zeros(shape, np.float32)
    if name != "router.proj.kernel":
        return stddev * draw.standard_normal(shape, np.float32)
    groups = stddev * draw.standard_normal((*shape[:-1], shape[-1] // plan.group), np.float32)
    return np.repeat(groups, plan.group, axis=-1)
