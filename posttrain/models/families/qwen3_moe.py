"""Qwen3-MoE (arXiv:2505.09388): no shared expert, RMSNorm on queries and keys."""

from __future__ import annotations

from posttrain.models.config import ModelConfig
from posttrain.models.families.qwen2_moe import EXPERT_NAMES, mixed_layers, mixture_config
from posttrain.models.fields import Fields
from posttrain.models.hf import attention_config, decoder_config, head_dim_of
from posttrain.models.names import DECODER_NAMES
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "Qwen3MoeForCausalLM"
NAMES = {**DECODER_NAMES, **EXPERT_NAMES}


def config_from_hf(hf: Fields) -> ModelConfig:
    head_dim, bias = head_dim_of(hf), hf.get("attention_bias", bool, False)
    window = hf.get("sliding_window", int, 4096) if hf.get("use_sliding_window", bool, False) else None
    attention = attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim),
        head_dim=head_dim,
        default_kv_heads=4,
        window=window,
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
    )
    mixture = mixture_config(hf, num_experts=128, top_k=8, dim=768, shared=None)
    mlps = mixed_layers(hf, mixture)
    return decoder_config(hf, [attention] * len(mlps), mlps)
