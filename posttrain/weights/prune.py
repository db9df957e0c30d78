"""A smaller model cut out of a large one: fewer layers, narrower MLPs, a narrower residual stream. To be distilled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from posttrain.config import ConfigError
from posttrain.models import hf
from posttrain.models.config import MLPConfig, ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.weights.load import outline_of
from posttrain.weights.state import ModelWeights


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """What is kept; None: all. ConfigError where the numbers do not fit the model.

    Of MLPs the neurons with the largest product of the norms of their three vectors stay, in each layer its own; of the
    residual stream the dimensions in which the matrices that read or write it are largest, in all layers the same.
    """

    layers: tuple[int, ...] | None = None
    """Numbers of the layers, from 0, rising."""
    mlp_dim: int | None = None
    embed_dim: int | None = None


def pruned_config(config: ModelConfig, plan: Pruning) -> ModelConfig:
    """The description of the smaller model."""
    if len(config.stages) != 1 or len(config.stages[0].blocks) != 1:
        raise ConfigError(f"prune: the layers of this {config.model_type} differ in kind; only models of alike layers")
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
            raise ConfigError(f"prune: mlp_dim: {config.model_type} has experts in place of an MLP; leave it out")
        _check("mlp_dim", plan.mlp_dim, block.mlp.dim)
        fields["intermediate_size"] = plan.mlp_dim
    if plan.embed_dim is not None:
        _check("embed_dim", plan.embed_dim, config.embed_dim)
        # Where it is not written, families take the quotient of width and heads.
        fields |= {"hidden_size": plan.embed_dim, "head_dim": getattr(block.attention, "head_dim", None)}
    return hf.config_from_hf(fields)


def pruned(model: Decoder, plan: Pruning) -> Decoder:
    """The smaller model; what both have is equal."""
    config = pruned_config(model.config, plan)
    weights = ModelWeights(model)
    arrays = {path: np.asarray(w) for path, w in weights.read().items()}
    dims = weights.dims()
    layers = list(range(model.config.num_layers)) if plan.layers is None else list(plan.layers)
    embed = None if plan.embed_dim is None else _widest(arrays, dims, plan.embed_dim)
    neurons = None if plan.mlp_dim is None else _strongest(arrays, plan.mlp_dim)[layers]
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
                places = neurons.reshape(len(layers), *(-1 if at == axis else 1 for at in range(1, array.ndim)))
                array = np.take_along_axis(array, places, axis=axis)
        assert array.shape == tuple(shape), (path, array.shape, shape)
        made[path] = jnp.asarray(array)
    return outline.bind(made)


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
    def norms(name: str, axis: int) -> np.ndarray:
        (found,) = [array for path, array in arrays.items() if path.endswith(f".mlp.{name}.kernel")]
        return np.linalg.norm(found.astype(np.float64), axis=axis)

    strength = norms("gate", 1) * norms("up", 1) * norms("down", 2)
    return np.sort(np.argsort(-strength, axis=1, kind="stable")[:, :count], axis=1)
