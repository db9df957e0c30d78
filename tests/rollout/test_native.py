"""The native engine against naive sampling: a whole forward pass for every token, with the same random numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.config import MeshSection
from posttrain.kernels.token_stats import token_stats
from posttrain.mesh import make_mesh, param_sharding
from posttrain.models.cache import empty_cache
from posttrain.models.decoder import Decoder
from posttrain.models.weights import ModelWeights
from posttrain.rollout.native import NativeEngine
from posttrain.rollout.sampling import sample_reference, uniforms
from posttrain.rollout.types import Completion, SamplingParams, sample_key
from tests.tiny import tiny_model

LENGTH = 64
VOCABULARY = 512
TRUNCATED: dict[str, Any] = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


@pytest.fixture(scope="module")
def other_model() -> Decoder:
    return tiny_model(seed=1)


@pytest.fixture(scope="module")
def engine(model: Decoder) -> NativeEngine:
    """Shared, so that its programs are compiled once; every test leaves it idle."""
    return make_engine(model)


@pytest.fixture(autouse=True)
def all_slots_are_free_at_the_end(engine: NativeEngine, model: Decoder) -> Any:
    yield
    assert engine.num_free == engine.slots
    engine.update_weights(model, 0)


def make_engine(model: Decoder, **changes: Any) -> NativeEngine:
    settings = {"slots": 4, "max_length": LENGTH, "decode_steps": 5, "tokenizer_decode": text_of} | changes
    return NativeEngine(model, **settings)


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def params(sample: int = 0, **changes: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "stop_token_ids": ()}
    return SamplingParams(**settings | {"key": sample_key(0, 0, 0, sample)} | changes)


def requests(number: int, **changes: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in rng.integers(1, 36, number)]
    prompts[1] = prompts[1][:1]
    limits = rng.integers(1, 28, number)
    limits[2] = 1
    return prompts, [params(i, **{"max_tokens": int(limits[i])} | changes) for i in range(number)]


@pytest.fixture(scope="module")
def naive(model: Decoder) -> Callable[[Sequence[int], SamplingParams], Completion]:
    @jax.jit
    def logits_at(tokens: jax.Array, index: jax.Array) -> jax.Array:
        positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        hidden, _ = model(tokens[None], positions, jnp.ones_like(positions))
        return model.logits(hidden[:, index][:, None])[0, 0]

    draws = jax.jit(lambda key: uniforms(jnp.tile(key, (LENGTH, 1)), jnp.arange(LENGTH, dtype=jnp.int32)))

    def generate(prompt: Sequence[int], p: SamplingParams) -> Completion:
        u = np.asarray(draws(jnp.asarray(p.key, jnp.uint32)), np.float64)
        tokens, logps, kept = list(prompt), [], []
        while len(logps) < p.max_tokens and not (logps and tokens[-1] in p.stop_token_ids):
            padded = jnp.asarray(tokens + [0] * (LENGTH - len(tokens)), jnp.int32)
            logits = np.asarray(logits_at(padded, jnp.int32(len(tokens) - 1)))
            token, logp, kept_logp = sample_reference(logits, u[len(tokens)], p.temperature, p.top_k, p.top_p, p.min_p)
            tokens.append(token)
            logps.append(logp)
            kept.append(kept_logp)
        return Completion(
            tokens=tuple(tokens[len(prompt) :]),
            logps=tuple(logps),
            kept_logps=tuple(kept),
            stop="stop" if tokens[-1] in p.stop_token_ids else "length",
            weights_versions=(0,) * len(logps),
        )

    return generate


def assert_same(got: Completion, expected: Completion) -> None:
    assert got.tokens == expected.tokens
    assert (got.stop, got.weights_versions) == (expected.stop, expected.weights_versions)
    np.testing.assert_allclose(got.logps, expected.logps, atol=1e-5)
    np.testing.assert_allclose(got.kept_logps, expected.kept_logps, atol=1e-5)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0}, TRUNCATED], ids=str)
def test_equals_naive_sampling(engine: NativeEngine, naive: Any, sampling: dict[str, Any]) -> None:
    """18 requests through 4 slots: slots are refilled while others go on, prompts and limits all differ."""
    prompts, parameters = requests(18, stop_token_ids=tuple(range(0, VOCABULARY, 40)), **sampling)
    completions = engine.generate_all(prompts, parameters)
    assert {c.stop for c in completions} == {"stop", "length"}
    for prompt, p, completion in zip(prompts, parameters, completions, strict=True):
        assert_same(completion, naive(prompt, p))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_are_the_trainers(engine: NativeEngine, model: Decoder, temperature: float) -> None:
    prompts, parameters = requests(8, temperature=temperature, top_p=0.9)
    completions = engine.generate_all(prompts, parameters)
    rows = np.zeros((8, LENGTH), np.int32)
    lengths = [len(p) + len(c.tokens) for p, c in zip(prompts, completions, strict=True)]
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        rows[row, : lengths[row]] = [*prompt, *completion.tokens]
    segments = jnp.asarray(np.arange(LENGTH) < np.asarray(lengths)[:, None], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), rows.shape)
    hidden, _ = model(jnp.asarray(rows), positions, segments)
    stats = token_stats(
        model.logits, hidden, jnp.asarray(rows), segments, temperature=temperature, vocab_size=VOCABULARY
    )
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        expected = np.asarray(stats.logps)[row, len(prompt) : lengths[row]]
        np.testing.assert_allclose(completion.logps, expected, atol=1e-5)


def test_a_sample_does_not_depend_on_company_slot_or_chunk(engine: NativeEngine, model: Decoder) -> None:
    prompts, parameters = requests(9)
    expected = engine.generate_all(prompts, parameters)
    assert_same(engine.generate_all(prompts[:1], parameters[:1])[0], expected[0])
    for completion, e in zip(engine.generate_all(prompts[::-1], parameters[::-1]), expected[::-1], strict=True):
        assert_same(completion, e)
    chunks = make_engine(model, slots=3, decode_steps=16)
    for completion, e in zip(chunks.generate_all(prompts, parameters), expected, strict=True):
        assert_same(completion, e)


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
            assert len(cut.kept_logps) == len(cut.weights_versions) == first + 1
    pair = f"{free.tokens[10]}><{free.tokens[11]}"
    (cut,) = engine.generate_all([prompt], [params(max_tokens=20, stop=(pair,))])
    assert cut.tokens == free.tokens[:12]


def test_many_stop_tokens(model: Decoder, naive: Any, engine: NativeEngine) -> None:
    p = params(max_tokens=20, stop_token_ids=tuple(range(200, 260)))
    assert_same(engine.generate_all([[9]], [p])[0], naive([9], p))


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 60, {"max_tokens": 5}, "60 tokens and max_tokens=5 need 65 positions, more than .* max_length=64"),
        ([1, VOCABULARY], {}, "from 1 to 512"),
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


def gather(engine: NativeEngine, prompts: Sequence[Sequence[int]], parameters: Sequence[SamplingParams]) -> Any:
    async def run() -> list[Completion]:
        return await asyncio.gather(*map(engine.generate, prompts, parameters))

    return asyncio.run(run())


def test_asynchronous_equals_synchronous_bit_by_bit(engine: NativeEngine) -> None:
    prompts, parameters = requests(13)
    expected = engine.generate_all(prompts, parameters)
    # Each run has an event loop of its own.
    assert gather(engine, prompts, parameters) == expected
    assert gather(engine, prompts, parameters) == expected


def test_the_event_loop_stays_free_while_sampling(engine: NativeEngine) -> None:
    async def turns(first: list[int]) -> tuple[int, ...]:
        """A second turn that follows from the first, beside other conversations."""
        answer = await engine.generate(first, params(max_tokens=9))
        return (await engine.generate([*first, *answer.tokens], params(max_tokens=9))).tokens

    async def run() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(turns([i + 1]) for i in range(6)))

    together = asyncio.run(run())
    assert together == [asyncio.run(turns([i + 1])) for i in range(6)]


def test_within_a_running_event_loop(engine: NativeEngine) -> None:
    async def cell() -> list[Completion]:
        return engine.generate_all([[1, 2]], [params()])

    assert asyncio.run(cell()) == engine.generate_all([[1, 2]], [params()])


def test_synchronous_while_asynchronous_is_refused(engine: NativeEngine) -> None:
    async def run() -> None:
        task = asyncio.create_task(engine.generate([1], params()))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="generating already"):
            engine.generate_all([[1]], [params()])
        await task

    asyncio.run(run())


async def until_full(engine: NativeEngine) -> None:
    """Until all slots are taken, which is when the first dispatch starts."""
    while engine.num_free:
        await asyncio.sleep(0)


def test_cancelled_requests_free_their_slots(engine: NativeEngine) -> None:
    prompts, parameters = requests(10, max_tokens=25)
    expected = engine.generate_all(prompts, parameters)

    async def run() -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(*request)) for request in zip(prompts, parameters, strict=True)]
        await until_full(engine)
        for task in (tasks[0], tasks[3], tasks[8]):  # two in slots, one in the queue
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [i for i, d in enumerate(done) if isinstance(d, asyncio.CancelledError)] == [0, 3, 8]
        return [d for d in done if isinstance(d, Completion)]

    for completion, e in zip(
        asyncio.run(run()), [e for i, e in enumerate(expected) if i not in (0, 3, 8)], strict=True
    ):
        assert_same(completion, e)


def test_everything_abandoned(engine: NativeEngine) -> None:
    """The event loop ends while samples are under way; the next one finds an idle engine."""
    expected = engine.generate_all([[1, 2]], [params()])

    async def leave() -> None:
        tasks = [asyncio.create_task(engine.generate([i + 1], params(i, max_tokens=40))) for i in range(6)]
        await until_full(engine)
        assert not any(task.done() for task in tasks)

    asyncio.run(leave())
    assert engine.num_free == engine.slots
    assert gather(engine, [[1, 2]], [params()]) == expected


def test_an_error_reaches_everybody_and_the_engine_lives_on(engine: NativeEngine, model: Decoder) -> None:
    expected = engine.generate_all([[1, 2]], [params()])
    broken = tiny_model()
    broken.embed.embedding.set_value(broken.embed.embedding[...] * jnp.nan)
    engine.update_weights(broken, 7)

    async def run() -> list[Any]:
        running = [engine.generate([i + 1], params(i)) for i in range(6)]
        return await asyncio.gather(*running, return_exceptions=True)

    errors = asyncio.run(run())
    assert len(errors) == 6
    assert all(isinstance(e, FloatingPointError) and "version 7" in str(e) for e in errors)
    with pytest.raises(FloatingPointError, match="version 7"):
        engine.generate_all([[1]], [params()])
    assert engine.num_free == engine.slots
    engine.update_weights(model, 8)
    (completion,) = engine.generate_all([[1, 2]], [params()])
    assert completion.tokens == expected[0].tokens


def test_close_ends_what_runs(model: Decoder) -> None:
    engine = make_engine(model)

    async def run() -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate([i + 1], params(i, max_tokens=60))) for i in range(6)]
        await until_full(engine)
        engine.close()
        return await asyncio.gather(*tasks)

    completions = asyncio.run(run())
    assert all(c.stop == "abort" and len(c.tokens) == len(c.logps) < 60 for c in completions)
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate_all([[1]], [params()])


def test_new_weights_between_tokens(engine: NativeEngine, model: Decoder, other_model: Decoder) -> None:
    """Tokens sampled before keep their cache; those after are the new model's, and each knows its version."""
    prompt, p = [4, 8, 15], params(max_tokens=30)

    async def run() -> Completion:
        task = asyncio.create_task(engine.generate(prompt, p))
        await asyncio.sleep(0)
        engine.update_weights(model, 3)
        while not any(request.tokens for request in engine._scheduler.running.values()):
            await asyncio.sleep(0)
        engine.update_weights(other_model, 4)
        return await task

    completion = asyncio.run(run())
    versions = list(completion.weights_versions)
    assert set(versions) == {3, 4}
    assert versions == sorted(versions)
    assert_same(completion, piecewise([other_model if v == 4 else model for v in versions], prompt, p, versions))


