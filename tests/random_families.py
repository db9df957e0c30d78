"""Random models of every family: sizes, vocabularies and settings drawn by a seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_init
from tests.tiny import random_model, shake

VOCABULARIES = (61, 97, 131, 160, 257, 509)
Fields = dict[str, Any]


class Draw:
    """Random choices, and the fields of `config.json` that several families have."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def number(self, low: float, high: float) -> float:
        return float(np.float32(self.rng.uniform(low, high)))

    def common(self, model_type: str) -> Fields:
        """2 or 3 layers; the width need be no multiple of the heads."""
        kv_heads = self.one(1, 2, 3)
        return {
            "model_type": model_type,
            "vocab_size": self.one(*VOCABULARIES),
            "hidden_size": self.one(22, 30, 34, 48),
            "intermediate_size": self.one(19, 37, 48),
            "num_hidden_layers": self.one(2, 2, 3),
            "num_attention_heads": kv_heads * self.one(1, 2, 3),
            "num_key_value_heads": kv_heads,
            "head_dim": self.one(6, 8, 10, 16),
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "initializer_range": 0.3,
            "tie_word_embeddings": self.one(True, False),
        }

    def biases(self) -> Fields:
        return {"attention_bias": self.one(True, False)}

    def kinds(self, layers: int) -> Fields:
        return {
            "layer_types": [self.one("full_attention", "sliding_attention") for _ in range(layers)],
            "sliding_window": self.one(3, 5, 9),
        }

    def experts(self) -> tuple[int, int]:
        """How many, and how many of them a token gets."""
        number = self.one(4, 6, 8)
        return number, self.one(1, 2, 3)


def _llama(d: Draw, f: Fields) -> Fields:
    """No window: we honour `sliding_window` there, as in a converted Mistral, transformers does not."""
    return d.biases() | {"mlp_bias": d.one(True, False)}


def _mistral(d: Draw, f: Fields) -> Fields:
    return {"sliding_window": d.one(None, 3, 7)}


def _qwen2(d: Draw, f: Fields) -> Fields:
    return {"use_sliding_window": True} | d.kinds(f["num_hidden_layers"])


def _qwen3(d: Draw, f: Fields) -> Fields:
    return _qwen2(d, f) | d.biases()


def _phi3(d: Draw, f: Fields) -> Fields:
    return {"sliding_window": d.one(None, 6), "partial_rotary_factor": d.one(0.5, 1.0), "head_dim": d.one(8, 16)}


def _olmo3(d: Draw, f: Fields) -> Fields:
    return d.biases() | d.kinds(f["num_hidden_layers"])


def _smollm3(d: Draw, f: Fields) -> Fields:
    flags = [d.one(0, 1) for _ in range(f["num_hidden_layers"])]
    return _llama(d, f) | {"no_rope_layers": flags}


def _granite(d: Draw, f: Fields) -> Fields:
    return d.biases() | {
        "mlp_bias": d.one(True, False),
        "attention_multiplier": d.number(0.1, 0.6),
        "embedding_multiplier": d.number(0.5, 12.0),
        "residual_multiplier": d.number(0.2, 1.5),
        "logits_scaling": d.number(0.3, 9.0),
    }


def _glm4(d: Draw, f: Fields) -> Fields:
    return d.biases() | {"partial_rotary_factor": 0.5, "head_dim": d.one(8, 16)}


