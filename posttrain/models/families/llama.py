"""Llama 1 to 3.3 and their kin (arXiv:2302.13971, arXiv:2407.21783)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.models.config import ModelConfig
from posttrain.models.hf import DECODER_NAMES, decoder_config, get

ARCHITECTURE = "LlamaForCausalLM"
NAMES = DECODER_NAMES


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    bias = get(hf, "attention_bias", bool, False)
    return decoder_config(
        hf,
        num_kv_heads=get(hf, "num_key_value_heads", int, get(hf, "num_attention_heads", int)),
        windows=[None] * get(hf, "num_hidden_layers", int),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=get(hf, "mlp_bias", bool, False),
    )
