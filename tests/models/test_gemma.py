"""The Gemma families: goldens, other sizes against transformers, and what their files may say."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file, save_file

from posttrain.errors import ConfigError
from posttrain.models import decoder
from posttrain.models.config import AttentionConfig, ModelConfig
from posttrain.models.hf import config_from_hf, config_from_init
from posttrain.models.vision import gemma3, gemma4
from posttrain.weights.load import load_model
from posttrain.weights.save import hf_tensors, save_model
from posttrain.weights.state import ModelWeights
from tests.models.goldens import (
    GEMMA,
    GOLDENS,
    ROUNDING,
    Golden,
    GoldenChecks,
    decode,
    transformers_logits,
)


def _param(name: str) -> Any:
    """With images: the same text model under other names; one runs each time."""
    return name if name == "gemma4_text" else pytest.param(name, marks=pytest.mark.thorough)


@pytest.fixture(scope="module", params=map(_param, GEMMA))
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


class TestGoldens(GoldenChecks): ...


SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "rms_norm_eps": 1e-4,
    "pad_token_id": 0,
}
GEMMA2 = SIZES | {"model_type": "gemma2", "num_hidden_layers": 3}
GEMMA3 = SIZES | {"model_type": "gemma3_text", "num_hidden_layers": 8}
GEMMA4 = SIZES | {"model_type": "gemma4_text", "global_head_dim": 12, "hidden_size_per_layer_input": 0}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
MIXTURE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 14}
INPUTS = {"vocab_size_per_layer_input": 70, "hidden_size_per_layer_input": 6}
LOCAL, GLOBAL = "sliding_attention", "full_attention"

CASES: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA2 | {"attention_bias": True, "query_pre_attn_scalar": 7, "attn_logit_softcapping": None},
    "gemma3": GEMMA3
    | {"tie_word_embeddings": False, "final_logit_softcapping": 9.0, "attention_bias": True}
    | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_local_base_freq": 500.0},
    "gemma4_dense": GEMMA4
    | KEYS_AS_VALUES
    | {"num_hidden_layers": 8, "use_bidirectional_attention": "vision", "final_logit_softcapping": 9.0},
    "gemma4_shared": GEMMA4
    | INPUTS
    | {"num_hidden_layers": 8, "num_kv_shared_layers": 4, "use_double_wide_mlp": True, "attention_bias": True}
    | {"layer_types": [LOCAL, LOCAL, LOCAL, GLOBAL] * 2},
    "gemma4_mixture": GEMMA4 | KEYS_AS_VALUES | MIXTURE | {"num_hidden_layers": 4},
}
"""Fields of `config.json`: layers that are no multiple of the pattern, heads that are no share of the embedding."""


def random_checkpoint(fields: dict[str, Any], folder: Path) -> Any:
    """A model of transformers with random weights, written to the folder. Skips the test where torch is not there."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if not name.endswith(("embed_scale", "inv_freq", "position_ids")):
                weight.add_(torch.randn_like(weight) * 0.15)
    model.save_pretrained(folder)
    return model.eval()


class Case(NamedTuple):
    theirs: Any
    folder: Path
    tokens: np.ndarray

    def logits(self, tokens: np.ndarray) -> Any:
        import torch

        return self.theirs(torch.from_numpy(np.asarray(tokens, np.int64))).logits


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    tokens = np.random.default_rng(1).integers(1, 64, (2, 13)).astype(np.int32)
    return Case(random_checkpoint(CASES[request.param], folder), folder, tokens)