def _whole_heads(f: Fields) -> Fields:
    """A width that transformers takes for these families: a multiple of the heads, or refused by its validator."""
    heads = f["num_attention_heads"]
    return {"hidden_size": heads * -(-f["hidden_size"] // heads)}


def _gemma2(d: Draw, f: Fields) -> Fields:
    caps = {"final_logit_softcapping": d.number(3.0, 40.0), "attn_logit_softcapping": d.number(3.0, 60.0)}
    return (
        _whole_heads(f)
        | d.biases()
        | d.kinds(f["num_hidden_layers"])
        | caps
        | {"query_pre_attn_scalar": d.one(6, 16, 31)}
    )


def _gemma3(d: Draw, f: Fields) -> Fields:
    return (
        _whole_heads(f)
        | d.biases()
        | d.kinds(f["num_hidden_layers"])
        | {
            "final_logit_softcapping": d.one(None, d.number(3.0, 40.0)),
            "query_pre_attn_scalar": d.one(6, 16, 31),
        }
    )


def _gemma4(d: Draw, f: Fields) -> Fields:
    """In four layers the last ones reuse keys and values where layers have inputs of their own: transformers cannot run
    the other."""
    layers = d.one(2, 4)
    number, top_k = d.experts()
    kinds = [d.one("full_attention", "sliding_attention"), "full_attention"]
    mixture = {"num_experts": number, "top_k_experts": top_k, "moe_intermediate_size": d.one(9, 20)}
    width = d.one(0, d.one(5, 12))
    return {
        **d.biases(),
        "num_hidden_layers": layers,
        "layer_types": kinds * (layers // 2),
        "sliding_window": d.one(3, 5, 9),
        "num_kv_shared_layers": 2 if layers == 4 and width else 0,
        "global_head_dim": d.one(8, 16),
        "attention_k_eq_v": d.one(True, False),
        "final_logit_softcapping": d.number(3.0, 40.0),
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": f["vocab_size"] + d.one(0, 3),
        **d.one({}, {"enable_moe_block": True, **mixture}),
    }


def _mixtral(d: Draw, f: Fields) -> Fields:
    number, top_k = d.experts()
    return {"sliding_window": d.one(None, 5), "num_local_experts": number, "num_experts_per_tok": top_k}


def _qwen2_moe(d: Draw, f: Fields) -> Fields:
    shared = {"shared_expert_intermediate_size": d.one(9, 20), "qkv_bias": d.one(True, False)}
    return _qwen3_moe(d, f) | shared | {"attention_bias": None, "sliding_window": None}


def _qwen3_moe(d: Draw, f: Fields) -> Fields:
    number, top_k = d.experts()
    return d.biases() | {
        "num_experts": number,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": d.one(9, 20),
        "norm_topk_prob": d.one(True, False),
        "decoder_sparse_step": d.one(1, 2),
    }


def _gpt_oss(d: Draw, f: Fields) -> Fields:
    number, top_k = d.experts()
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
    return (
        d.biases()
        | d.kinds(f["num_hidden_layers"])
        | {
            "num_local_experts": number,
            "num_experts_per_tok": top_k,
            "rope_parameters": {**yarn, "beta_fast": 4.0, "truncate": False},
        }
    )


def _grouped(d: Draw) -> Fields:
    groups = d.one(1, 2)
    return {
        "n_routed_experts": 8,
        "num_experts_per_tok": d.one(1, 2, 3),
        "n_group": groups,
        "topk_group": d.one(1, groups),
        "n_shared_experts": d.one(0, 1, 2),
        "moe_intermediate_size": d.one(9, 20),
        "routed_scaling_factor": d.number(0.5, 3.0),
        "norm_topk_prob": d.one(True, False),
        "first_k_dense_replace": d.one(0, 1),
    }


def _glm4_moe(d: Draw, f: Fields) -> Fields:
    half = {"partial_rotary_factor": 0.5, "head_dim": d.one(8, 16)}
    return d.biases() | _grouped(d) | half | {"use_qk_norm": d.one(True, False)}


def _deepseek(d: Draw, f: Fields) -> Fields:
    ranks = {"q_lora_rank": d.one(None, 7, 12), "kv_lora_rank": d.one(9, 16)}
    dims = {"qk_nope_head_dim": d.one(5, 8), "qk_rope_head_dim": d.one(4, 6), "v_head_dim": d.one(5, 8, 13)}
    whole = {"num_key_value_heads": f["num_attention_heads"], "head_dim": None}
    return d.biases() | _grouped(d) | ranks | dims | whole | {"rope_interleave": d.one(True, False)}


FAMILIES: dict[str, Callable[[Draw, Fields], Fields]] = {
    "deepseek_v3": _deepseek,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "olmo2": lambda d, f: d.biases(),
    "olmo3": _olmo3,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
}


def random_fields(family: str, seed: int) -> Fields:
    """A `config.json` of the family."""
    draw = Draw(seed + zlib.crc32(family.encode()))
    fields = draw.common(family)
    fields |= FAMILIES[family](draw, fields)
    # transformers would take null for a size
    return {name: value for name, value in fields.items() if (name, value) != ("head_dim", None)}


def random_family_model(family: str, seed: int, *, dtype: DTypeLike = jnp.float32) -> Decoder:
    """A model of `random_fields`; no bias is 0 and no norm 1."""
    compute = Compute(dtype=jnp.dtype(dtype), remat="none")
    model = random_model(config_from_init(random_fields(family, seed)), compute, dtype=dtype, seed=seed)
    shake(model, seed)
    return model
