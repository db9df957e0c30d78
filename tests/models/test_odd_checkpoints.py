"""Random checkpoints of the dense families with sizes and settings that the goldens do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.goldens import random_checkpoint, same_as_transformers

pytestmark = pytest.mark.thorough

BASE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 3e-4,
    "pad_token_id": 0,
}
ALONE = {"num_key_value_heads": 1}
BIASES = {"attention_bias": True, "mlp_bias": True}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


def rope(kind: str, **own: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 300.0, **own}}


LINEAR = rope("linear", factor=2.5)
LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_position_embeddings=16)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0)
FACTORS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.5, 2.0, 4.0, 9.0]}
LOCAL = {"rope_type": "default", "rope_theta": 50.0}
GLOBAL = {"rope_type": "linear", "factor": 3.0, "rope_theta": 900.0}
KINDS = ["full_attention", "sliding_attention", "full_attention"]
HYBRID = {"num_hidden_layers": 3, "layer_types": KINDS, "sliding_window": 5, "use_sliding_window": True}

CASES: dict[str, dict[str, Any]] = {
    "llama_wide_heads": {"head_dim": 10, **ALONE, **BIASES, **TIED, **LLAMA3},
    "llama_gelu": {"head_dim": 2, "hidden_act": "gelu", **YARN},
    "llama_dynamic": {**rope("dynamic", factor=4.0), "num_hidden_layers": 1},
    "llama_linear": {**LINEAR, "num_hidden_layers": 1},
    "qwen2_hybrid": {**HYBRID, **ALONE, **TIED, **YARN},
    "qwen2_one_layer": {"num_hidden_layers": 1, **LINEAR},
    "qwen3_hybrid": {**HYBRID, "head_dim": 6, "attention_bias": True, **TIED, **YARN},
    "qwen3_alone": {"head_dim": 14, **ALONE, **LLAMA3},
    "mistral_no_window": {"sliding_window": None, "head_dim": 14, **ALONE, **TIED},
    "mistral_window": {"sliding_window": 3, **YARN},
    "phi3_whole": {"sliding_window": 4, **TIED, **rope("default", partial_rotary_factor=1.0)},
    "phi3_part": {**ALONE, **rope("default", partial_rotary_factor=0.5)},
    "olmo2_biases": {"attention_bias": True, **ALONE, **TIED, **LINEAR},
    "olmo2_yarn": {"hidden_act": "gelu_pytorch_tanh", **YARN},
    "olmo3_own_ropes": {
        **HYBRID,
        "attention_bias": True,
        "rope_parameters": {"sliding_attention": LOCAL, "full_attention": GLOBAL},
    },
    "smollm3_windows": {**HYBRID, "no_rope_layers": [1, 0, 0], **ALONE, **BIASES, **UNTIED, **LINEAR},
    "smollm3_intervals": {"num_hidden_layers": 3, "no_rope_layer_interval": 2, **TIED, **YARN},
    "granite_biases": {
        "attention_multiplier": 0.7,
        "embedding_multiplier": 1.3,
        "residual_multiplier": 2,
        "logits_scaling": 0.4,
        **ALONE,
        **BIASES,
        **TIED,
        **LLAMA3,
    },
    "glm4_no_biases": {"head_dim": 12, "attention_bias": False, **TIED, **rope("default", partial_rotary_factor=0.25)},
    "glm4_whole": {"head_dim": 6, **ALONE, **rope("default", partial_rotary_factor=1.0)},
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    random_checkpoint(tmp_path, BASE | {"model_type": name.split("_")[0]} | CASES[name])
    same_as_transformers(tmp_path)


@pytest.mark.parametrize("long", [False, True])
def test_both_sets_of_longrope(long: bool, tmp_path: Path) -> None:
    """A row longer than the original length has the long factors in transformers, and in a run that asks for them."""
    fields = BASE | {"model_type": "phi3", "original_max_position_embeddings": 12, **ALONE}
    random_checkpoint(tmp_path, fields | rope("longrope", partial_rotary_factor=1.0, **FACTORS))
    model = same_as_transformers(tmp_path, length=20 if long else 12, long_context=long)
    assert model.config.max_positions == (64 if long else 12)
