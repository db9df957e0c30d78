"""GLM-4-0414, dense (arXiv:2406.12793): partial interleaved RoPE, pre- and post-norms."""

from __future__ import annotations

from posttrain.models.config import ModelConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import attention_config, decoder_config, mlp_config
from posttrain.models.names import DECODER_NAMES, LAYER, Name, fused
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "Glm4ForCausalLM"
NAMES = {
    **DECODER_NAMES,
    "attention_post_norm.scale": Name(f"{LAYER}.post_self_attn_layernorm.weight"),
    "mlp_post_norm.scale": Name(f"{LAYER}.post_mlp_layernorm.weight"),
    **fused(f"{LAYER}.mlp.gate_up_proj", "mlp.gate", "mlp.up"),
}


def config_from_hf(hf: Fields) -> ModelConfig:
    layers, head_dim = hf.get("num_hidden_layers", int), hf.get("head_dim", int, 128)
    attention = attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim, rotary_factor=0.5, interleaved=True),
        head_dim=head_dim,
        default_kv_heads=2,
        qkv_bias=hf.get("attention_bias", bool, True),
    )
    mlps = [mlp_config(hf)] * layers
    return decoder_config(hf, [attention] * layers, mlps, block={"norms": "sandwich"}, norm_eps=1.5625e-07)
