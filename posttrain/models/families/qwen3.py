"""Qwen3, dense (arXiv:2505.09388): RMSNorm on queries and keys."""

from __future__ import annotations

from posttrain.models.config import ModelConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import attention_config, decoder_config, mlp_config, qwen_windows, windowed
from posttrain.models.names import DECODER_NAMES
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "Qwen3ForCausalLM"
NAMES = DECODER_NAMES


def config_from_hf(hf: Fields) -> ModelConfig:
    windows, head_dim = qwen_windows(hf), hf.get("head_dim", int, 128)
    bias = hf.get("attention_bias", bool, False)
    attention = attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim),
        head_dim=head_dim,
        default_kv_heads=32,
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
    )
    return decoder_config(hf, windowed(attention, windows), [mlp_config(hf)] * len(windows))
