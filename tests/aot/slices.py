"""Meshes of TPU slices that are not there, and fields of `config.json` with real head sizes and few layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from posttrain.config import MeshSection, Remat
from posttrain.mesh import make_mesh
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.plan.lowered import model_of
from posttrain.plan.machine import topology_devices

BFLOAT16 = jnp.dtype(jnp.bfloat16)
Fields = dict[str, Any]


def mesh_of(
    kind: str, shape: str, *, data: int = 1, fsdp: int = 1, expert: int = 1, context: int = 1, tensor: int = 1
) -> Mesh:
    section = MeshSection(data=data, fsdp=fsdp, expert=expert, context=context, tensor=tensor)
    return make_mesh(section, topology_devices(kind, shape))


def on(mesh: Mesh, shape: tuple[int, ...], dtype: Any = jnp.bfloat16, spec: Any = ()) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def model(fields: Fields, mesh: Mesh, remat: Remat = "none") -> Decoder:
    return model_of(fields, Compute(dtype=BFLOAT16, mesh=mesh, remat=remat), BFLOAT16)


QWEN3: Fields = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
}
"""Qwen3-0.6B."""

QWEN3_4B: Fields = QWEN3 | {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 9728,
}

QWEN3_8B = QWEN3 | {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}

QWEN3_30B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

SMALL: Fields = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 8192,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
WINDOWED = {"sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, Fields] = {
    "deepseek_v3": ROUTED
    | {
        "num_key_value_heads": 8,
        "head_dim": None,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
    },
    "gemma2": WINDOWED
    | {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": WINDOWED | {"head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma4_text": WINDOWED
    | {"head_dim": 256, "global_head_dim": 512, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": ROUTED | {"partial_rotary_factor": 0.5, "use_qk_norm": True},
    "gpt_oss": WINDOWED
    | {
        "head_dim": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    },
    "granite": {
        "attention_multiplier": 0.1,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.2,
        "logits_scaling": 8.0,
    },
    "llama": {"head_dim": 64},
    "mistral": {"sliding_window": 256},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmo2": {},
    "olmo3": WINDOWED,
    "phi3": {"head_dim": 96},
    "qwen2": {},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 256, "qkv_bias": True},
    "qwen3": {},
    "qwen3_moe": EXPERTS | {"decoder_sparse_step": 1},
    "smollm3": {"head_dim": 64, "no_rope_layers": [1, 0]},
}
"""Fields of each family beside `SMALL`."""
