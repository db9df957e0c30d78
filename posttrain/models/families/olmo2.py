"""OLMo 2 (arXiv:2501.00656): post-norms, and norms over whole query and key projections."""

from __future__ import annotations

from typing import Any

from posttrain.models.config import AttentionConfig, ModelConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import attention_config, decoder_config, head_dim_of, mlp_config
from posttrain.models.names import DECODER_NAMES, LAYER, Name
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "Olmo2ForCausalLM"
NAMES = {
    **DECODER_NAMES,
    "attention_post_norm.scale": Name(f"{LAYER}.post_attention_layernorm.weight"),
    "mlp_post_norm.scale": Name(f"{LAYER}.post_feedforward_layernorm.weight"),
}


def config_from_hf(hf: Fields) -> ModelConfig:
    layers = hf.get("num_hidden_layers", int)
    return post_norm_decoder(hf, [olmo_attention(hf)] * layers)


def olmo_attention(hf: Fields, **rope: Any) -> AttentionConfig:
    """Attention of OLMo; `rope`: arguments of `rope_from_hf`."""
    head_dim, bias = head_dim_of(hf), hf.get("attention_bias", bool, False)
    return attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim, **rope),
        head_dim=head_dim,
        default_kv_heads=hf.get("num_attention_heads", int),
        qk_norm="projection",
        qkv_bias=bias,
        out_bias=bias,
    )


def post_norm_decoder(hf: Fields, attentions: list[AttentionConfig]) -> ModelConfig:
    mlps = [mlp_config(hf)] * len(attentions)
    return decoder_config(hf, attentions, mlps, block={"norms": "post"}, norm_eps=1e-5)
