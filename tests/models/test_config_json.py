"""The reading of `config.json`: defaults, both styles, and one clear line for everything that it may not say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.errors import ConfigError
from posttrain.models.config import AttentionConfig, ModelConfig
from posttrain.models.hf import UNSUPPORTED, config_from_hf, config_from_init, config_to_hf, is_classifier
from posttrain.models.rope import default_frequencies
from posttrain.weights.load import init_model
from tests.models.goldens import DENSE, GEMMA, GOLDENS, MIXTURES
from tests.random_families import FAMILIES, random_fields

pytestmark = pytest.mark.fast

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 8.0]}
PHI3 = LLAMA | {"model_type": "phi3", "rope_scaling": LONGROPE, "original_max_position_embeddings": 16}
GLM4 = LLAMA | {"model_type": "glm4", "head_dim": 16, "num_key_value_heads": 2}
OLMO3 = LLAMA | {"model_type": "olmo3", "num_hidden_layers": 4}


def attentions(config: ModelConfig) -> list[AttentionConfig]:
    found = [block.attention for block in config.blocks]
    assert all(isinstance(attention, AttentionConfig) for attention in found)
    return found  # type: ignore[return-value]


def read(fields: dict[str, Any], **changes: Any) -> list[AttentionConfig]:
    return attentions(config_from_hf(fields | changes))


def windows(fields: dict[str, Any], **changes: Any) -> list[int | None]:
    return [attention.window for attention in read(fields, **changes)]


def frequencies(fields: dict[str, Any], **changes: Any) -> list[tuple[float, ...] | None]:
    return [attention.rope and attention.rope.frequencies for attention in read(fields, **changes)]


def plain(theta: float, dim: int) -> tuple[float, ...]:
    return tuple(map(float, default_frequencies(theta, dim)))


def test_defaults_are_those_of_transformers() -> None:
    config = config_from_hf(LLAMA)
    attention = attentions(config)[0]
    assert (attention.num_kv_heads, attention.head_dim, attention.window, attention.qkv_bias) == (4, 8, None, False)
    assert frequencies(LLAMA) == [plain(10_000.0, 8)] * 2
    assert (config.norm_eps, config.tie_embeddings, config.blocks[0].mlp.activation) == (1e-6, False, "silu")
    assert config_from_hf(LLAMA | {"head_dim": None}).stages == config.stages


def test_defaults_that_are_a_familys_own() -> None:
    assert config_from_hf(PHI3).norm_eps == config_from_hf(OLMO3).norm_eps == 1e-5
    assert config_from_hf(GLM4).norm_eps == 1.5625e-7
    assert read(GLM4)[0].qkv_bias and not read(GLM4)[0].out_bias
    assert read({key: value for key, value in GLM4.items() if key != "head_dim"})[0].head_dim == 128
    smollm3 = config_from_hf(LLAMA | {"model_type": "smollm3"})
    assert (smollm3.tie_embeddings, attentions(smollm3)[0].num_kv_heads) == (True, 4)
    assert read(LLAMA | {"model_type": "granite"})[0].scale == 1.0


def test_rope_scaling_in_both_styles() -> None:
    linear = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0}
    assert np.allclose(frequencies(LLAMA, **linear)[0], np.asarray(plain(500.0, 8)) / 2)
    hub = {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 500.0}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}}
    assert frequencies(LLAMA, **hub) == frequencies(LLAMA, **new) != frequencies(LLAMA, rope_theta=500.0)


def test_rope_of_a_part_of_the_head() -> None:
    phi3 = LLAMA | {"model_type": "phi3"}
    assert frequencies(phi3, partial_rotary_factor=0.5) == [plain(10_000.0, 4)] * 2
    assert frequencies(GLM4) == [plain(10_000.0, 8)] * 2
    assert frequencies(GLM4, rope_parameters={"partial_rotary_factor": 0.25}) == [plain(10_000.0, 4)] * 2


def test_windows_of_qwen() -> None:
    four = QWEN2 | {"num_hidden_layers": 4}
    assert windows(four, sliding_window=16) == [None] * 4
    assert windows(four, sliding_window=16, use_sliding_window=True, max_window_layers=3) == [None, None, None, 16]
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(four, sliding_window=16, use_sliding_window=True, layer_types=kinds) == [16, None, 16, None]
    assert windows(four, sliding_window=None, use_sliding_window=True, max_window_layers=0) == [None] * 4


def test_window_that_is_null_is_none_and_one_that_is_absent_is_the_default() -> None:
    mistral = LLAMA | {"model_type": "mistral", "num_key_value_heads": None}
    assert read(mistral)[0].num_kv_heads == 4
    assert windows(mistral) == [4096] * 2
    assert windows(mistral, sliding_window=None) == [None] * 2
    assert windows(mistral, sliding_window=7) == windows(LLAMA, sliding_window=7) == [7] * 2
    assert windows(OLMO3, sliding_window=6) == [6, 6, 6, None]
    written = config_to_hf(config_from_init(mistral | {"sliding_window": None}))
    assert written["sliding_window"] is None


def test_olmo3_stretches_only_the_layers_without_a_window() -> None:
    """transformers 5 gives the others the default theta, whatever a file of the older style says."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}
    ropes = [attention.rope for attention in read(OLMO3, rope_theta=777.0, rope_scaling=yarn)]
    assert all(rope is not None for rope in ropes)
    assert [rope.magnitude > 1 for rope in ropes if rope] == [False, False, False, True]
    assert [rope.frequencies == plain(777.0, 8) for rope in ropes if rope] == [True, True, True, False]


