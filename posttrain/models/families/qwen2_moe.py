"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671, section 2.2.2): many small experts and a shared expert."""

from __future__ import annotations

from posttrain.errors import ConfigError
from posttrain.models.config import MLPConfig, ModelConfig, MoEConfig, RouterConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import (
    activation,
    attention_config,
    decoder_config,
    head_dim_of,
    layer_types,
    mlp_config,
    windowed,
)
from posttrain.models.names import DECODER_NAMES, LAYER, Name, linear
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "Qwen2MoeForCausalLM"
EXPERT_NAMES = {
    **linear("mlp.router.proj", f"{LAYER}.mlp.gate"),
    "mlp.experts.gate": Name(f"{LAYER}.mlp.experts.{{expert}}.gate_proj.weight", transpose=True),
    "mlp.experts.up": Name(f"{LAYER}.mlp.experts.{{expert}}.up_proj.weight", transpose=True),
    "mlp.experts.down": Name(f"{LAYER}.mlp.experts.{{expert}}.down_proj.weight", transpose=True),
}
NAMES = {
    **DECODER_NAMES,
    **EXPERT_NAMES,
    **linear("mlp.shared.gate", f"{LAYER}.mlp.shared_expert.gate_proj"),
    **linear("mlp.shared.up", f"{LAYER}.mlp.shared_expert.up_proj"),
    **linear("mlp.shared.down", f"{LAYER}.mlp.shared_expert.down_proj"),
    **linear("mlp.shared_gate", f"{LAYER}.mlp.shared_expert_gate"),
}


def config_from_hf(hf: Fields) -> ModelConfig:
    head_dim = head_dim_of(hf)
    attention = attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim),
        head_dim=head_dim,
        default_kv_heads=16,
        qkv_bias=hf.get("qkv_bias", bool, True),
    )
    shared = MLPConfig(dim=hf.get("shared_expert_intermediate_size", int, 5632), activation=activation(hf))
    mixture = mixture_config(hf, num_experts=60, top_k=4, dim=1408, shared=shared)
    return decoder_config(hf, windowed(attention, _windows(hf)), mixed_layers(hf, mixture))


def mixture_config(hf: Fields, *, num_experts: int, top_k: int, dim: int, shared: MLPConfig | None) -> MoEConfig:
    """MoE of Qwen, with a family's defaults."""
    expert = MLPConfig(dim=hf.get("moe_intermediate_size", int, dim), activation=activation(hf))
    # transformers writes either name.
    key = "num_local_experts" if "num_local_experts" in hf else "num_experts"
    return MoEConfig(
        num_experts=hf.get(key, int, num_experts),
        top_k=hf.get("num_experts_per_tok", int, top_k),
        expert=expert,
        router=RouterConfig(normalize=hf.get("norm_topk_prob", bool, False)),
        shared=shared,
        shared_gate=shared is not None,
    )


def mixed_layers(hf: Fields, mixture: MoEConfig) -> list[MLPConfig | MoEConfig]:
    """MLP of each layer: every `decoder_sparse_step`-th is MoE, except `mlp_only_layers`."""
    dense, step = mlp_config(hf), hf.get("decoder_sparse_step", int, 1)
    dense_only = hf.get("mlp_only_layers", list, [])
    num_layers = hf.get("num_hidden_layers", int)
    if step < 1:
        raise ConfigError(f"decoder_sparse_step={step} must be at least 1")
    return [dense if i in dense_only or (i + 1) % step else mixture for i in range(num_layers)]


def _windows(hf: Fields) -> list[int | None]:
    """Sliding window of each layer: by default every other layer before `max_window_layers`."""
    hf.optional("sliding_window", int)
    used, first_full = hf.get("use_sliding_window", bool, False), hf.get("max_window_layers", int, 28)
    layers = range(hf.get("num_hidden_layers", int))
    default = ["sliding_attention" if used and i < first_full and i % 2 == 0 else "full_attention" for i in layers]
    kinds = layer_types(hf, default)
    if not used and "sliding_attention" in kinds:
        raise ConfigError("layer_types: sliding_attention needs use_sliding_window=true and sliding_window")
    window = hf.get("sliding_window", int, 4096) if used else None
    return [window if kind == "sliding_attention" else None for kind in kinds]
