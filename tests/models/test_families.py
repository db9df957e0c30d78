"""Families against transformers: logits, log-probabilities, greedy text, gradients, and the reading of config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.config import ConfigError
from posttrain.kernels.token_stats import token_stats
from posttrain.models.cache import empty_cache
from posttrain.models.config import LinearScaling, Llama3Scaling
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_hf, config_from_init, config_to_hf, family
from posttrain.models.load import init_model, load_model
from posttrain.models.save import hf_tensors
from posttrain.models.weights import ModelWeights
from tests.tiny import forward

GOLDENS = Path(__file__).parent.parent / "goldens" / "models"


class Golden:
    def __init__(self, name: str):
        self.folder = GOLDENS / name
        self.arrays: dict[str, np.ndarray] = dict(np.load(self.folder / "golden.npz"))
        self.meta: dict[str, Any] = json.loads((self.folder / "golden_meta.json").read_text())
        self.model = load_model(self.folder, dtype=jnp.float32)

    def inputs(self, variant: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        names = ("input_ids", "position_ids", "attention_mask")
        tokens, positions, mask = (self.arrays[f"{variant}_{name}"] for name in names)
        return tokens, positions, mask


@pytest.fixture(scope="module", params=["llama", "llama_bf16", "qwen2", "qwen3"])
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def test_logits(golden: Golden) -> None:
    plain = golden.arrays["plain_logits"]
    assert_allclose(forward(golden.model, *golden.inputs("plain")), plain, atol=2e-4, rtol=0)
    right = forward(golden.model, *golden.inputs("right"))
    assert_allclose(right[0], plain[0], atol=2e-4, rtol=0)
    assert_allclose(right[1, :15], plain[1, :15], atol=2e-4, rtol=0)
    left = forward(golden.model, *golden.inputs("left"))
    assert_allclose(left[1, -15:], golden.arrays["left_row1_valid_logits"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("variant", ["plain", "right", "left"])
def test_token_stats(golden: Golden, variant: str) -> None:
    weights = ModelWeights(golden.model)

    @jax.jit
    def run(arrays: Any, tokens: Any, positions: Any, segments: Any) -> Any:
        model = weights.bind(arrays)
        hidden, _ = model(tokens, positions, segments)
        return token_stats(model.logits, hidden, tokens, segments, temperature=1.0, vocab_size=96)

    stats = run(weights.read(), *map(jnp.asarray, golden.inputs(variant)))
    assert stats.entropy is not None
    assert_allclose(stats.logps[:, 1:], golden.arrays[f"{variant}_logps"], atol=2e-4, rtol=0)
    assert_allclose(stats.entropy[:, 1:], golden.arrays[f"{variant}_entropy"], atol=2e-4, rtol=0)


def decode(model: Decoder, prompts: list[np.ndarray], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens and their logits through the cache: the prompts at once, right-padded, then token by token."""
    weights = ModelWeights(model)
    lengths = np.asarray([len(prompt) for prompt in prompts])
    places = np.broadcast_to(np.arange(lengths.max()), (len(prompts), lengths.max()))
    tokens = np.stack([np.pad(prompt, (0, lengths.max() - len(prompt))) for prompt in prompts])

    @jax.jit
    def step(arrays: Any, tokens: Any, positions: Any, segments: Any, cache: Any) -> Any:
        bound = weights.bind(arrays)
        hidden, cache = bound(tokens, positions, segments, cache)
        return bound.logits(hidden), cache

    cache = empty_cache(model.config, len(prompts), int(lengths.max()) + steps, jnp.dtype(jnp.float32))
    segments = (places < lengths[:, None]).astype(np.int32)
    logits, cache = step(weights.read(), jnp.asarray(tokens), jnp.asarray(places), jnp.asarray(segments), cache)
    last = np.asarray(logits)[np.arange(len(prompts)), lengths - 1]
    seen = [last]
    for i in range(steps - 1):
        tokens, places = last.argmax(-1)[:, None], (lengths + i)[:, None]
        inputs = (jnp.asarray(tokens), jnp.asarray(places), jnp.ones_like(places))
        logits, cache = step(weights.read(), *map(jnp.asarray, inputs), cache)
        last = np.asarray(logits)[:, 0]
        seen.append(last)
    stacked = np.stack(seen, axis=1)
    return stacked.argmax(-1), stacked


