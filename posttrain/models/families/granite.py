"""Granite 3 and 4, dense: Llama with multipliers on embeddings, attention, residuals and logits."""

from __future__ import annotations

from posttrain.models.config import ModelConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import attention_config, decoder_config, head_dim_of, mlp_config
from posttrain.models.names import DECODER_NAMES
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "GraniteForCausalLM"
NAMES = DECODER_NAMES


def config_from_hf(hf: Fields) -> ModelConfig:
    layers, head_dim = hf.get("num_hidden_layers", int), head_dim_of(hf)
    bias = hf.get("attention_bias", bool, False)
    attention = attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim),
        head_dim=head_dim,
        default_kv_heads=hf.get("num_attention_heads", int),
        scale=hf.get("attention_multiplier", float, 1.0),
        qkv_bias=bias,
        out_bias=bias,
    )
    return decoder_config(
        hf,
        [attention] * layers,
        [mlp_config(hf, bias=hf.get("mlp_bias", bool, False))] * layers,
        block={"residual_scale": hf.get("residual_multiplier", float, 1.0)},
        embed_scale=hf.get("embedding_multiplier", float, 1.0),
        logits_scale=1.0 / hf.get("logits_scaling", float, 1.0),
    )