def piecewise(models: Sequence[Decoder], prompt: Sequence[int], p: SamplingParams, versions: list[int]) -> Completion:
    """Token i by `models[i]`, over the cache that the earlier ones wrote."""
    cache = empty_cache(models[0].config, 1, LENGTH, jnp.dtype(jnp.float32))
    keys = jnp.tile(jnp.asarray(p.key, jnp.uint32), (LENGTH, 1))
    u = np.asarray(uniforms(keys, jnp.arange(LENGTH, dtype=jnp.int32)), np.float64)
    step = jax.jit(lambda weights, *args: source.bind(weights)(*args))
    source = ModelWeights(models[0])
    tokens, logps = list(prompt), []
    for position in range(len(prompt) + len(models) - 1):
        writer = models[max(0, position - len(prompt) + 1)]
        one = jnp.ones((1, 1), jnp.int32)
        hidden, cache = step(ModelWeights(writer).read(), one * tokens[position], one * position, one, cache)
        if position >= len(prompt) - 1:
            logits = np.asarray(writer.logits(hidden))[0, 0]
            token, logp, _ = sample_reference(logits, u[position + 1], p.temperature, p.top_k, p.top_p, p.min_p)
            tokens.append(token)
            logps.append(logp)
    return Completion(
        tokens=tuple(tokens[len(prompt) :]),
        logps=tuple(logps),
        kept_logps=(0.0,) * len(logps),
        stop="length",
        weights_versions=tuple(versions),
    )


