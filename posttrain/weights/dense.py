"""MoE to dense: the most used experts of each layer concatenated into one MLP, as a start for distillation."""

from __future__ import annotations

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from posttrain.errors import ConfigError
from posttrain.models import hf
from posttrain.models.config import AttentionConfig, ModelConfig, MoEConfig
from posttrain.models.decoder import Decoder
from posttrain.models.fields import Fields
from posttrain.weights.load import outline_of
from posttrain.weights.state import ModelWeights
from posttrain.weights.upcycle import TARGETS, differences

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
    kept = {key: value for key, value in known.items() if key not in EXPERT_FIELDS}
    changes = {
        "model_type": family,
        "architectures": [hf.family(family).ARCHITECTURE],
        "intermediate_size": experts * moe.expert.dim,
    }
    config = replace(hf.config_from_hf(kept | changes), generation_json=mixture.generation_json)
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
        kept = np.take_along_axis(np.asarray(source, np.float32), chosen[:, :, None, None], axis=1)
        if name.startswith("down"):
            joined = (kept * share[:, :, None, None]).reshape(shape)
        else:
            joined = kept.swapaxes(1, 2).reshape(shape)
        arrays[path] = jnp.asarray(joined.astype(source.dtype))
    return weights.bind(arrays)
