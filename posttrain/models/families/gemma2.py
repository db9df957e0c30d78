"""Gemma 2 (arXiv:2408.00118): pre- and post-norms, soft caps, a sliding window in every other layer."""

from __future__ import annotations

from posttrain.models.config import MLPConfig, ModelConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import activation, attention_config, decoder_config, layer_types, windowed
from posttrain.models.names import DECODER_NAMES, LAYER, Name
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "Gemma2ForCausalLM"
NAMES = {
    **DECODER_NAMES,
    "attention_post_norm.scale": Name(f"{LAYER}.post_attention_layernorm.weight"),
    "mlp_norm.scale": Name(f"{LAYER}.pre_feedforward_layernorm.weight"),
    "mlp_post_norm.scale": Name(f"{LAYER}.post_feedforward_layernorm.weight"),
}


def config_from_hf(hf: Fields) -> ModelConfig:
    hf.refuse("use_bidirectional_attention", False, why="attention is causal")
    layers, head_dim = hf.get("num_hidden_layers", int), hf.get("head_dim", int, 256)
    kinds = layer_types(hf, [("sliding_attention", "full_attention")[i % 2] for i in range(layers)])
    bias, window = hf.get("attention_bias", bool, False), hf.get("sliding_window", int, 4096)
    attention = attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim),
        head_dim=head_dim,
        scale=hf.get("query_pre_attn_scalar", int, 256) ** -0.5,
        soft_cap=hf.optional("attn_logit_softcapping", float, 50.0),
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = MLPConfig(
        dim=hf.get("intermediate_size", int), activation=activation(hf, "hidden_activation", "gelu_pytorch_tanh")
    )
    return decoder_config(
        hf,
        windowed(attention, [window if kind == "sliding_attention" else None for kind in kinds]),
        [mlp] * layers,
        block={"norms": "sandwich"},
        norm_offset=1.0,
        embed_scale=hf.get("hidden_size", int) ** 0.5,
        logits_soft_cap=hf.optional("final_logit_softcapping", float, 30.0),
        tie_embeddings=True,
    )
