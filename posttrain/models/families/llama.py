"""Llama 1 to 3.3 and compatible models (arXiv:2302.13971, arXiv:2407.21783)."""

from __future__ import annotations

from posttrain.models.config import ModelConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import attention_config, decoder_config, head_dim_of, mlp_config
from posttrain.models.names import DECODER_NAMES
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "LlamaForCausalLM"
NAMES = DECODER_NAMES


def config_from_hf(hf: Fields) -> ModelConfig:
    layers = hf.get("num_hidden_layers", int)
    bias = hf.get("attention_bias", bool, False)
    head_dim = head_dim_of(hf)
    attention = attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim),
        head_dim=head_dim,
        default_kv_heads=hf.get("num_attention_heads", int),
        # Mistral's field, in checkpoints converted to Llama.
        window=hf.optional("sliding_window", int),
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = mlp_config(hf, bias=hf.get("mlp_bias", bool, False))
    return decoder_config(hf, [attention] * layers, [mlp] * layers)
