"""Structured pruning: fewer layers, KV heads and experts, narrower MLPs and residual stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from posttrain.errors import ConfigError
from posttrain.models import hf
from posttrain.models.config import AttentionConfig, MLPConfig, ModelConfig, MoEConfig
from posttrain.models.decoder import Decoder
from posttrain.models.fields import Fields
from posttrain.weights.load import outline_of
from posttrain.weights.state import ModelWeights, Parameter
from posttrain.weights.upcycle import TARGETS, differences


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """Pruning plan; None: keep all. Raises ConfigError if it does not fit the model.

    Importance: MLP neurons by the product of the norms of their three vectors, per layer; KV heads (with their query
    heads) by the product of the norms of values and output, per layer; residual dimensions by the magnitude of the
    matrices that read or write them, the same in all layers.
    """

    experts: int | None = None
    """Number of most used experts per layer to merge into one MLP: the result is a dense model."""
    kv_heads: int | None = None
    """Number of KV heads, each kept with its query heads."""

    layers: tuple[int, ...] | None = None
    """Layer indices to keep, from 0, ascending."""
    mlp_dim: int | None = None
    embed_dim: int | None = None


def pruned_config(config: ModelConfig, plan: Pruning) -> ModelConfig:
    """Configuration of the pruned model."""
    original = config
    if len(config.stages) != 1 or len(config.stages[0].blocks) != 1:
        raise ConfigError(
            f"prune: the layers of this {config.model_type} differ in type; only uniform layers are supported"
        )
    if plan.experts is not None:
        config = dense_config(config, plan.experts)
    block, num_layers = config.stages[0].blocks[0], config.num_layers
    fields = json.loads(config.hf_json)
    if plan.layers is not None:
        if sorted({*plan.layers}) != list(plan.layers) or not plan.layers or not 0 <= plan.layers[-1] < num_layers:
            raise ConfigError(f"prune: layers={list(plan.layers)} must be ascending and from 0 to {num_layers - 1}")
        fields["num_hidden_layers"] = len(plan.layers)
        if fields.get("layer_types") is not None:
            fields["layer_types"] = [fields["layer_types"][layer] for layer in plan.layers]
    if plan.mlp_dim is not None:
        if not isinstance(block.mlp, MLPConfig):
            raise ConfigError(
                f"prune: mlp_dim: {config.model_type} has experts instead of an MLP; remove mlp_dim, or set experts"
            )
        _check("mlp_dim", plan.mlp_dim, block.mlp.dim)
        fields["intermediate_size"] = plan.mlp_dim
    if plan.embed_dim is not None:
        _check("embed_dim", plan.embed_dim, config.embed_dim)
        # Without this field families compute it from width and heads.
        fields |= {"hidden_size": plan.embed_dim, "head_dim": getattr(block.attention, "head_dim", None)}
    if plan.kv_heads is not None:
        attention = block.attention
        if not isinstance(attention, AttentionConfig) or attention.qk_norm == "projection":
            raise ConfigError(f"prune: kv_heads: the heads of {config.model_type} cannot be separated; remove kv_heads")
        _check("kv_heads", plan.kv_heads, attention.num_kv_heads)
        fields["num_key_value_heads"] = plan.kv_heads
        fields["num_attention_heads"] = plan.kv_heads * (attention.num_heads // attention.num_kv_heads)
        fields["head_dim"] = attention.head_dim
    return replace(hf.config_from_hf(fields), generation_json=original.generation_json)


def pruned(model: Decoder, plan: Pruning, load: Float[np.ndarray, "L E"] | None = None) -> Decoder:
    """Pruned model, sharing unchanged parameters. `load`: selections per expert, needed for `plan.experts`."""
    config = pruned_config(model.config, plan)
    if plan.experts is not None:
        assert load is not None
        model = dense(model, plan.experts, load)
    weights = ModelWeights(model)
    arrays = {path: np.asarray(w) for path, w in weights.read().items()}
    layers = list(range(model.config.num_layers)) if plan.layers is None else list(plan.layers)
    embed = None if plan.embed_dim is None else _top_embed_dims(arrays, weights.parameters(), plan.embed_dim)
    neurons = None if plan.mlp_dim is None else _top_neurons(arrays, plan.mlp_dim)[layers]
    block = model.config.blocks[0].attention
    groups = None
    if plan.kv_heads is not None:
        assert isinstance(block, AttentionConfig)
        groups = _top_kv_groups(arrays, block.num_kv_heads, plan.kv_heads)[layers]
    dtype = model.embed.embedding[...].dtype
    outline = ModelWeights(outline_of(config, model.compute, dtype))
    result = {}
    for path, names, shape in outline.shapes():
        array = arrays[path]
        for axis, name in enumerate(names):
            if name == "layers":
                array = array[layers]
            elif name == "embed" and embed is not None:
                array = np.take(array, embed, axis=axis)
            elif name == "mlp" and neurons is not None:
                array = _take(array, neurons, axis)
            elif name in ("heads", "kv_heads") and groups is not None:
                assert isinstance(block, AttentionConfig)
                size = array.shape[axis] // block.num_kv_heads
                array = _take(array, (groups[..., None] * size + np.arange(size)).reshape(len(layers), -1), axis)
        assert array.shape == tuple(shape), (path, array.shape, shape)
        result[path] = jnp.asarray(array)
    return outline.bind(result)


def _take(array: np.ndarray, places: Int[np.ndarray, "L n"], axis: int) -> np.ndarray:
    """Select per-layer indices along an axis."""
    return np.take_along_axis(
        array, places.reshape(len(places), *(-1 if at == axis else 1 for at in range(1, array.ndim))), axis=axis
    )


def _check(name: str, given: int, maximum: int) -> None:
    if not 1 <= given <= maximum:
        raise ConfigError(f"prune: {name}={given} must be from 1 to {maximum}")


def _top_embed_dims(
    arrays: Mapping[str, np.ndarray], declared: Mapping[str, Parameter], count: int
) -> Int[np.ndarray, " D"]:
    total: np.ndarray | float = 0.0
    for path, array in arrays.items():
        dims = declared[path].dims
        if "embed" in dims and declared[path].is_matrix:
            axis = dims.index("embed")
            others = tuple(at for at in range(array.ndim) if at != axis)
            # Normalize each matrix so that it contributes by its distribution, not its magnitude.
            squares = np.square(array.astype(np.float64)).sum(axis=others)
            total = total + squares / max(squares.sum(), np.finfo(np.float64).tiny)
    return np.sort(np.argsort(-np.asarray(total), kind="stable")[:count])


def _top_neurons(arrays: Mapping[str, np.ndarray], count: int) -> Int[np.ndarray, "L F"]:
    strength = _norms(arrays, "mlp.gate", 1) * _norms(arrays, "mlp.up", 1) * _norms(arrays, "mlp.down", 2)
    return np.sort(np.argsort(-strength, axis=1, kind="stable")[:, :count], axis=1)


def _top_kv_groups(arrays: Mapping[str, np.ndarray], groups: int, count: int) -> Int[np.ndarray, "L K"]:
    values, out = _norms(arrays, "attention.v", 1), _norms(arrays, "attention.o", 2)
    weight = 1.0
    for norms in (values, out):
        weight = weight * np.square(norms).reshape(len(norms), groups, -1).sum(axis=-1)
    return np.sort(np.argsort(-np.asarray(weight), axis=1, kind="stable")[:, :count], axis=1)


def _norms(arrays: Mapping[str, np.ndarray], name: str, axis: int) -> np.ndarray:
    (matrix,) = [array for path, array in arrays.items() if path.endswith(f".{name}.kernel")]
    return np.linalg.norm(matrix.astype(np.float64), axis=axis)


EXPERT_FIELDS = (
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
)
"""MoE-only fields of `config.json`."""


def dense_config(mixture: ModelConfig, experts: int) -> ModelConfig:
    """Configuration of the dense model with `experts` experts per layer; all layers must be alike.

    Raises ConfigError if no dense family can express it.
    """
    block = mixture.blocks[0]
    families = [dense for dense, target in TARGETS.items() if target == mixture.model_type]
    if not families or not all(isinstance(b.mlp, MoEConfig) for b in mixture.blocks):
        raise ConfigError(
            f"prune: experts: {mixture.model_type} is not an MoE model with a dense counterpart; supported: "
            f"{', '.join(dict.fromkeys(TARGETS.values()))}"
        )
    moe = block.mlp
    assert isinstance(moe, MoEConfig)
    if moe.shared is not None or not moe.router.normalize:
        raise ConfigError(
            f"prune: experts: this {mixture.model_type} has a shared expert or unnormalized router weights, "
            "which no dense model can express"
        )
    if not 1 <= experts <= moe.num_experts:
        raise ConfigError(f"prune: experts={experts} must be from 1 to {moe.num_experts}")
    assert isinstance(block.attention, AttentionConfig)
    family = "mistral" if block.attention.window and "mistral" in families else families[0]
    fields = Fields(json.loads(mixture.hf_json))
    hf.family(mixture.model_type).config_from_hf(fields)
    # Write out the MoE family's defaults, since another family may have different ones.
    known = {key: value for key, value in fields.read.items() if value is not None} | json.loads(mixture.hf_json)
    shared = {key: value for key, value in known.items() if key not in EXPERT_FIELDS}
    changes = {
        "model_type": family,
        "architectures": [hf.family(family).ARCHITECTURE],
        "intermediate_size": experts * moe.expert.dim,
    }
    config = replace(hf.config_from_hf(shared | changes), generation_json=mixture.generation_json)
    if faults := differences(config, mixture):
        raise ConfigError(f"prune: {family} cannot express {', '.join(faults)} of this {mixture.model_type}")
    return config


def dense(model: Decoder, experts: int, load: Float[np.ndarray, "L E"]) -> Decoder:
    """Dense model: sum over the most used experts of each layer of (its share of their use) * expert(x).

    `load`: selections per expert. Equals the MoE model's function if all experts are identical.
    """
    config = dense_config(model.config, experts)
    weights = ModelWeights(outline_of(config, model.compute, model.embed.embedding[...].dtype))
    mixture = ModelWeights(model).read()
    chosen = np.sort(np.argsort(-load, axis=1, kind="stable")[:, :experts], axis=1)
    share = np.take_along_axis(load, chosen, axis=1)
    if not (share.sum(axis=1) > 0).all():
        raise ConfigError("prune: experts: a layer selected none of its experts; give more text")
    share = share / share.sum(axis=1, keepdims=True)
    arrays = {}
    for path, _, shape in weights.shapes():
        before, inside, name = path.partition(".mlp.")
        if not inside:
            arrays[path] = mixture[path]
            continue
        source = mixture[f"{before}.mlp.experts.{name.removesuffix('.kernel')}"]
        experts_of = np.take_along_axis(np.asarray(source, np.float32), chosen[:, :, None, None], axis=1)
        if name.startswith("down"):
            joined = (experts_of * share[:, :, None, None]).reshape(shape)
        else:
            joined = experts_of.swapaxes(1, 2).reshape(shape)
        arrays[path] = jnp.asarray(joined.astype(source.dtype))
    return weights.bind(arrays)