def test_smollm3_has_layers_without_positions() -> None:
    smollm3 = LLAMA | {"model_type": "smollm3", "num_hidden_layers": 5}
    assert [bool(f) for f in frequencies(smollm3)] == [True, True, True, False, True]
    assert [bool(f) for f in frequencies(smollm3, no_rope_layer_interval=2)] == [True, False, True, False, True]
    assert [bool(f) for f in frequencies(smollm3, no_rope_layers=[0, 1, 1, 1, 1, 1])] == [False, True, True, True, True]
    assert windows(smollm3, use_sliding_window=True, sliding_window=9) == [None, None, None, 9, None]


def test_yarn_lengthens_the_positions() -> None:
    """Model cards tell users to add it to `config.json` and leave `max_position_embeddings` as it is."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    for fields, positions in (({}, 64), (yarn, 128), (yarn | {"factor": 1.5}, 64), ({"rope_type": "yarn"}, 64)):
        config = config_from_hf(LLAMA | {"max_position_embeddings": 64, "rope_scaling": fields or None})
        assert config.max_positions == positions
        assert config_to_hf(config)["max_position_embeddings"] == 64


def test_the_run_chooses_the_set_of_longrope() -> None:
    """A set is for its own lengths: the short one is good for rows of the original length only."""
    short, long = (config_from_hf(PHI3, long_context=chosen) for chosen in (False, True))
    assert (short.max_positions, long.max_positions) == (16, 64)
    ropes = [attentions(config)[0].rope for config in (short, long)]
    assert all(rope is not None for rope in ropes)
    for rope, factors in zip(ropes, (LONGROPE["short_factor"], LONGROPE["long_factor"]), strict=True):
        assert rope is not None
        assert np.allclose(np.asarray(rope.frequencies) * factors, plain(10_000.0, 8))
        assert rope.magnitude == pytest.approx((1 + np.log(4) / np.log(16)) ** 0.5)
    plain_phi3 = {key: value for key, value in PHI3.items() if key != "rope_scaling"}
    assert config_from_hf(plain_phi3).max_positions == 64
    for fields, family in ((plain_phi3, "phi3"), (LLAMA, "llama")):
        with pytest.raises(ConfigError, match=f"^long_context: this {family} has no second set of RoPE factors"):
            config_from_hf(fields, long_context=True)


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 2.0}, {"rope_type": "default"}, {}, None])
@pytest.mark.parametrize("outer", [{}, {"rope_theta": 7e4}])
def test_rope_in_both_sections_is_read_as_by_transformers(scaling: Any, outer: dict[str, float]) -> None:
    from transformers import LlamaConfig

    fields = LLAMA | outer | {"rope_scaling": scaling, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    theirs = LlamaConfig.from_dict(fields).rope_parameters
    expected = np.asarray(plain(theirs["rope_theta"], 8)) / theirs.get("factor", 1.0)
    np.testing.assert_allclose(frequencies(fields)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "olmo2", "granite"])
def test_absent_positions_and_heads_are_those_of_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(model_type, num_attention_heads=32, num_hidden_layers=1)
    fields = {key: LLAMA[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    fields |= {"model_type": model_type, "num_attention_heads": 32, "num_hidden_layers": 1, "head_dim": 8}
    ours = config_from_hf(fields)
    assert ours.max_positions == theirs.max_position_embeddings
    assert attentions(ours)[0].num_kv_heads == theirs.num_key_value_heads
    assert "max_position_embeddings" not in config_to_hf(ours)


def test_dynamic_scaling_and_fine_tuned_yarn() -> None:
    """Dynamic scaling begins beyond the context; other programs than transformers read `finetuned`."""
    dynamic = config_from_hf(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert dynamic.max_positions == 64 and frequencies(LLAMA)[0] == attentions(dynamic)[0].rope.frequencies  # type: ignore[union-attr]
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert read(LLAMA, rope_scaling=yarn | {"finetuned": True}) == read(LLAMA, rope_scaling=yarn)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen33"}, "model_type='qwen33' is not supported; did you mean 'qwen3'?; known: "),
        ({"model_type": "qwen3_next"}, "model_type='qwen3_next' is not supported: its linear attention layers need"),
        ({"vocab_size": None}, "vocab_size: missing in the model's config.json"),
        ({"vocab_size": "96"}, "vocab_size: must be a whole number, got '96'"),
        ({"attention_bias": 1}, "attention_bias: must be true or false, got 1"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; known: silu, "),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be above 0 and finite, got 0"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "factor: missing in the model's rope_parameters"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_parameters: rope_type 'spiral' is not supported; known"),
        ({"rope_scaling": {"type": "linear"}}, "factor: missing in the model's rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 1}}, "rope_scaling: beta_fast: unknown field"),
        ({"rope_scaling": "yarn"}, "rope_scaling: must be an object, got 'yarn'"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not supported: models of this type rotate the w",
        ),
        ({"head_dim": 7}, "head_dim=7 with partial_rotary_factor=1.0 cannot be split into pairs for RoPE"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: weights quantized by 'gptq' are not"),
        (
            {"quantization_config": {}},
            "quantization_config: weights quantized by None are not supported, only mxfp4, fp8; ",
        ),
        ({"model_type": "qwen2"}, "num_key_value_heads=32 must divide num_attention_heads=4"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types: must name num_hidden_layers=2 layers, got 1"),
        (QWEN2 | {"layer_types": ["linear_attention"] * 2}, "layer_types: ['linear_attention'] not supported; known: "),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 2}, "layer_types: sliding_attention needs use_sliding_window"),
        (
            {"model_type": "smollm3", "layer_types": ["sliding_attention"] * 2},
            "layer_types: sliding_attention needs use_sliding_window",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers: must name num_hidden_layers=2 layers, got"),
        (
            PHI3 | {"rope_scaling": LONGROPE | {"short_factor": [1.0]}},
            "rope_scaling: short_factor must have 4 numbers, one for each pair; got 1",
        ),
    ],
)
def test_what_config_json_may_not_say(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_from_hf(LLAMA | changes)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_models_with_a_state_are_refused_by_name() -> None:
    for model_type, why in UNSUPPORTED.items():
        with pytest.raises(ConfigError, match=f"^model_type='{model_type}' is not supported: {why}"):
            config_from_hf({"model_type": model_type})


def test_init_refuses_unknown_fields() -> None:
    with pytest.raises(ConfigError) as raised:
        init_model(LLAMA | {"num_key_value_head": 2}, dtype=jnp.float32, seed=0)
    assert str(raised.value) == "num_key_value_head: unknown field; did you mean 'num_key_value_heads'?"


@pytest.mark.parametrize("model_type", ["llama", "mistral", "phi3", "olmo2", "olmo3", "smollm3", "granite", "glm4"])
def test_init_keeps_token_ids_and_writes_every_field(model_type: str) -> None:
    config = config_from_init(LLAMA | {"model_type": model_type, "eos_token_id": 7, "num_key_value_heads": 2})
    written = config_to_hf(config)
    assert (written["eos_token_id"], written["num_key_value_heads"], written["hidden_act"]) == (7, 2, "silu")
    assert written["rms_norm_eps"] == config.norm_eps
    assert config_from_hf(written).stages == config.stages
    assert config_from_init(written) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_model_is_made_again_from_its_file(family: str) -> None:
    for seed in range(8):
        config = config_from_init(random_fields(family, seed))
        assert config_from_init(config_to_hf(config) | {"torch_dtype": "bfloat16"}).stages == config.stages


@pytest.mark.parametrize("name", [*DENSE, *GEMMA, *MIXTURES])
def test_a_file_of_transformers_can_be_given_to_init(name: str) -> None:
    """As a loaded model is saved: with fields that no family reads."""
    config = config_from_hf(json.loads((GOLDENS / name / "config.json").read_text()))
    again = config_from_init(config_to_hf(config))
    assert (again.stages, again.max_positions, again.layer_inputs) == (
        config.stages,
        config.max_positions,
        config.layer_inputs,
    )


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4_bidirectional", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_a_file_with_a_tower_can_be_given_to_init(name: str, shared: Path) -> None:
    fields = json.loads((shared / "goldens" / "vision" / name / "config.json").read_text())
    config = config_from_hf(fields, vision="tower")
    again = config_from_init(config_to_hf(config), vision="tower")
    assert (again.stages, again.vision) == (config.stages, config.vision)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported, only 0.0; remove it"),
        ({"pretraining_tp": 2}, "pretraining_tp=2 is not supported, only 1; remove it"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef: unknown field"),
        ({"output_router_logits": True}, "output_router_logits=True is not supported, only False; remove it"),
    ],
)
def test_init_refuses_what_would_have_an_effect(changes: dict[str, Any], message: str) -> None:
    config_from_init(LLAMA | {"attention_dropout": 0, "pretraining_tp": 1, "use_cache": False})
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        config_from_init(LLAMA | changes)


def test_labels_of_a_classifier_are_counted_as_in_transformers() -> None:
    """By names, else by their number, else two; those of another architecture say nothing."""
    scored = {"architectures": ["LlamaForSequenceClassification"]}
    assert is_classifier({**scored, "id2label": {"0": "a"}}) and is_classifier({**scored, "num_labels": 1})
    for labels in ({}, {"num_labels": 2}, {"id2label": {"0": "a", "1": "b"}, "num_labels": 1}):
        with pytest.raises(ConfigError, match="needs exactly one label"):
            is_classifier({**scored, **labels})
    assert not is_classifier({"architectures": ["LlamaForCausalLM"], "num_labels": 5})
