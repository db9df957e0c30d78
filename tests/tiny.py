"""The tiny fixture: a real `Decoder` with grouped heads, a window in one layer, qk-norm or biases."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import DTypeLike

from posttrain.config import Remat
from posttrain.models.config import Compute, ModelConfig, stages_of
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_init
from posttrain.runtime.xla import Recent
from posttrain.train.optimizers import Optimizer
from posttrain.weights.load import outline_of
from posttrain.weights.state import ModelWeights

WINDOW = 5

HF_NAMES = {
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
}


def tiny_config(
    *,
    num_layers: int | None = None,
    windows: tuple[int | None, ...] = (None, WINDOW),
    qk_norm: bool = True,
    bias: bool = False,
    **changes: Any,
) -> ModelConfig:
    """4 query and 2 key-value heads of 8, embed 32, vocabulary 512; `changes` are fields of `config.json`, some under
    our names.

    Layer i has `windows[i % len(windows)]`: by default there is one of each, or a stack of three that are alike. With
    `qk_norm` it is a qwen3, else with `bias` a qwen2, else a llama (which has a form on disk only without windows).
    """
    if num_layers is None:
        num_layers = 3 if len(windows) == 1 else len(windows)
    model_type = "qwen3" if qk_norm else "qwen2" if bias else "llama"
    kinds = [windows[i % len(windows)] for i in range(num_layers)]
    fields = {
        "model_type": model_type,
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    if model_type != "llama" and any(kinds):
        types = ["full_attention" if kind is None else "sliding_attention" for kind in kinds]
        fields |= {"use_sliding_window": True, "sliding_window": max(filter(None, kinds)), "layer_types": types}
    if model_type == "qwen3":
        fields["attention_bias"] = bias
    config = config_from_init(fields | {HF_NAMES.get(key, key): value for key, value in changes.items()})
    if model_type == "llama" and any(kinds):
        windowed = [
            replace(block, attention=replace(block.attention, window=kind))
            for block, kind in zip(config.blocks, kinds, strict=True)
        ]
        config = replace(config, stages=stages_of(tuple(windowed)))
    return config


def tiny_model(
    seed: int = 0,
    *,
    dtype: DTypeLike = jnp.float32,
    compute_dtype: DTypeLike | None = None,
    remat: Remat = "none",
    **changes: Any,
) -> Decoder:
    """A `Decoder` of `tiny_config(**changes)` with random weights."""
    compute = Compute(dtype=jnp.dtype(compute_dtype or dtype), remat=remat)
    return random_model(tiny_config(**changes), compute, dtype=dtype, seed=seed)


@functools.lru_cache(maxsize=64)
def outline(config: ModelConfig, compute: Compute, dtype: np.dtype) -> ModelWeights:
    """Model of shapes, to bind arrays to."""
    return ModelWeights(outline_of(config, compute, dtype))


def model_of_fields(fields: dict[str, Any]) -> Decoder:
    """`random_model` in float32 from the fields of a `config.json`."""
    return random_model(config_from_init(fields), Compute.of(jnp.float32), dtype=jnp.float32, seed=0)


def random_model(config: ModelConfig, compute: Compute, *, dtype: DTypeLike, seed: int) -> Decoder:
    """Norms are 1 and biases 0."""
    weights = outline(config, compute, jnp.dtype(dtype))
    # Not JAX's numbers, whose programs take longer to compile than many a test of the model.
    draw = np.random.default_rng(seed)

    def born(path: str, shape: tuple[int, ...]) -> np.ndarray:
        if path.endswith(("scale", "bias")):
            return np.full(shape, float(path.endswith("scale")))
        return draw.normal(0, config.initializer_range, shape)

    return weights.bind({path: on_device(born(path, shape), dtype) for path, _, shape in weights.shapes()})


def on_device(array: np.ndarray, dtype: DTypeLike) -> Array:
    """Convert before, for which JAX would compile a program of each shape."""
    return jax.device_put(array.astype(dtype))


def shake(model: Decoder, seed: int, stddev: float = 0.1) -> None:
    """Add noise to every parameter, so that biases, norms and adapters count."""
    weights, draw = ModelWeights(model), np.random.default_rng(seed)
    every = sorted(weights.read().items())
    weights.write({path: on_device(np.asarray(w) + draw.normal(0, stddev, w.shape), w.dtype) for path, w in every})


FORWARDS = Recent[Any](8)


def sgd(rate: float) -> Optimizer:
    """Optimizer whose trainers share their programs; the rate is an argument of the compiled step."""
    return Optimizer(transformation=optax.inject_hyperparams(optax.sgd)(learning_rate=rate), recipe=("sgd", rate))


def forward(model: Decoder, tokens: Any, positions: Any = None, segments: Any = None) -> Array:
    """Logits of whole rows, compiled once for equal models; by default each row is one sequence."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    segments = jnp.ones_like(tokens) if segments is None else segments
    weights = ModelWeights(model)

    def make() -> Any:
        shapes = weights.outline()

        def run(arrays: Any, *inputs: Array) -> Array:
            bound = shapes.bind(arrays)
            return bound.logits(bound(*inputs)[0])

        return jax.jit(run)

    run = FORWARDS.of((weights.graph, frozenset((p, x.shape, x.dtype) for p, x in weights.structs().items())), make)
    return run(weights.read(), tokens, jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32))
