"""Qwen2 and Qwen2.5 (arXiv:2407.10671): biases on queries, keys and values."""

from __future__ import annotations

from posttrain.models.config import ModelConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import attention_config, decoder_config, head_dim_of, mlp_config, qwen_windows, windowed
from posttrain.models.names import DECODER_NAMES
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "Qwen2ForCausalLM"
NAMES = DECODER_NAMES


def config_from_hf(hf: Fields) -> ModelConfig:
    windows, head_dim = qwen_windows(hf), head_dim_of(hf)
    attention = attention_config(
        hf, rope=rope_from_hf(hf, head_dim), head_dim=head_dim, default_kv_heads=32, qkv_bias=True
    )
    return decoder_config(hf, windowed(attention, windows), [mlp_config(hf)] * len(windows))
