"""A smaller model cut out of a large one: fewer layers, heads and experts, narrower MLPs and residual stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from posttrain.errors import ConfigError
from posttrain.models import hf
from posttrain.models.config import AttentionConfig, MLPConfig, ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.weights.dense import dense, dense_config
from posttrain.weights.load import outline_of
from posttrain.weights.state import ModelWeights


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """What is kept; None: all. ConfigError where the numbers do not fit the model.

    Of MLPs the neurons with the largest product of the norms of their three vectors stay, in each layer its own; of key
    heads those with the largest product of the norms of values and output, with their query heads; of the residual
    stream the dimensions in which the matrices that read or write it are largest, in all layers the same.
    """

    experts: int | None = None
    """The most used experts of each layer, which become one MLP: the model is a dense one then."""
    kv_heads: int | None = None
    """Key-value heads, each with the query heads that share it."""

    layers: tuple[int, ...] | None = None
    """Numbers of the layers, from 0, rising."""
    mlp_dim: int | None = None
    embed_dim: int | None = None


def pruned_config(config: ModelConfig, plan: Pruning) -> ModelConfig:
    """The description of the smaller model."""
    original = config
    if len(config.stages) != 1 or len(config.stages[0].blocks) != 1:
        raise ConfigError(f"prune: the layers of this {config.model_type} differ in kind; only models of alike layers")
    if plan.experts is not None:
        config = dense_config(config, plan.experts)
    block, num_layers = config.stages[0].blocks[0], config.num_layers
    fields = json.loads(config.hf_json)
    if plan.layers is not None:
        if sorted({*plan.layers}) != list(plan.layers) or not plan.layers or not 0 <= plan.layers[-1] < num_layers:
            raise ConfigError(f"prune: layers={list(plan.layers)} must rise and be from 0 to {num_layers - 1}")
        fields["num_hidden_layers"] = len(plan.layers)
        if fields.get("layer_types") is not None:
            fields["layer_types"] = [fields["layer_types"][layer] for layer in plan.layers]
    if plan.mlp_dim is not None:
        if not isinstance(block.mlp, MLPConfig):
            raise ConfigError(
                f"prune: mlp_dim: {config.model_type} has experts in place of an MLP; leave it out, or give experts"
            )
        _check("mlp_dim", plan.mlp_dim, block.mlp.dim)
        fields["intermediate_size"] = plan.mlp_dim
    if plan.embed_dim is not None:
        _check("embed_dim", plan.embed_dim, config.embed_dim)
        # Where it is not written, families take the quotient of width and heads.
        fields |= {"hidden_size": plan.embed_dim, "head_dim": getattr(block.attention, "head_dim", None)}
    if plan.kv_heads is not None:
        attention = block.attention
        if not isinstance(attention, AttentionConfig) or attention.qk_norm == "projection":
            raise ConfigError(f"prune: kv_heads: the heads of {config.model_type} do not come apart; leave it out")
        _check("kv_heads", plan.kv_heads, attention.num_kv_heads)
        fields["num_key_value_heads"] = plan.kv_heads
        fields["num_attention_heads"] = plan.kv_heads * (attention.num_heads // attention.num_kv_heads)
        fields["head_dim"] = attention.head_dim
    return replace(hf.config_from_hf(fields), generation_json=original.generation_json)


def pruned(model: Decoder, plan: Pruning, load: Float[np.ndarray, "L E"] | None = None) -> Decoder:
    """The smaller model; what both have is equal. `load`: how often each expert is chosen, where `plan` keeps some."""
    config = pruned_config(model.config, plan)
    if plan.experts is not None:
        assert load is not None
        model = dense(model, plan.experts, load)
    weights = ModelWeights(model)
    arrays = {path: np.asarray(w) for path, w in weights.read().items()}
    dims = weights.dims()
    layers = list(range(model.config.num_layers)) if plan.layers is None else list(plan.layers)
    embed = None if plan.embed_dim is None else _widest(arrays, dims, plan.embed_dim)
    neurons = None if plan.mlp_dim is None else _strongest(arrays, plan.mlp_dim)[layers]
    block = model.config.blocks[0].attention
    groups = None
    if plan.kv_heads is not None:
        assert isinstance(block, AttentionConfig)
        groups = _heaviest(arrays, block.num_kv_heads, plan.kv_heads)[layers]
    dtype = model.embed.embedding[...].dtype
    outline = ModelWeights(outline_of(config, model.compute, dtype))
    made = {}
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
        made[path] = jnp.asarray(array)
    return outline.bind(made)


def _take(array: np.ndarray, places: Int[np.ndarray, "L n"], axis: int) -> np.ndarray:
    """Of each layer its own places along an axis."""
    return np.take_along_axis(
        array, places.reshape(len(places), *(-1 if at == axis else 1 for at in range(1, array.ndim))), axis=axis
    )


def _check(name: str, given: int, there: int) -> None:
    if not 1 <= given <= there:
        raise ConfigError(f"prune: {name}={given} must be from 1 to {there}")


def _widest(arrays: Mapping[str, np.ndarray], dims: Mapping[str, Sequence[str]], count: int) -> Int[np.ndarray, " D"]:
    total: np.ndarray | float = 0.0
    for path, array in arrays.items():
        if "embed" in dims[path] and array.ndim > 1 and "norm" not in path:
            axis = dims[path].index("embed")
            others = tuple(at for at in range(array.ndim) if at != axis)
            # A matrix counts by its shape of importance, not by its size.
            squares = np.square(array.astype(np.float64)).sum(axis=others)
            total = total + squares / squares.sum()
    return np.sort(np.argsort(-np.asarray(total), kind="stable")[:count])


def _strongest(arrays: Mapping[str, np.ndarray], count: int) -> Int[np.ndarray, "L F"]:
    strength = _norms(arrays, "mlp.gate", 1) * _norms(arrays, "mlp.up", 1) * _norms(arrays, "mlp.down", 2)
    return np.sort(np.argsort(-strength, axis=1, kind="stable")[:, :count], axis=1)


def _heaviest(arrays: Mapping[str, np.ndarray], groups: int, count: int) -> Int[np.ndarray, "L K"]:
    values, out = _norms(arrays, "attention.v", 1), _norms(arrays, "attention.o", 2)
    weight = 1.0
    for norms in (values, out):
        weight = weight * np.square(norms).reshape(len(norms), groups, -1).sum(axis=-1)
    return np.sort(np.argsort(-np.asarray(weight), axis=1, kind="stable")[:, :count], axis=1)


def _norms(arrays: Mapping[str, np.ndarray], name: str, axis: int) -> np.ndarray:
    (found,) = [array for path, array in arrays.items() if path.endswith(f".{name}.kernel")]
    return np.linalg.norm(found.astype(np.float64), axis=axis)
