"""Mistral 7B and compatible models (arXiv:2310.06825): Llama with a sliding window in every layer."""

from __future__ import annotations

from posttrain.models.config import ModelConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import attention_config, decoder_config, head_dim_of, mlp_config
from posttrain.models.names import DECODER_NAMES
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "MistralForCausalLM"
NAMES = DECODER_NAMES


def config_from_hf(hf: Fields) -> ModelConfig:
    layers, head_dim = hf.get("num_hidden_layers", int), head_dim_of(hf)
    attention = attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim),
        head_dim=head_dim,
        default_kv_heads=8,
        window=hf.optional("sliding_window", int, 4096),
    )
    return decoder_config(hf, [attention] * layers, [mlp_config(hf)] * layers)
