"""Qwen2 and Qwen2.5 (arXiv:2407.10671): biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.models.config import ModelConfig
from posttrain.models.hf import DECODER_NAMES, decoder_config, get, windows

ARCHITECTURE = "Qwen2ForCausalLM"
NAMES = DECODER_NAMES


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    kv_heads = get(hf, "num_key_value_heads", int)
    return decoder_config(hf, num_kv_heads=kv_heads, windows=windows(hf), qkv_bias=True)
