"""Mixtral (arXiv:2401.04088): Mistral with eight experts, two per token."""

from __future__ import annotations

from posttrain.models.config import ModelConfig, MoEConfig, RouterConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import attention_config, decoder_config, head_dim_of, mlp_config
from posttrain.models.names import DECODER_NAMES, LAYER, Name, linear
from posttrain.models.rope import rope_from_hf

MOE = f"{LAYER}.block_sparse_moe"

ARCHITECTURE = "MixtralForCausalLM"
NAMES = {
    **DECODER_NAMES,
    **linear("mlp.router.proj", f"{MOE}.gate"),
    "mlp.experts.gate": Name(f"{MOE}.experts.{{expert}}.w1.weight", transpose=True),
    "mlp.experts.up": Name(f"{MOE}.experts.{{expert}}.w3.weight", transpose=True),
    "mlp.experts.down": Name(f"{MOE}.experts.{{expert}}.w2.weight", transpose=True),
}


def config_from_hf(hf: Fields) -> ModelConfig:
    layers, head_dim = hf.get("num_hidden_layers", int), head_dim_of(hf)
    attention = attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim, theta=1_000_000.0),
        head_dim=head_dim,
        default_kv_heads=8,
        window=hf.optional("sliding_window", int),
    )
    key = "num_experts" if "num_experts" in hf else "num_local_experts"
    mixture = MoEConfig(
        num_experts=hf.get(key, int, 8),
        top_k=hf.get("num_experts_per_tok", int, 2),
        expert=mlp_config(hf),
        router=RouterConfig(),
    )
    return decoder_config(hf, [attention] * layers, [mixture] * layers, norm_eps=1e-5)
