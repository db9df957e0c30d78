"""Gemma 3, text (arXiv:2503.19786): five sliding-window layers, then a full one with a separate RoPE."""

from __future__ import annotations

from posttrain.models.config import MLPConfig, ModelConfig, Rope
from posttrain.models.families import gemma2
from posttrain.models.fields import Fields
from posttrain.models.hf import activation, attention_config, decoder_config, layer_types
from posttrain.models.rope import default_rope, rope_from_hf

ARCHITECTURE = "Gemma3ForCausalLM"
NAMES = gemma2.NAMES


def config_from_hf(hf: Fields) -> ModelConfig:
    hf.refuse("use_bidirectional_attention", False, why="attention is causal")
    hf.refuse("attn_logit_softcapping", why="Gemma 3 has no cap in its attention")
    pattern = "_sliding_window_pattern" if "_sliding_window_pattern" in hf else "sliding_window_pattern"
    num_layers, period = hf.get("num_hidden_layers", int), hf.get(pattern, int, 6)
    kinds = layer_types(hf, ["sliding_attention" if i % period else "full_attention" for i in range(1, num_layers + 1)])
    head_dim, bias = hf.get("head_dim", int, 256), hf.get("attention_bias", bool, False)
    attention = {
        kind: attention_config(
            hf,
            rope=rope,
            head_dim=head_dim,
            scale=hf.get("query_pre_attn_scalar", int, 256) ** -0.5,
            window=hf.get("sliding_window", int, 4096) if kind == "sliding_attention" else None,
            qk_norm="head",
            qkv_bias=bias,
            out_bias=bias,
        )
        for kind, rope in _ropes(hf, head_dim).items()
    }
    width, act = hf.get("intermediate_size", int), activation(hf, "hidden_activation", "gelu_pytorch_tanh")
    return decoder_config(
        hf,
        [attention[kind] for kind in kinds],
        [MLPConfig(dim=width, activation=act)] * num_layers,
        tie_embeddings=True,
        embed_scale=hf.get("hidden_size", int) ** 0.5,
        norm_offset=1.0,
        logits_soft_cap=hf.optional("final_logit_softcapping", float),
        block={"norms": "sandwich"},
    )


def _ropes(hf: Fields, head_dim: int) -> dict[str, Rope]:
    """RoPE of each layer type: from `rope_parameters`, or `rope_local_base_freq` beside Llama's fields."""
    if "rope_parameters" in hf:
        thetas = {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}
        return {kind: rope_from_hf(hf, head_dim, theta=theta, layer_type=kind) for kind, theta in thetas.items()}
    return {
        "sliding_attention": default_rope(hf.get("rope_local_base_freq", float, 10_000.0), head_dim),
        "full_attention": rope_from_hf(hf, head_dim, theta=1_000_000.0),
    }
