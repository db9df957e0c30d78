"""Upcycling: the mixture computes what the dense model computes, here, in transformers, and from the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.errors import ConfigError
from posttrain.export.readers import default_reader
from posttrain.export.resize import upcycle
from posttrain.kernels.logits.token_stats import token_stats
from posttrain.models.config import MLPConfig, RouterConfig
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_hf
from posttrain.weights.load import load_model
from posttrain.weights.state import ModelWeights
from posttrain.weights.upcycle import Upcycling, upcycled, upcycled_config
from tests.stages.runs import posttrain
from tests.tiny import forward

GOLDENS = Path(__file__).parent.parent / "goldens" / "models"
COPY = Upcycling(experts=4, top_k=2, mode="copy")
SPLIT = Upcycling(experts=8, top_k=4, mode="split")


def golden(name: str) -> tuple[Decoder, np.ndarray, np.ndarray]:
    """A dense model, tokens, and the logits that transformers gives them."""
    arrays = np.load(GOLDENS / name / "golden.npz")
    return load_model(GOLDENS / name, dtype=jnp.float32), arrays["plain_input_ids"], arrays["plain_logits"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", COPY),
        ("mistral", replace(SPLIT, experts=4)),
        ("qwen2", COPY),
        ("qwen3", replace(SPLIT, experts=6, top_k=2)),
        ("llama", replace(SPLIT, experts=6, top_k=3, shared=1, dense_layers=1)),
        ("qwen2", replace(COPY, shared=3, dense_layers=1)),
        ("qwen3", replace(COPY, shared=1)),
        ("qwen2", replace(COPY, dense_layers=1)),
        ("qwen3", replace(SPLIT, dense_layers=2)),
    ],
    ids=["llama-copy", "mistral-one-group", "qwen2-copy", "qwen3-split", "llama-shared-split", "qwen2-shared-copy",
         "qwen3-shared-copy", "qwen2-dense", "qwen3-dense"],
)  # fmt: skip
def test_the_mixture_has_the_logits_of_the_dense_model(name: str, plan: Upcycling) -> None:
    dense, tokens, logits = golden(name)
    model = upcycled(dense, plan, seed=1)
    assert {m.num_experts for m in model.config.mixtures} == {plan.experts}
    assert [isinstance(block.mlp, MLPConfig) for block in model.config.blocks[: plan.dense_layers + 1]] == [
        *[True] * plan.dense_layers,
        False,
    ]
    assert len(model.config.mixtures) == dense.config.num_layers - plan.dense_layers
    assert {m.shared is not None for m in model.config.mixtures} == {
        bool(plan.shared) or model.config.model_type == "qwen2_moe"
    }
    assert_allclose(forward(model, tokens), forward(dense, tokens), atol=2e-5)
    assert_allclose(forward(model, tokens), logits, atol=2e-4)


def test_whatever_the_router_chooses_copies_are_the_same() -> None:
    dense, tokens, _ = golden("llama")
    model = upcycled(dense, COPY, seed=1)
    weights = ModelWeights(model)
    routers = {p: 30 * w for p, w in weights.read().items() if p.endswith("router.proj.kernel")}
    assert routers
    weights.write(routers)
    assert_allclose(forward(model, tokens), forward(dense, tokens), atol=2e-5)


def test_tokens_of_a_split_go_to_whole_groups() -> None:
    dense, tokens, _ = golden("llama")
    model = upcycled(dense, SPLIT, seed=1)
    ones = jnp.ones(tokens.shape, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    routing = jax.jit(lambda t: model.forward(t, positions, ones)[2])(jnp.asarray(tokens, jnp.int32))
    chosen = np.sort(np.asarray(routing.experts), axis=-1)
    groups = chosen[..., :1] // 4
    assert_array_equal(chosen, groups * 4 + np.arange(4))
    assert len(np.unique(groups)) == 2


def test_noise_sets_experts_apart_and_the_seed_decides() -> None:
    dense, tokens, _ = golden("llama")
    noisy = replace(COPY, noise=0.1)
    first, again, other = (upcycled(dense, noisy, seed=seed) for seed in (1, 1, 2))
    gate = "stages.0.blocks.0.mlp.experts.gate"
    values = {
        key: np.asarray(ModelWeights(m).read()[gate]) for key, m in zip("abc", (first, again, other), strict=True)
    }
    assert_array_equal(values["a"], values["b"])
    assert np.abs(values["a"] - values["c"]).max() > 0
    kernel = np.asarray(ModelWeights(dense).read()["stages.0.blocks.0.mlp.gate.kernel"])
    assert_allclose((values["a"] - kernel[:, None]).std() / kernel.std(), 0.1, rtol=0.05)
    difference = np.abs(forward(first, tokens) - forward(dense, tokens)).max()
    assert difference > 1e-3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": 1}, "experts=1 must be at least 2"),
        ({"top_k": 5}, "top_k=5 must be from 1 to experts=4"),
        ({"top_k": 3, "mode": "split"}, "experts=4 must be a multiple of top_k=3"),
        ({"top_k": 1, "mode": "split"}, "top_k at least 2; change one of them, or use copy"),
        ({"noise": -1.0}, "noise=-1.0 must not be negative"),
        ({"shared": -1}, "shared=-1 and dense_layers=0 must not be negative"),
    ],
)
def test_plans_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(COPY, **fields)


def test_models_that_cannot_be_upcycled() -> None:
    def config(name: str, **changes: Any) -> Any:
        return config_from_hf(json.loads((GOLDENS / name / "config.json").read_text()) | changes)

    with pytest.raises(
        ConfigError, match=r"model_type=gemma2 has no MoE counterpart.*known: llama, mistral, qwen2, qwen3"
    ):
        upcycled_config(config("gemma2"), COPY)
    with pytest.raises(ConfigError, match="mixtral cannot express out_bias, qkv_bias of this llama"):
        upcycled_config(config("llama", attention_bias=True), COPY)
    with pytest.raises(ConfigError, match="dense_layers=3 leaves none of the 3 layers to have experts"):
        upcycled_config(config("qwen3"), replace(COPY, dense_layers=3))
    with pytest.raises(ConfigError, match="no MoE family has the attention of llama, dense first layers and no shared"):
        upcycled_config(config("llama"), replace(COPY, dense_layers=1))
    with pytest.raises(ConfigError, match="glm4_moe cannot express window of this mistral"):
        upcycled_config(config("mistral"), replace(COPY, shared=1))
    with pytest.raises(ConfigError, match="top_k \\+ shared=5 must divide intermediate_size=56 of llama"):
        upcycled_config(config("llama"), replace(SPLIT, shared=1))
    with pytest.raises(ConfigError, match="mixtral cannot express bias of this llama"):
        upcycled_config(config("llama", mlp_bias=True), COPY)
    dim = config("llama").blocks[0].mlp.dim
    with pytest.raises(ConfigError, match=f"top_k=5 must divide intermediate_size={dim} of llama"):
        upcycled_config(config("llama"), replace(SPLIT, experts=5, top_k=5))
    low = load_model(GOLDENS / "llama_bf16")
    with pytest.raises(ConfigError, match="rounds bfloat16 ones unless top_k is a power of two"):
        upcycled(low, replace(SPLIT, experts=7, top_k=7), seed=0)
    with pytest.raises(ConfigError, match="rounds bfloat16 ones unless shared is a power of two"):
        upcycled(low, replace(COPY, shared=3), seed=0)


def test_the_default_of_another_family_is_not_taken_over() -> None:
    """What a config.json leaves out is its own family's default; Mixtral's rope_theta is a hundred times Llama's."""
    fields = json.loads((GOLDENS / "llama" / "config.json").read_text())
    sparse = {key: value for key, value in fields.items() if key not in ("rope_parameters", "rms_norm_eps")}
    dense = config_from_hf(sparse)
    config = upcycled_config(dense, COPY)
    assert config.blocks[0].attention == dense.blocks[0].attention
    assert config.norm_eps == dense.norm_eps


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_shared_experts_and_dense_layers_in_transformers(name: str, tmp_path: Path) -> None:
    for number, plan in enumerate(
        (replace(COPY, shared=1), replace(SPLIT, experts=6, top_k=3, shared=1, dense_layers=2))
    ):
        written = upcycle(str(GOLDENS / name), tmp_path / str(number), plan, seed=1, reader="transformers")
        assert written.model_type == "glm4_moe" and "read again with transformers" in str(written.proof)


