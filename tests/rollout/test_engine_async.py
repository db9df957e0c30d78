"""The native engine under asyncio: cancellation, errors, closing, new event loops, new weights between tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.models.cache import empty_cache
from posttrain.models.decoder import Decoder
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.sampling import uniforms
from posttrain.rollout.types import Completion, NewTokens, SamplingParams
from posttrain.weights.state import ModelWeights
from tests.oracles import sample_reference
from tests.rollout.engines import LENGTH, assert_same, make_engine, params, requests
from tests.tiny import tiny_model


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


def test_programs_run_in_one_thread_whatever_the_event_loop(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread would keep what programs have freed in it."""
    threads: list[threading.Thread] = []
    run = engine._runner.run

    def noted(dispatch: Any) -> Any:
        threads.append(threading.current_thread())
        return run(dispatch)

    monkeypatch.setattr(engine._runner, "run", noted)
    prompts, parameters = requests(3)
    for _ in range(3):
        gather(engine, prompts, parameters)
    assert len(threads) > 3 and len(set(threads)) == 1 and threads[0] is not threading.current_thread()


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


def test_tokens_are_handed_over_as_they_are_sampled(engine: NativeEngine) -> None:
    """Those of all dispatches are the completion, also cut at a stop string; nothing comes after a cancellation, whose
    blocks are free at once."""
    prompts, parameters = requests(6, max_tokens=23, top_logps=2)
    plain = engine.generate_all(prompts, parameters)
    parameters[1] = params(1, max_tokens=23, top_logps=2, stop=(f"<{plain[1].tokens[7]}>",))
    expected = engine.generate_all(prompts, parameters)
    told: list[list[NewTokens]] = [[] for _ in prompts]

    async def run() -> list[Any]:
        running = [
            asyncio.create_task(engine.generate(*one, on_tokens=pieces.append))
            for one, pieces in zip(zip(prompts, parameters, strict=True), told, strict=True)
        ]
        while not told[0]:
            await asyncio.sleep(0)
        running[0].cancel()
        await asyncio.wait(running[:1])
        assert all(call.prompt != tuple(prompts[0]) for call in engine.under_way())
        chains = [row.chain for row in engine._scheduler.running.values()]
        held = {block for chain in chains for block in (*chain.blocks, *([chain.source.block] if chain.source else ()))}
        assert engine.num_used_blocks == len(held) > 0
        return await asyncio.gather(*running, return_exceptions=True)

    done = asyncio.run(run())
    assert isinstance(done[0], asyncio.CancelledError) and len(told[0]) == 1
    for pieces, got, e in list(zip(told, done, expected, strict=True))[1:]:
        assert_same(got, e)
        assert len(pieces) > 1 and all(len(piece.tokens) == len(piece.logps) > 0 for piece in pieces)
        assert tuple(token for piece in pieces for token in piece.tokens) == got.tokens
        assert tuple(top for piece in pieces for top in piece.top_logps or ()) == got.top_logps


def test_the_first_token_of_a_stream_comes_at_once(engine: NativeEngine) -> None:
    """Before those after it, unless rows that are under way would wait for it."""
    told: dict[str, list[int]] = {"alone": [], "beside": []}

    async def streamed(name: str) -> Completion:
        return await engine.generate([1, 2], params(), on_tokens=lambda new: told[name].append(len(new.tokens)))

    async def beside() -> Completion:
        other = asyncio.create_task(engine.generate([3, 4], params(max_tokens=40)))
        while engine.num_free == engine.slots:
            await asyncio.sleep(0)
        streaming = await streamed("beside")
        assert not other.done()
        other.cancel()
        return streaming

    (expected,) = engine.generate_all([[1, 2]], [params()])
    assert_same(asyncio.run(streamed("alone")), expected)
    assert_same(asyncio.run(beside()), expected)
    assert told["alone"][0] == 1 < told["alone"][1], told
    assert told["beside"][0] > 1, told


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


def test_new_weights_between_tokens(engine: NativeEngine, model: Decoder) -> None:
    """Tokens sampled before keep their cache; those after are the new model's, and each knows its version."""
    prompt, p, other_model = [4, 8, 15], params(max_tokens=30), tiny_model(seed=1)

    async def run() -> Completion:
        task = asyncio.create_task(engine.generate(prompt, p))
        await asyncio.sleep(0)
        engine.update_weights(model, 3)
        while not any(request.tokens for request in engine._scheduler.requests()):
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
            token, logp, *_ = sample_reference(logits, u[position + 1], p, prompt, tokens[len(prompt) :])
            tokens.append(token)
            logps.append(logp)
    return Completion(
        tokens=tuple(tokens[len(prompt) :]),
        logps=tuple(logps),
        kept_logps=(0.0,) * len(logps),
        truncation_logps=(0.0,) * len(logps),
        stop="length",
        weights_versions=tuple(versions),
    )
