"""Phi-3, Phi-3.5 and Phi-4 (arXiv:2404.14219): fused projections, LongRoPE."""

from __future__ import annotations

from posttrain.models.config import ModelConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import attention_config, decoder_config, head_dim_of, mlp_config
from posttrain.models.names import DECODER_NAMES, LAYER, fused
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "Phi3ForCausalLM"
NAMES = {
    **DECODER_NAMES,
    **fused(f"{LAYER}.self_attn.qkv_proj", "attention.q", "attention.k", "attention.v"),
    **fused(f"{LAYER}.mlp.gate_up_proj", "mlp.gate", "mlp.up"),
}


def config_from_hf(hf: Fields) -> ModelConfig:
    layers, head_dim = hf.get("num_hidden_layers", int), head_dim_of(hf)
    attention = attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim, rotary_factor=1.0),
        head_dim=head_dim,
        default_kv_heads=hf.get("num_attention_heads", int),
        window=hf.optional("sliding_window", int),
    )
    return decoder_config(hf, [attention] * layers, [mlp_config(hf)] * layers, norm_eps=1e-5)
