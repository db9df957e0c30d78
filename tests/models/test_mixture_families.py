"""Mixtures of experts of every family: goldens, other sizes against transformers, and what their files may say."""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file, save_file

from posttrain.config import MeshSection
from posttrain.errors import ConfigError
from posttrain.mesh import make_mesh
from posttrain.models.cache import empty_cache
from posttrain.models.config import LatentAttentionConfig, MoEConfig
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_hf, config_from_init, config_to_hf
from posttrain.models.moe import Router
from posttrain.weights.load import load_model
from posttrain.weights.save import hf_tensors, save_model
from posttrain.weights.state import ModelWeights
from posttrain.weights.tensor_file import MXFP4_BLOCKS, MXFP4_SCALES, dequantize_mxfp4, merge_mxfp4, open_tensors
from tests.models.goldens import (
    COMPILER_OPTIONS,
    GOLDENS,
    MIXTURES,
    VARIANTS,
    Batch,
    Golden,
    GoldenChecks,
    decode,
    logits_of,
    same_as_transformers,
    transformers_logits,
)
from tests.often import often

PACKED_FILE = "gpt_oss_mxfp4"


USUAL = ("qwen3_moe", "deepseek_v3", "gpt_oss")
"""Between them they have what the others have: shared experts, groups, corrections, dense layers, biases, sinks."""


