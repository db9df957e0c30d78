"""The native engine against naive sampling: a whole forward pass for every token, with the same random numbers."""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.config import LoRA
from posttrain.kernels.logits.token_stats import token_stats
from posttrain.models.decoder import Decoder
from posttrain.rollout.engine import NativeEngine
from posttrain.weights.lora import attach_lora
from posttrain.weights.state import ModelWeights
from tests.often import often
from tests.rollout.engines import LENGTH, VOCABULARY, assert_same, make_engine, params, requests, unusual
from tests.tiny import tiny_model

TRUNCATED: dict[str, Any] = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02}


@pytest.mark.parametrize(
    "sampling", often([{"temperature": 0.0}, {"temperature": 1.0}, TRUNCATED], {"temperature": 0.0}, TRUNCATED), ids=str
)
def test_equals_naive_sampling(engine: NativeEngine, naive: Any, sampling: dict[str, Any]) -> None:
    """18 requests through 4 slots: slots are refilled while others go on, prompts and limits all differ."""
    prompts, parameters = requests(18, stop_token_ids=tuple(range(0, VOCABULARY, 40)), **sampling)
    completions = engine.generate_all(prompts, parameters)
    assert {c.stop for c in completions} == {"stop", "length"}
    for prompt, p, completion in zip(prompts, parameters, completions, strict=True):
        assert_same(completion, naive(prompt, p))


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_are_the_trainers(engine: NativeEngine, model: Decoder, temperature: float) -> None:
    assert distance_to_trainer(engine, model, temperature) < 1e-5


@pytest.mark.thorough
def test_bfloat16() -> None:
    model = tiny_model(dtype=jnp.dtype(jnp.bfloat16))
    assert distance_to_trainer(make_engine(model), model, 1.0) < 0.1


@pytest.mark.thorough
def test_with_an_adapter(engine: NativeEngine) -> None:
    """An adapter changes the structure of the weights; the trainer later changes its values."""
    model = tiny_model()
    adapted = make_engine(model)
    attach_lora(model, LoRA(rank=4), seed=0)
    adapted.update_weights(model, 1)
    prompts, parameters = requests(5)
    expected = engine.generate_all(prompts, parameters)
    same = adapted.generate_all(prompts, parameters)
    assert [c.tokens for c in same] == [c.tokens for c in expected]
    weights = ModelWeights(model)
    weights.write({path: w + 0.05 for path, w in weights.read().items() if path.endswith("lora_b")})
    compiled = len(adapted.programs)
    adapted.update_weights(model, 2)
    assert [c.tokens for c in adapted.generate_all(prompts, parameters)] != [c.tokens for c in expected]
    assert distance_to_trainer(adapted, model, 1.0) < 1e-5
    assert len(adapted.programs) == compiled


def test_an_equal_engine_compiles_nothing() -> None:
    prompts, parameters = requests(5)
    expected = make_engine(tiny_model()).generate_all(prompts, parameters)
    again = make_engine(tiny_model())
    assert [c.tokens for c in again.generate_all(prompts, parameters)] == [c.tokens for c in expected]
    other = make_engine(tiny_model(seed=1))
    assert [c.tokens for c in other.generate_all(prompts, parameters)] != [c.tokens for c in expected]
    assert all(one.metrics()["rollout/late_compilations"] == 0 < len(one.programs) for one in (again, other))


def distance_to_trainer(engine: NativeEngine, model: Decoder, temperature: float) -> float:
    """The largest difference to what the trainer's forward pass says of the sampled tokens."""
    prompts, parameters = requests(8, temperature=temperature, top_p=0.9)
    completions = engine.generate_all(prompts, parameters)
    rows = np.zeros((8, LENGTH), np.int32)
    lengths = [len(p) + len(c.tokens) for p, c in zip(prompts, completions, strict=True)]
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        rows[row, : lengths[row]] = [*prompt, *completion.tokens]
    segments = jnp.asarray(np.arange(LENGTH) < np.asarray(lengths)[:, None], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), rows.shape)

    @jax.jit
    def trainer_logps(tokens: jax.Array) -> jax.Array:
        hidden, _ = model(tokens, positions, segments)
        stats = token_stats(model.logits, hidden, tokens, segments, temperature=temperature, vocab_size=VOCABULARY)
        return stats.logps

    logps = np.asarray(trainer_logps(jnp.asarray(rows)))
    return max(
        np.abs(logps[row, len(prompt) : lengths[row]] - completion.logps).max()
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    )


def test_a_sample_does_not_depend_on_company_slot_or_chunk(engine: NativeEngine, model: Decoder) -> None:
    prompts, parameters = requests(9)
    expected = engine.generate_all(prompts, parameters)
    assert_same(engine.generate_all(prompts[:1], parameters[:1])[0], expected[0])
    for completion, e in zip(engine.generate_all(prompts[::-1], parameters[::-1]), expected[::-1], strict=True):
        assert_same(completion, e)
    chunks = make_engine(model, slots=3, decode_steps=16)
    for completion, e in zip(chunks.generate_all(prompts, parameters), expected, strict=True):
        assert_same(completion, e)


@pytest.mark.thorough
def test_small_batches_for_the_tail(model: Decoder, engine: NativeEngine) -> None:
    """32 slots, of which few go on for long: they end in a batch of 8 rows, which borrows its slots."""
    prompts = [[i + 1, i + 2] for i in range(32)]
    parameters = [params(i, max_tokens=28 if i % 8 == 3 else 3) for i in range(32)]
    wide = make_engine(model, slots=32)
    completions = wide.generate_all(prompts, parameters)
    assert len(wide.programs) == 3  # prefill, and decode with 32 and with 8 rows
    for completion, expected in zip(completions, engine.generate_all(prompts, parameters), strict=True):
        assert_same(completion, expected)