def test_the_engine_shares_the_models_arrays(model: Decoder) -> None:
    engine = make_engine(model)
    arrays = ModelWeights(model).read()
    assert all(engine._loaded.arrays[path] is array for path, array in arrays.items())


def test_sharded_weights(model: Decoder, engine: NativeEngine) -> None:
    mesh = make_mesh(MeshSection(data=2, fsdp=2, tensor=2))
    sharded = tiny_model()
    weights = ModelWeights(sharded)
    dims = weights.dims()
    weights.write({p: jax.device_put(w, param_sharding(mesh, p, dims[p], w.shape)) for p, w in weights.read().items()})
    prompts, parameters = requests(5)
    several = make_engine(sharded)
    for completion, e in zip(
        several.generate_all(prompts, parameters), engine.generate_all(prompts, parameters), strict=True
    ):
        assert_same(completion, e)


def test_every_program_is_compiled_once(engine: NativeEngine, model: Decoder, other_model: Decoder) -> None:
    rng = np.random.default_rng(1)
    warm = make_engine(model, slots=4, decode_steps=5)
    warm.generate_all([[1] * 60, [1] * 30, [1] * 10, [1]], [params(max_tokens=4)] * 4)
    compiled = len(warm.programs)
    for version, weights in enumerate((model, other_model, model)):
        warm.update_weights(weights, version)
        number = int(rng.integers(1, 12))
        prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in rng.integers(1, 50, number)]
        sampling = [
            params(i, max_tokens=int(rng.integers(1, 14)), top_k=int(rng.integers(0, 3))) for i in range(number)
        ]
        warm.generate_all(prompts, sampling)
    assert len(warm.programs) == compiled == 4  # prompts of 16, 32 and 64, decoding