@pytest.mark.thorough
def test_the_command_line_writes_what_transformers_reads(tmp_path: Path) -> None:
    source, out = GOLDENS / "qwen3", tmp_path / "mixture"
    arguments = ("upcycle", source, out, "--experts", "4", "--top-k", "2", "--mode", "split")
    outcome = posttrain(*arguments)
    assert outcome.code == 0, outcome.err
    assert f"read again with {default_reader(adapter=False)}" in outcome.out
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3_moe"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mixture"]
    model = load_model(out)
    assert model.config.mixtures[0].router == RouterConfig(normalize=True)
    dense, tokens, _ = golden("qwen3")
    assert isinstance(dense.config.blocks[0].mlp, MLPConfig)
    assert_allclose(forward(model, tokens), forward(dense, tokens), atol=2e-5)
    assert posttrain(*arguments).error == f"upcycle: {out} exists; give a new folder"
    wrong = posttrain("upcycle", source, tmp_path / "x", "--experts", "4", "--top-k", "3", "--mode", "split")
    assert "experts=4 must be a multiple of top_k=3" in wrong.error


@pytest.mark.thorough
def test_the_first_loss_on_real_text_is_the_dense_one(shared: Path, tmp_path: Path) -> None:
    """1.2945 nats per token on the first 40 stories, before and after."""
    from posttrain.data.tokenizer import load_tokenizer

    folder = shared / "models" / "stories260k"
    tokenizer = load_tokenizer(folder)
    lines = (shared / "data" / "text" / "tinystories_v2gpt4_train_head.jsonl").read_text().splitlines()[:40]
    bos = json.loads((folder / "config.json").read_text())["bos_token_id"]
    rows = [[bos, *tokenizer.encode(json.loads(line)["text"])][:512] for line in lines]
    tokens = np.zeros((40, 512), np.int32)
    segments = np.zeros_like(tokens)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    positions = np.broadcast_to(np.arange(512, dtype=np.int32), tokens.shape)

    def loss(model: Decoder) -> float:
        weights = ModelWeights(model)

        @jax.jit
        def run(arrays: Any, *inputs: Any) -> Any:
            bound = weights.bind(arrays)
            hidden, _ = bound(*inputs)
            stats = token_stats(bound.logits, hidden, inputs[0], inputs[2], temperature=1.0, vocab_size=512)
            return -stats.logps.sum()

        parts = [slice(i, i + 8) for i in range(0, 40, 8)]
        total = sum(
            float(run(weights.read(), *(jnp.asarray(x[part]) for x in (tokens, positions, segments)))) for part in parts
        )
        return total / (segments.sum() - 40)

    dense = load_model(folder, dtype=jnp.float32)
    before = loss(dense)
    assert_allclose(before, 1.2945, atol=1e-4)
    for plan in (COPY, SPLIT):
        upcycle(str(folder), tmp_path / plan.mode, plan, seed=0, reader="posttrain")
        assert_allclose(loss(load_model(tmp_path / plan.mode)), before, atol=1e-5)
