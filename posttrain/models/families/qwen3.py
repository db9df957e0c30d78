"""Qwen3, dense (arXiv:2505.09388): RMSNorm on queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.models.config import ModelConfig
from posttrain.models.hf import DECODER_NAMES, Name, decoder_config, get, windows

ARCHITECTURE = "Qwen3ForCausalLM"
NAMES = {
    **DECODER_NAMES,
    "attention.q_norm.scale": Name("model.layers.{layer}.self_attn.q_norm.weight"),
    "attention.k_norm.scale": Name("model.layers.{layer}.self_attn.k_norm.weight"),
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    bias = get(hf, "attention_bias", bool, False)
    kv_heads = get(hf, "num_key_value_heads", int)
    return decoder_config(hf, num_kv_heads=kv_heads, windows=windows(hf), qk_norm=True, qkv_bias=bias, out_bias=bias)