@pytest.fixture(scope="module", params=often([name for name in MIXTURES if name != PACKED_FILE], *USUAL))
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def router_probs(model: Decoder, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Probabilities of all experts in every mixture, [M, B, T, E]."""
    weights, seen, logits = ModelWeights(model), [], Router.logits

    def recorded(self: Router, x: Any) -> Any:
        seen.append(logits(self, x))
        return seen[-1]

    def run(arrays: Any, *inputs: Any) -> Any:
        weights.bind(arrays).for_decoding()(*inputs)  # layers apart, and in no loop
        return jax.nn.softmax(jnp.stack(seen), axis=-1)

    monkeypatch.setattr(Router, "logits", recorded)
    return np.asarray(jax.jit(run, compiler_options=COMPILER_OPTIONS)(weights.read(), *map(jnp.asarray, inputs)))


def switch_loss(probs: np.ndarray, top_k: int, mask: np.ndarray) -> float:
    """transformers': E * sum_e share_e * mean probability_e, over the real tokens of all layers together."""
    chosen = np.zeros_like(probs)
    np.put_along_axis(chosen, np.argsort(-probs, axis=-1)[..., :top_k], 1.0, axis=-1)
    real = np.broadcast_to(mask, probs.shape[:-1]).astype(bool)
    return float(probs.shape[-1] * (chosen[real].mean(axis=0) * probs[real].mean(axis=0)).sum())


class TestGoldens(GoldenChecks):
    @pytest.mark.few(1)
    def test_load_balancing_loss(self, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
        if "right_router_aux_loss" not in golden.meta:
            pytest.skip("this golden has no load-balancing loss")
        right = tuple(array[VARIANTS["right"]] for array in golden.batch)
        probs = router_probs(golden.model, right, monkeypatch)
        top_k = golden.model.config.mixtures[0].top_k
        assert probs.shape[0] == len(golden.model.config.mixtures)
        assert_allclose(switch_loss(probs, top_k, right[2]), golden.meta["right_router_aux_loss"], rtol=1e-5)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 20,
    "moe_intermediate_size": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "pad_token_id": 0,
}
GROUPED = {"n_routed_experts": 6, "n_shared_experts": 2, "num_key_value_heads": 4}
LATENT = {"head_dim": 8, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5}
CASES: dict[str, dict[str, Any]] = {
    "mixtral": SIZES
    | {"model_type": "mixtral", "num_hidden_layers": 2, "sliding_window": 5, "num_local_experts": 7}
    | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2_moe": SIZES
    | {"model_type": "qwen2_moe", "num_hidden_layers": 4, "num_experts": 5, "shared_expert_intermediate_size": 13}
    | {"norm_topk_prob": True, "decoder_sparse_step": 2, "qkv_bias": False, "hidden_size": 40}
    | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen3_moe": SIZES
    | {"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 4, "norm_topk_prob": False}
    | {"mlp_only_layers": [2], "use_sliding_window": True, "sliding_window": 6, "attention_bias": True},
    "glm4_moe": SIZES
    | GROUPED
    | {"model_type": "glm4_moe", "num_hidden_layers": 2, "first_k_dense_replace": 0, "norm_topk_prob": False}
    | {"n_group": 3, "topk_group": 2, "attention_bias": False, "use_qk_norm": False, "routed_scaling_factor": 0.7},
    "deepseek_v3": SIZES
    | GROUPED
    | LATENT
    | {"model_type": "deepseek_v3", "num_hidden_layers": 3, "first_k_dense_replace": 2, "q_lora_rank": None}
    | {"n_group": 1, "topk_group": 1, "attention_bias": True, "rope_interleave": False},
    "gpt_oss": SIZES
    | {"model_type": "gpt_oss", "num_hidden_layers": 3, "num_local_experts": 5, "attention_bias": False}
    | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 3}
    | {"swiglu_limit": 0.4, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}
"""Fields of `config.json`."""


def random_checkpoint(fields: dict[str, Any], folder: Path) -> None:
    """A model of transformers with random weights. Skips the test where torch is not there."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**fields))
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                weight.add_(torch.randn_like(weight) * 0.25)
    model.save_pretrained(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_other_sizes(name: str, tmp_path: Path) -> None:
    """Logits as in transformers, and what we save is what it had saved, bit by bit."""
    random_checkpoint(CASES[name], tmp_path)
    model = same_as_transformers(tmp_path)
    theirs, ours = load_file(tmp_path / "model.safetensors"), dict(hf_tensors(model))
    assert ours.keys() == theirs.keys()
    for tensor, value in ours.items():
        assert_array_equal(value, theirs[tensor], err_msg=tensor)
    if name == "deepseek_v3":
        assert_cached_is_whole(model)


def assert_cached_is_whole(model: Decoder) -> None:
    prompts, steps, width = [np.arange(1, 6), np.arange(20, 28)], 4, 12
    sampled, logits = decode(model, prompts, steps, chunk=8)
    rows = [np.concatenate(pair) for pair in zip(prompts, sampled, strict=True)]
    tokens = np.stack([np.pad(row, (0, width - len(row))) for row in rows]).astype(np.int32)
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
    segments = np.stack([positions[0] < len(row) for row in rows]).astype(np.int32)
    whole = logits_of(model, Batch(tokens, positions, segments))
    for prompt, got, row in zip(prompts, logits, whole, strict=True):
        assert_allclose(got, row[len(prompt) - 1 :][:steps], atol=5e-5, rtol=0)


def test_the_cache_of_latent_attention_holds_latents_only() -> None:
    config = config_from_hf(json.loads((GOLDENS / "deepseek_v3" / "config.json").read_text()))
    cache = empty_cache(config, 2, 7, np.dtype(np.float32))
    attention = config.blocks[0].attention
    assert isinstance(attention, LatentAttentionConfig)
    size = attention.kv_rank + attention.rope_dim
    assert [keys.shape for keys in cache.keys if keys is not None] == [(1, 2, 1, 7, size), (2, 2, 1, 7, size)]
    assert cache.values == (None, None)


@pytest.mark.thorough
def test_latent_attention_on_a_mesh() -> None:
    """Heads are split over `tensor`, although its cache has a single one."""
    golden, mesh = Golden("deepseek_v3"), make_mesh(MeshSection(fsdp=2, tensor=2, expert=2))
    model = load_model(golden.folder, dtype=jnp.float32, mesh=mesh)
    plain = Batch(*(np.tile(array[VARIANTS["plain"]], (2, 1)) for array in golden.batch))
    assert_allclose(logits_of(model, plain)[:2], golden.arrays["plain_logits"], atol=golden.atol, rtol=0)
    with pytest.raises(ConfigError, match=r"mesh\.tensor=8 must divide num_heads=4 of deepseek_v3; use 1 or 2"):
        load_model(golden.folder, mesh=make_mesh(MeshSection(tensor=8)))


def test_new_models_write_every_field() -> None:
    fields = {key: value for key, value in CASES["deepseek_v3"].items() if key not in ("head_dim", "q_lora_rank")}
    made = config_from_init(fields)
    written = config_to_hf(made)
    assert (written["q_lora_rank"], written["routed_scaling_factor"], written["num_nextn_predict_layers"]) == (
        1536,
        2.5,
        0,
    )
    assert config_from_hf(written).stages == made.stages
    attention = config_from_init(fields | {"q_lora_rank": None}).blocks[0].attention
    assert isinstance(attention, LatentAttentionConfig)
    assert attention.q_rank is None
    with pytest.raises(ConfigError, match="num_nextn_predict_layers=1: a new model has no such layers; use 0"):
        config_from_init(fields | {"num_nextn_predict_layers": 1})


def test_mixtures_of_a_config() -> None:
    def dense(**changes: Any) -> list[int]:
        config = config_from_hf(CASES["qwen2_moe"] | {"num_hidden_layers": 6, "layer_types": None} | changes)
        return [i for i, block in enumerate(config.blocks) if not isinstance(block.mlp, MoEConfig)]

    assert dense(decoder_sparse_step=1) == []
    assert dense(decoder_sparse_step=3) == [0, 1, 3, 4]
    assert dense(decoder_sparse_step=2, mlp_only_layers=[3, 4]) == [0, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be at least 1"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be from 1 to 4, the experts"),
        ("gpt_oss", {"rope_parameters": None}, "rope_scaling: missing in the model's config.json"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not supported: the activation's gain is fixed"),
        ("deepseek_v3", {"n_group": 4}, "n_group=4 must split the 6 experts evenly, into groups of 2 or more"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported: router scores"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported: latent attention has"),
        ("glm4_moe", {"topk_group": 4}, "topk_group=4 must be from 1 to n_group=3"),
    ],
)
def test_what_config_json_may_not_say(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_from_hf(CASES[name] | changes)
    assert str(raised.value).startswith(message)


def test_layers_for_further_tokens_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / "deepseek_v3", folder)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    extra = {f"model.layers.3.{name}": np.ones(3, np.float32) for name in ("enorm.weight", "shared_head.head.weight")}
    save_file(tensors | extra, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.enorm\.weight: unknown; model\.layers\.3\.shared_head"):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with caplog.at_level(logging.WARNING, "posttrain.weights"):
        model = load_model(folder)
    said = f"{folder}: 2 tensors of multi-token prediction layers are not loaded"
    assert [record.message for record in caplog.records] == [said]
    assert config_to_hf(model.config)["num_nextn_predict_layers"] == 0
    assert {name for name, _ in hf_tensors(model)} == tensors.keys()


def test_mxfp4_files(tmp_path: Path) -> None:
    """Read without loss: logits and values are those of transformers, and what is saved is an ordinary checkpoint."""
    golden = Golden(PACKED_FILE)
    plain = Batch(*(array[VARIANTS["plain"]] for array in golden.batch))
    assert_allclose(logits_of(golden.model, plain), golden.arrays["plain_logits"], atol=golden.atol, rtol=0)
    model = load_model(golden.folder)
    assert {w.dtype for w in ModelWeights(model).read().values()} == {jnp.dtype(jnp.bfloat16)}
    save_model(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    saved, stored = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", golden.folder))
    packed = {name.removesuffix(MXFP4_BLOCKS) for name in stored if name.endswith(MXFP4_BLOCKS)}
    assert len(packed) == 4
    assert saved.keys() == {name for name in stored if not name.endswith((MXFP4_BLOCKS, MXFP4_SCALES))} | packed
    theirs = transformers_logits(tmp_path / "out", plain.tokens)
    assert_allclose(theirs, golden.arrays["plain_logits"], atol=golden.atol, rtol=0)
    torch, mxfp4 = pytest.importorskip("torch"), pytest.importorskip("transformers.integrations.mxfp4")
    for name in packed:
        parts = (torch.from_numpy(stored[name + kind]) for kind in (MXFP4_BLOCKS, MXFP4_SCALES))
        expected = mxfp4.convert_moe_packed_tensors(*parts, dtype=torch.float32).numpy()
        assert_array_equal(saved[name].astype(np.float32), expected)


def test_other_quantisations_are_refused() -> None:
    config = json.loads((GOLDENS / PACKED_FILE / "config.json").read_text())
    with pytest.raises(ConfigError, match="quantization_config: weights quantized by 'awq' are not supported"):
        config_from_hf(config | {"quantization_config": {"quant_method": "awq"}})


def test_every_code_and_scale_of_mxfp4() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    scales = np.full((1, 16), 127, np.uint8)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = [*positive, *(-x for x in positive)]
    expected = [values[half] for code in range(256) for half in (code % 16, code // 16)]
    assert_array_equal(dequantize_mxfp4(codes, scales).astype(np.float32).ravel(), expected)
    for scale in (0, 1, 100, 250):
        got = dequantize_mxfp4(codes, np.full_like(scales, scale)).astype(np.float64)
        assert_array_equal(got.ravel(), np.asarray(expected) * 2.0 ** (scale - 127))


def test_parts_of_an_mxfp4_tensor(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (3, 10, 4, 16), dtype=np.uint8)
    scales = draw.integers(120, 130, (3, 10, 4), dtype=np.uint8)
    save_file({"a.down_proj_blocks": blocks, "a.down_proj_scales": scales}, tmp_path / "x.safetensors")
    whole = dequantize_mxfp4(blocks, scales).swapaxes(1, 2)
    with ExitStack() as stack:
        tensors = merge_mxfp4(open_tensors(tmp_path / "x.safetensors", stack))
        packed = tensors["a.down_proj"]
        assert (list(tensors), packed.shape, packed.kind) == (["a.down_proj"], (3, 128, 10), "BF16")
        for region in (
            (slice(0, 3), slice(0, 128), slice(0, 10)),
            (slice(1, 2), slice(33, 97), slice(2, 9)),
            (slice(0, 3, 2), slice(5, 6), slice(1, 10, 2)),
            (slice(0, 3), slice(3, 90, 7), slice(0, 10)),
        ):
            for dtype in (jnp.bfloat16, np.float32):
                out = np.full(whole[region].shape, np.nan, dtype)
                for task in packed.reads(out, region):
                    task()
                assert_array_equal(out, whole[region].astype(dtype))
