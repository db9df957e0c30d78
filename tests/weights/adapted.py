"""Models with adapters, as training leaves them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from posttrain.config import LoRA
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_init
from posttrain.weights.lora import attach_lora
from posttrain.weights.state import ModelWeights
from tests.tiny import random_model, tiny_model

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 10))

MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}

DENSE = {key: value for key, value in MOE.items() if "expert" not in key and key != "moe_intermediate_size"}
DENSE |= {"model_type": "qwen3"}

KINDS: dict[str, LoRA] = {
    "lora": LoRA(rank=3, alpha=5.0),
    "rslora": LoRA(rank=4, alpha=3.0, rslora=True),
    "dora": LoRA(rank=3, dora=True),
    "everything": LoRA(rank=3, targets=("all-linear", "embed", "head")),
    "everything with dora": LoRA(rank=3, targets=("all-linear", "embed", "head"), dora=True),
    "layers and ranks": LoRA(
        rank=2, targets=("all-linear",), layers=(0, 2), rank_pattern={"q_proj": 4, "layers.2.mlp.up_proj": 1}, dora=True
    ),
    "tied": LoRA(rank=3, targets=("attention", "embed")),
    "tied with dora": LoRA(rank=3, targets=("attention", "embed"), dora=True),
    "experts": LoRA(rank=3, targets=("attention", "experts")),
    "experts with dora": LoRA(rank=3, targets=("experts",), dora=True),
}


def model_of(kind: str, seed: int = 0) -> Decoder:
    """The tiny model with its layers in one stack and, unless tied, a head; of experts where the name says so."""
    if kind.startswith("experts"):
        return random_model(config_from_init(MOE), Compute.of(jnp.float32), dtype=jnp.float32, seed=seed)
    return tiny_model(seed, vocab_size=96, tie_embeddings=kind.startswith("tied"), windows=(None,))


def disturb(model: Decoder, stddev: float = 0.3) -> None:
    """Give the adapter values as training leaves them: what a layer does not have stays 0."""
    weights, draw = ModelWeights(model), np.random.default_rng(2)
    new, every = {}, weights.read()
    for path in sorted(weights.trainable()):
        w = np.asarray(every[path], np.float32)
        active = np.asarray(every.get(path.rsplit(".", 1)[0] + ".lora_scale", 1.0)) != 0
        noise = draw.normal(0, stddev, w.shape) * active.reshape(active.shape + (1,) * (w.ndim - active.ndim))
        new[path] = jnp.asarray(w + noise, every[path].dtype)
    weights.write(new)


def trained(model: Decoder, lora: LoRA) -> Decoder:
    attach_lora(model, lora, seed=1)
    disturb(model)
    return model
