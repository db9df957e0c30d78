"""DeepSeek-V3 and R1, Moonlight (arXiv:2412.19437): latent attention, experts selected within groups."""

from __future__ import annotations

from posttrain.models.config import LatentAttentionConfig, MLPConfig, ModelConfig, MoEConfig, RouterConfig
from posttrain.models.families.qwen2_moe import EXPERT_NAMES
from posttrain.models.fields import Fields
from posttrain.models.hf import activation, decoder_config, mlp_config
from posttrain.models.names import DECODER_NAMES, LAYER, Name, linear
from posttrain.models.rope import rope_from_hf, yarn_magnitude

ARCHITECTURE = "DeepseekV3ForCausalLM"
MIXTURE_NAMES = {
    **EXPERT_NAMES,
    "mlp.router.correction": Name(f"{LAYER}.mlp.gate.e_score_correction_bias"),
    **linear("mlp.shared.gate", f"{LAYER}.mlp.shared_experts.gate_proj"),
    **linear("mlp.shared.up", f"{LAYER}.mlp.shared_experts.up_proj"),
    **linear("mlp.shared.down", f"{LAYER}.mlp.shared_experts.down_proj"),
}
NAMES = {
    **DECODER_NAMES,
    **MIXTURE_NAMES,
    **linear("attention.q_down", f"{LAYER}.self_attn.q_a_proj"),
    "attention.q_norm.scale": Name(f"{LAYER}.self_attn.q_a_layernorm.weight"),
    **linear("attention.q_up", f"{LAYER}.self_attn.q_b_proj"),
    **linear("attention.kv_down", f"{LAYER}.self_attn.kv_a_proj_with_mqa"),
    "attention.kv_norm.scale": Name(f"{LAYER}.self_attn.kv_a_layernorm.weight"),
    **linear("attention.kv", f"{LAYER}.self_attn.kv_b_proj"),
}


def config_from_hf(hf: Fields) -> ModelConfig:
    mlps = grouped_mixtures(hf, first_dense=3, groups=(8, 4), scale=2.5, num_experts=256, dim=2048)
    return decoder_config(hf, [_attention(hf)] * len(mlps), mlps, further_layers=further_layers(hf))


def _attention(hf: Fields) -> LatentAttentionConfig:
    num_heads = hf.get("num_attention_heads", int)
    hf.refuse("num_key_value_heads", num_heads, why="latent attention has keys and values for every head")
    nope_dim, rope_dim = hf.get("qk_nope_head_dim", int, 128), hf.get("qk_rope_head_dim", int, 64)
    hf.refuse("head_dim", rope_dim, why=f"the rotated part of a head has qk_rope_head_dim={rope_dim}")
    hf.refuse("qk_head_dim", nope_dim + rope_dim, why="it is qk_nope_head_dim + qk_rope_head_dim")
    return LatentAttentionConfig(
        num_heads=num_heads,
        q_rank=hf.optional("q_lora_rank", int, 1536),
        kv_rank=hf.get("kv_lora_rank", int, 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=hf.get("v_head_dim", int, 128),
        rope=rope_from_hf(hf, rope_dim, interleaved=hf.get("rope_interleave", bool, True)),
        scale=(nope_dim + rope_dim) ** -0.5 * _softmax_gain(hf),
        norm_eps=1e-6,
        bias=hf.get("attention_bias", bool, False),
    )


def _softmax_gain(hf: Fields) -> float:
    """Square of YaRN's attention factor, which scales attention logits here instead of the rotated vectors."""
    rope = hf.section("rope_parameters" if "rope_parameters" in hf else "rope_scaling")
    weight = rope.optional("mscale_all_dim", float)
    return yarn_magnitude(rope.get("factor", float), weight) ** 2 if weight else 1.0


def further_layers(hf: Fields) -> int:
    return hf.get("num_nextn_predict_layers", int, 0)


def grouped_mixtures(
    hf: Fields, *, first_dense: int, groups: tuple[int, int], scale: float, num_experts: int, dim: int
) -> list[MLPConfig | MoEConfig]:
    """MLPs of DeepSeek-V3 and related families, with a family's defaults: the first layers are dense, the others
    MoE."""
    hf.refuse("scoring_func", "sigmoid", why="router scores are sigmoids")
    hf.refuse("topk_method", "noaux_tc", why="experts are chosen by corrected scores within groups")
    hf.refuse("moe_layer_freq", 1, why="every layer after the first dense ones is an MoE layer")
    router = RouterConfig(
        score="sigmoid",
        normalize=hf.get("norm_topk_prob", bool, True),
        scale=hf.get("routed_scaling_factor", float, scale),
        correction=True,
        num_groups=hf.get("n_group", int, groups[0]),
        top_groups=hf.get("topk_group", int, groups[1]),
    )
    width, act = hf.get("moe_intermediate_size", int, dim), activation(hf)
    num_shared = hf.get("n_shared_experts", int, 1)
    mixture = MoEConfig(
        num_experts=hf.get("n_routed_experts", int, num_experts),
        top_k=hf.get("num_experts_per_tok", int, 8),
        expert=MLPConfig(dim=width, activation=act),
        router=router,
        shared=MLPConfig(dim=width * num_shared, activation=act) if num_shared else None,
    )
    dense, first_dense = mlp_config(hf), hf.get("first_k_dense_replace", int, first_dense)
    return [dense if i < first_dense else mixture for i in range(hf.get("num_hidden_layers", int))]