def test_a_group_shares_one_prefill(engine: NativeEngine) -> None:
    prompt = list(range(100, 120))
    group = engine.generate_all([prompt] * 7, [params(i) for i in range(7)])
    assert len({completion.tokens for completion in group}) == 7
    for i, completion in enumerate(group):
        assert_same(completion, engine.generate_all([prompt], [params(i)])[0])


def test_stop_tokens_and_strings_and_length(engine: NativeEngine) -> None:
    prompt = [5, 6, 7]
    (free,) = engine.generate_all([prompt], [params(max_tokens=20)])
    assert (free.stop, len(free.tokens)) == ("length", 20)
    for index in (0, 4, 11, 19):
        token = free.tokens[index]
        first = free.tokens.index(token)
        for stopping in ({"stop_token_ids": (510, token)}, {"stop": ("no such text", f"<{token}>")}):
            (cut,) = engine.generate_all([prompt], [params(max_tokens=20, **stopping)])
            assert cut.stop == "stop"
            assert cut.tokens == free.tokens[: first + 1]
            assert cut.logps == free.logps[: first + 1]
            assert len(cut.kept_logps) == len(cut.truncation_logps) == len(cut.weights_versions) == first + 1
    pair = f"{free.tokens[10]}><{free.tokens[11]}"
    (cut,) = engine.generate_all([prompt], [params(max_tokens=20, stop=(pair,))])
    assert cut.tokens == free.tokens[:12]


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusual_requests_equal_naive_sampling(engine: NativeEngine, naive: Any, temperature: float) -> None:
    """Penalties, bias, allowed tokens, top and prompt log-probabilities, beside requests without any."""
    prompts, parameters = requests(14, stop_token_ids=tuple(range(0, VOCABULARY, 40)), temperature=temperature)
    parameters = unusual(parameters)
    for prompt, p, completion in zip(prompts, parameters, engine.generate_all(prompts, parameters), strict=True):
        assert_same(completion, naive(prompt, p))


def test_many_stop_tokens(model: Decoder, naive: Any, engine: NativeEngine) -> None:
    p = params(max_tokens=20, stop_token_ids=tuple(range(200, 260)))
    assert_same(engine.generate_all([[9]], [p])[0], naive([9], p))


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 60, {"max_tokens": 5}, "60 tokens and max_tokens=5 need 65 positions, more than .* max_length=64"),
        ([1, VOCABULARY], {}, "from 1 to 512"),
        ([1], {"logit_bias": {3: 1.0, VOCABULARY: 1.0}}, r"sampling.logit_bias: token ids from 3 to 512; .* 0 to 511"),
        ([1], {"allowed_token_ids": (-1, 3)}, r"sampling.allowed_token_ids: token ids from -1 to 3"),
    ],
)
def test_what_can_never_run_is_refused(
    engine: NativeEngine, prompt: list[int], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate_all([[1], prompt], [params(), params(**changes)])
    with pytest.raises(ValueError, match=message):
        asyncio.run(engine.generate(prompt, params(**changes)))


def test_a_row_may_fill_the_cache_to_the_end(engine: NativeEngine, naive: Any) -> None:
    for prompt in ([3] * 63, [3] * 40, [3]):
        p = params(max_tokens=LENGTH - len(prompt))
        assert_same(engine.generate_all([prompt], [p])[0], naive(prompt, p))


def test_stop_strings_need_a_tokenizer(model: Decoder) -> None:
    with pytest.raises(ValueError, match="tokenizer_decode"):
        make_engine(model, tokenizer_decode=None).generate_all([[1]], [params(stop=("x",))])


def test_longer_than_the_model(model: Decoder) -> None:
    with pytest.raises(ValueError, match="max_length=257 must not exceed the model's max_positions=256"):
        make_engine(model, max_length=257)


def test_settings_that_cannot_work(model: Decoder) -> None:
    with pytest.raises(ValueError, match="slots=0"):
        make_engine(model, slots=0)
    with pytest.raises(ValueError, match="configuration differs"):
        make_engine(model).update_weights(tiny_model(norm_eps=1e-3), 1)


def test_the_engine_shares_the_models_arrays(model: Decoder) -> None:
    engine = make_engine(model)
    arrays = ModelWeights(model).read()
    assert all(engine._loaded.arrays[path] is array for path, array in arrays.items())


def test_every_program_is_compiled_once(model: Decoder) -> None:
    rng = np.random.default_rng(1)
    warm = make_engine(model, slots=4, decode_steps=5)
    warm.generate_all([[1] * 60, [2] * 30, [3] * 10, [4]], [params(max_tokens=4)] * 4)
    compiled = len(warm.programs)
    for version, weights in enumerate((model, tiny_model(seed=1), model)):
        warm.update_weights(weights, version)
        number = int(rng.integers(1, 12))
        prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in rng.integers(1, 50, number)]
        sampling = [
            params(i, max_tokens=int(rng.integers(1, 14)), top_k=int(rng.integers(0, 3))) for i in range(number)
        ]
        warm.generate_all(prompts, sampling)
    assert len(warm.programs) == compiled == 4  # prompts of 16, 32 and 64, decoding