def test_greedy_tokens_through_the_cache(golden: Golden) -> None:
    ids, mask = golden.arrays["gen_prompt_ids"], golden.arrays["gen_prompt_mask"]
    prompts = [row[keep.astype(bool)] for row, keep in zip(ids, mask, strict=True)]
    tokens, logits = decode(golden.model, prompts, 12)
    assert_array_equal(tokens, golden.arrays["gen_tokens"])
    assert_allclose(logits, golden.arrays["gen_logits"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("golden", ["llama", "qwen2", "qwen3"], indirect=True)
def test_gradients(golden: Golden) -> None:
    tokens, positions, segments = map(jnp.asarray, golden.inputs("right"))
    weights = ModelWeights(golden.model)

    @jax.jit
    def mean_nll(arrays: Any) -> Any:
        model = weights.bind(arrays)
        hidden, _ = model(tokens, positions, segments)
        stats = token_stats(model.logits, hidden, tokens, segments, temperature=1.0, vocab_size=96)
        return -stats.logps.sum() / golden.arrays["right_label_mask"].sum()

    nll, gradient = jax.value_and_grad(mean_nll)(weights.read())
    assert_allclose(nll, golden.meta["right_mean_nll"], rtol=1e-4)
    expected = golden.meta["right_grad_l2_and_sum_per_param(in-memory HF names)"]
    got = {name: (np.linalg.norm(x), x.sum()) for name, x in hf_tensors(weights.bind(gradient))}
    assert got.keys() == expected.keys()
    for name, (norm, total) in expected.items():
        assert_allclose(got[name][0], norm, rtol=1e-3, err_msg=name)
        assert_allclose(got[name][1], total, atol=1e-3 * norm * got[name][0].size ** 0.5 + 1e-3, err_msg=name)


def test_bfloat16_checkpoint() -> None:
    golden = Golden("llama_bf16")
    model = load_model(golden.folder)
    assert {w.dtype for w in ModelWeights(model).read().values()} == {jnp.dtype(jnp.bfloat16)}
    assert model.compute.dtype == jnp.bfloat16
    exact, theirs = golden.arrays["plain_logits"], golden.arrays["plain_logits_bf16_compute"]
    ours = forward(model, *golden.inputs("plain"))
    assert np.square(ours - exact).mean() < 2 * np.square(theirs - exact).mean()
    wide = forward(load_model(golden.folder, compute_dtype=jnp.float32), *golden.inputs("plain"))
    assert_allclose(wide, exact, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_both_styles_of_config_mean_the_same(name: str) -> None:
    read = [json.loads((GOLDENS / name / file).read_text()) for file in ("config.json", "config_hub_style.json")]
    new, hub = (family(name).config_from_hf(fields) for fields in read)
    assert new == hub
    assert new.norm_eps == 1e-3
    assert family(name).config_from_hf(config_to_hf(new)) == new


def test_real_model_on_real_stories(shared: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = shared / "models" / "stories260k"
    model, tokenizer = load_model(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    lines = (shared / "data/text/tinystories_v2gpt4_train_head.jsonl").read_text().split("\n")[:40]
    rows = [[1, *tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids][:512] for line in lines]
    tokens = np.zeros((40, 512), np.int32)
    segments = np.zeros((40, 512), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], segments[i, : len(row)] = row, 1
    positions = np.broadcast_to(np.arange(512, dtype=np.int32), tokens.shape)
    weights = ModelWeights(model)

    @jax.jit
    def total(arrays: Any, tokens: Any, positions: Any, segments: Any) -> Any:
        model = weights.bind(arrays)
        hidden, _ = model(tokens, positions, segments)
        return token_stats(model.logits, hidden, tokens, segments, temperature=1.0, vocab_size=512).logps.sum()

    batches = (jax.tree.map(lambda x, i=i: x[i : i + 4], (tokens, positions, segments)) for i in range(0, 40, 4))
    nats = -sum(float(total(weights.read(), *map(jnp.asarray, batch))) for batch in batches)
    assert round(nats / segments[:, 1:].sum(), 4) == 1.2945
    prompt = np.asarray([1, *tokenizer.encode("Once upon a time", add_special_tokens=False).ids])
    text = tokenizer.decode(decode(model, [prompt], 16)[0][0].tolist())
    assert text.startswith(", there was a little girl named Lily."), text


LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2}


def test_defaults_are_those_of_transformers() -> None:
    config = config_from_hf(LLAMA)
    attention = config.blocks[0].attention
    assert (attention.num_kv_heads, attention.head_dim) == (4, 8)
    assert (attention.rope.theta, attention.rope.scaling) == (10_000.0, None)
    assert (config.norm_eps, config.tie_embeddings, config.blocks[0].mlp.activation) == (1e-6, False, "silu")
    assert config_from_hf(LLAMA | {"head_dim": None}).stages == config.stages


def test_rope_scaling_in_both_styles() -> None:
    linear = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0}
    rope = config_from_hf(LLAMA | linear).blocks[0].attention.rope
    assert (rope.theta, rope.scaling) == (500.0, LinearScaling(factor=2.0))
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **llama3}}
    rope = config_from_hf(LLAMA | new).blocks[0].attention.rope
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32)
    assert (rope.theta, rope.scaling) == (500.0, scaling)


