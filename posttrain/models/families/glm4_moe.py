"""GLM-4.5 to 4.7 (arXiv:2508.06471): grouped-query attention, partial RoPE, MoE as in DeepSeek-V3."""

from __future__ import annotations

from posttrain.models.config import ModelConfig
from posttrain.models.families.deepseek_v3 import MIXTURE_NAMES, further_layers, grouped_mixtures
from posttrain.models.fields import Fields
from posttrain.models.hf import attention_config, decoder_config, head_dim_of
from posttrain.models.names import DECODER_NAMES
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "Glm4MoeForCausalLM"
NAMES = {**DECODER_NAMES, **MIXTURE_NAMES}


def config_from_hf(hf: Fields) -> ModelConfig:
    head_dim = head_dim_of(hf)
    attention = attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim, rotary_factor=0.5),
        head_dim=head_dim,
        default_kv_heads=8,
        qk_norm="head" if hf.get("use_qk_norm", bool, False) else None,
        qkv_bias=hf.get("attention_bias", bool, False),
    )
    mlps = grouped_mixtures(hf, first_dense=1, groups=(1, 1), scale=1.0, num_experts=128, dim=1408)
    return decoder_config(hf, [attention] * len(mlps), mlps, norm_eps=1e-5, further_layers=further_layers(hf))
