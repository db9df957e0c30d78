"""gpt-oss (arXiv:2508.10925): attention sinks, alternating sliding windows, experts with biases and clipped SwiGLU."""

from __future__ import annotations

from posttrain.models.config import MLPConfig, ModelConfig, MoEConfig, RouterConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import attention_config, decoder_config, layer_types, windowed
from posttrain.models.layers import SWIGLU_OAI_ALPHA
from posttrain.models.names import DECODER_NAMES, LAYER, Name, linear
from posttrain.models.rope import rope_from_hf

EXPERTS = f"{LAYER}.mlp.experts"
GATE_UP = Name(f"{EXPERTS}.gate_up_proj", fused=("mlp.experts.gate", "mlp.experts.up"), alternating=True)
GATE_UP_BIAS = Name(
    f"{EXPERTS}.gate_up_proj_bias", fused=("mlp.experts.gate_bias", "mlp.experts.up_bias"), alternating=True
)

ARCHITECTURE = "GptOssForCausalLM"
NAMES = {
    **DECODER_NAMES,
    "attention.sinks": Name(f"{LAYER}.self_attn.sinks"),
    **linear("mlp.router.proj", f"{LAYER}.mlp.router"),
    "mlp.experts.gate": GATE_UP,
    "mlp.experts.up": GATE_UP,
    "mlp.experts.down": Name(f"{EXPERTS}.down_proj"),
    "mlp.experts.gate_bias": GATE_UP_BIAS,
    "mlp.experts.up_bias": GATE_UP_BIAS,
    "mlp.experts.down_bias": Name(f"{EXPERTS}.down_proj_bias"),
}


def config_from_hf(hf: Fields) -> ModelConfig:
    hf.refuse("swiglu_alpha", SWIGLU_OAI_ALPHA, why="the activation's gain is fixed")
    hf.without_effect("hidden_act")  # "silu" in every file, and ignored by transformers
    # Required: plain frequencies would be wrong for a file without RoPE parameters.
    hf.get("rope_parameters" if "rope_parameters" in hf else "rope_scaling", dict)
    layers, head_dim = hf.get("num_hidden_layers", int), hf.get("head_dim", int, 64)
    kinds = layer_types(hf, [("sliding_attention", "full_attention")[i % 2] for i in range(layers)])
    bias, window = hf.get("attention_bias", bool, True), hf.get("sliding_window", int, 128)
    attention = attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim, theta=150_000.0),
        head_dim=head_dim,
        default_kv_heads=8,
        sinks=True,
        qkv_bias=bias,
        out_bias=bias,
    )
    key = "num_experts" if "num_experts" in hf else "num_local_experts"
    mixture = MoEConfig(
        num_experts=hf.get(key, int, 128),
        top_k=hf.get("num_experts_per_tok", int, 4),
        expert=MLPConfig(dim=hf.get("intermediate_size", int), activation="swiglu_oai", bias=True),
        router=RouterConfig(bias=True),
        swiglu_limit=hf.get("swiglu_limit", float, 7.0),
    )
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return decoder_config(hf, windowed(attention, windows), [mixture] * layers, norm_eps=1e-5)