def test_windows_of_qwen() -> None:
    def windows(**fields: Any) -> list[int | None]:
        return [block.attention.window for block in config_from_hf(QWEN2 | {"num_hidden_layers": 4} | fields).blocks]

    assert windows(sliding_window=16) == [None] * 4
    assert windows(sliding_window=16, use_sliding_window=True, max_window_layers=3) == [None, None, None, 16]
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(sliding_window=16, use_sliding_window=True, layer_types=kinds) == [16, None, 16, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen33"}, "model_type='qwen33' is not supported; did you mean 'qwen3'? known: llama, "),
        ({"vocab_size": None}, "vocab_size: the model's config.json must have it"),
        ({"vocab_size": "96"}, "vocab_size: must be int, got '96'"),
        ({"attention_bias": 1}, "attention_bias: must be bool, got 1"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; known: silu, "),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling: rope_type 'yarn' is not supported",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters: rope_type 'dynamic' is not supported; known"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: rope_type 'linear' takes ['factor'], got []"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: rotating a part of the head is not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ({"quantization_config": {}}, "quantization_config: quantised checkpoints are not supported"),
        ({"model_type": "qwen2"}, "num_key_value_heads: the model's config.json must have it"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types: must name num_hidden_layers=2 layers, got 1"),
        (QWEN2 | {"layer_types": ["linear_attention"] * 2}, "layer_types: ['linear_attention'] not supported; known: "),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 2}, "layer_types: sliding_attention needs use_sliding_window"),
    ],
)
def test_what_config_json_may_not_say(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_from_hf(LLAMA | changes)
    assert str(raised.value).startswith(message)


def test_init_refuses_unknown_fields() -> None:
    with pytest.raises(ConfigError) as raised:
        init_model(LLAMA | {"num_key_value_head": 2}, dtype=jnp.float32, seed=0)
    assert str(raised.value) == "num_key_value_head: unknown field; did you mean 'num_key_value_heads'?"


def test_init_keeps_token_ids_and_writes_every_field() -> None:
    config = config_from_init(LLAMA | {"eos_token_id": 7})
    written = config_to_hf(config)
    assert (written["eos_token_id"], written["head_dim"], written["num_key_value_heads"]) == (7, 8, 4)
    assert config_from_hf(written).stages == config.stages