@pytest.mark.thorough
def test_other_sizes(case: Case, scanned: None, tmp_path: Path) -> None:
    """Logits, gradients, and files that transformers reads."""
    import torch

    out = np.random.default_rng(2).normal(size=(*case.tokens.shape, 64)).astype(np.float32)
    case.theirs.zero_grad()
    theirs = case.logits(case.tokens)
    (theirs * torch.from_numpy(out)).sum().backward()
    expected = {name: parameter.grad.numpy() for name, parameter in case.theirs.named_parameters()}
    model = load_model(case.folder)
    weights, tokens = ModelWeights(model), jnp.asarray(case.tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradient(arrays: Any) -> Any:
        bound = weights.bind(arrays)
        logits = bound.logits(bound(tokens, positions, jnp.ones_like(tokens))[0])
        return (logits * out).sum(), logits

    arrays, logits = gradient(weights.read())
    assert_allclose(logits, theirs.detach(), atol=ROUNDING, rtol=0)
    got = dict(hf_tensors(weights.bind(arrays)))
    assert {name for name in got if not name.endswith("layer_scalar")} == expected.keys()
    for name, value in got.items():
        # What transformers keeps as a buffer has no gradient.
        of_theirs = expected.get(name, np.zeros_like(value))
        # Between transformers in float32 and in float64 are up to 2e-4 of the largest.
        assert_allclose(value, of_theirs, atol=1e-3 * np.abs(of_theirs).max(), rtol=0, err_msg=name)
    shapes = {name: tuple(tensor.shape) for name, tensor in case.theirs.state_dict().items()}
    assert shapes.keys() - got.keys() <= {"lm_head.weight"}
    assert {name: value.shape for name, value in got.items()} == {name: shapes[name] for name in got}
    save_model(model, tmp_path / "out")
    assert_allclose(transformers_logits(tmp_path / "out", case.tokens), theirs.detach(), atol=1e-5, rtol=0)


@pytest.mark.thorough
def test_other_sizes_through_the_cache(case: Case, scanned: None) -> None:
    prompts = [case.tokens[0, :5], case.tokens[1, :8]]
    sampled, logits = decode(load_model(case.folder), prompts, 8, chunk=8)
    for prompt, tokens, got in zip(prompts, sampled, logits, strict=True):
        row = np.concatenate([prompt, tokens])[None]
        assert_allclose(got, case.logits(row).detach()[0, len(prompt) - 1 : -1], atol=2e-4, rtol=0)


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: short stacks are not cut either."""
    monkeypatch.setattr(decoder, "SPLIT_LAYERS", {})


def attentions(config: ModelConfig) -> list[AttentionConfig]:
    return [block.attention for block in config.blocks if isinstance(block.attention, AttentionConfig)]


def test_layers_that_keep_are_alone_in_their_stage() -> None:
    fields = GEMMA4 | {"num_hidden_layers": 35, "num_kv_shared_layers": 20}
    config = config_from_hf(fields | {"layer_types": ([LOCAL] * 4 + [GLOBAL]) * 7})
    shapes = [(len(stage.blocks), stage.repeats) for stage in config.stages]
    assert shapes == [(5, 2), (1, 3), (1, 1), (1, 1), (5, 4)]
    kept = [(i, attention.keeps) for i, attention in enumerate(attentions(config)) if attention.keeps]
    assert kept == [(13, LOCAL), (14, GLOBAL)]
    assert [attention.reuses for attention in attentions(config)] == [None] * 15 + ([LOCAL] * 4 + [GLOBAL]) * 4


def test_soft_caps_of_gemma2() -> None:
    def caps(**fields: Any) -> tuple[float | None, float | None]:
        config = config_from_hf(GEMMA2 | fields)
        return attentions(config)[0].soft_cap, config.logits_soft_cap

    assert caps() == (50.0, 30.0)
    assert caps(attn_logit_softcapping=None, final_logit_softcapping=None) == (None, None)
    assert caps(attn_logit_softcapping=3.0, final_logit_softcapping=5.0) == (3.0, 5.0)


def test_the_last_layer_of_gemma4_has_no_window() -> None:
    for kinds in ({}, {"layer_types": [LOCAL] * 5 + [GLOBAL, LOCAL]}):
        config = config_from_hf(GEMMA4 | {"num_hidden_layers": 7} | kinds)
        assert [attention.window for attention in attentions(config)] == [4] * 5 + [None] * 2


def test_heads_of_each_layer_by_number() -> None:
    """As transformers writes them: with leading zeros where there are more than ten layers."""
    config = config_from_hf(GEMMA4 | {"num_hidden_layers": 12} | KEYS_AS_VALUES)
    own = {"head_dim": 12, "num_key_value_heads": 1}
    plain = GEMMA4 | {"num_hidden_layers": 12, "attention_k_eq_v": True, "global_head_dim": None}
    for layers in (("05", "11"), ("5", "11"), (5, 11)):
        assert config_from_hf(plain | {"per_layer_config": dict.fromkeys(layers, own)}).stages == config.stages
    uniform = config_from_hf(plain | {"per_layer_config": {}})
    assert {(attention.head_dim, attention.num_kv_heads) for attention in attentions(uniform)} == {(10, 2)}


def test_rope_of_gemma3_in_both_styles() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 2e6, "rope_local_base_freq": 500.0, "rope_scaling": scaling}
    entries = {LOCAL: {"rope_type": "default", "rope_theta": 500.0}, GLOBAL: scaling | {"rope_theta": 2e6}}
    configs = [config_from_hf(GEMMA3 | fields) for fields in (old, {"rope_parameters": entries})]
    assert configs[0].stages == configs[1].stages
    local, everywhere = (attentions(configs[0])[i].rope for i in (0, 5))
    assert local is not None and everywhere is not None
    assert_allclose(local.frequencies, 500.0 ** (-np.arange(5) / 5), rtol=1e-6)
    assert_allclose(everywhere.frequencies, 2e6 ** (-np.arange(5) / 5) / 8, rtol=1e-6)


def test_defaults_of_rope_are_those_of_transformers() -> None:
    def both(changes: dict[str, Any]) -> dict[str, Any]:
        entries = {LOCAL: {"rope_theta": 10_000.0}, GLOBAL: {"rope_theta": 1_000_000.0} | changes}
        return {"rope_parameters": entries}

    assert config_from_hf(GEMMA3).stages == config_from_hf(GEMMA3 | both({})).stages
    fields = GEMMA4 | {"num_hidden_layers": 6}
    part = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    assert config_from_hf(fields).stages == config_from_hf(fields | both(part)).stages


def test_published_file_of_gemma3_with_images() -> None:
    """It leaves out what is as in transformers, and says at the top what holds for all."""
    text: dict[str, Any] = {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    text |= {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = config_from_hf(
        {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106], "torch_dtype": "bfloat16"}
        | {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 1152}}
    )
    assert (config.model_type, config.vocab_size, config.num_layers) == ("gemma3_text", 262_208, 34)
    assert (config.tie_embeddings, config.max_positions, config.embed_dim) == (True, 131_072, 2560)
    attention = attentions(config)[33]
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.window) == (8, 4, 256, 1024)
    written = json.loads(config.hf_json)
    assert written["architectures"] == ["Gemma3ForCausalLM"]
    assert (written["eos_token_id"], written["torch_dtype"]) == ([1, 106], "bfloat16")


@pytest.mark.parametrize(
    ("wrapper", "name", "inner"),
    [
        (gemma3, "language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        (gemma3, "model.language_model.norm.weight", "model.norm.weight"),
        (gemma3, "language_model.lm_head.weight", "lm_head.weight"),
        (gemma3, "lm_head.weight", "lm_head.weight"),
        (gemma3, "vision_tower.vision_model.post_layernorm.bias", None),
        (gemma3, "model.vision_tower.vision_model.post_layernorm.bias", None),
        (gemma3, "model.multi_modal_projector.mm_soft_emb_norm.weight", None),
        (gemma3, "model.audio_tower.norm.weight", "model.audio_tower.norm.weight"),
        (gemma4, "model.language_model.per_layer_projection_norm.weight", "model.per_layer_projection_norm.weight"),
        (gemma4, "model.embed_vision.embedding_projection.weight", None),
        (gemma4, "model.audio_tower.layers.0.norm.weight", None),
    ],
)
def test_names_of_the_text_part(wrapper: Any, name: str, inner: str | None) -> None:
    assert wrapper.text_name(name) == inner


def test_golden_with_images_in_the_other_layout(tmp_path: Path) -> None:
    folder = GOLDENS / "gemma3_mm"
    tensors = {
        name.replace("language_model.model.", "model.language_model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    expected, got = (ModelWeights(load_model(path)).read() for path in (folder, tmp_path))
    assert expected.keys() == got.keys()
    for path, value in expected.items():
        assert_array_equal(got[path], value, err_msg=path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            GEMMA2 | {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True is not supported",
        ),
        (
            GEMMA3 | {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True is not supported",
        ),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported: Gemma 3 has no cap"),
        (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported: "),
        (GEMMA4 | MIXTURE | {"num_experts": None}, "num_experts: missing in the model's config.json"),
        (GEMMA4 | {"num_kv_shared_layers": 1}, "num_kv_shared_layers=1 leaves no layer of type full_attention whose"),
        (
            GEMMA4 | {"num_kv_shared_layers": 9},
            "num_kv_shared_layers=9 leaves no layer of type full_attention, s",
        ),
        (GEMMA4 | {"per_layer_config": {"6": {}}}, "per_layer_config: 6 is not a layer index; use 0 to 5"),
        (GEMMA4 | {"per_layer_config": {"5": {"window": 3}}}, "per_layer_config.5: window: unknown field"),
        (GEMMA4 | INPUTS | {"vocab_size_per_layer_input": 60}, "vocab_size_per_layer_input=60 must be at least vocab_"),
        ({"model_type": "gemma3"}, "text_config: missing in the model's config.json"),
    ],
)
def test_what_config_json_may_not_say(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_from_hf({"num_hidden_layers": 6} | fields)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("name", ["gemma3", "gemma4_shared", "gemma4_mixture"])
def test_made_from_scratch(name: str) -> None:
    """Every field that the family reads is written, so that what is read again is the same."""
    config = config_from_init(CASES[name])
    assert config_from_hf(json.loads(config.hf_json)).stages == config.stages
    with pytest.raises(ConfigError, match="unknown field"):
        config_from_init(CASES[name] | {"num_local_experts": 2})
