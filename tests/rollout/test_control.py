"""Abort, pause, drain, resume, and what becomes of samples meanwhile; a soak; merged adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.soak import soak
from posttrain import tree
from posttrain.config import LoRA
from posttrain.errors import ConfigError
from posttrain.models.decoder import Decoder
from posttrain.rollout import scheduler
from posttrain.rollout.dispatch import Dispatch, DispatchOutcome
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.types import Call, Completion, SamplingParams
from posttrain.weights.lora import attach_lora
from posttrain.weights.state import ModelWeights
from tests.rollout.engines import LENGTH, NaiveEngine, assert_same, make_engine, params, requests, text_of
from tests.tiny import shake, tiny_model


def start(
    engine: NativeEngine, prompts: Sequence[Sequence[int]], parameters: Sequence[SamplingParams]
) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(engine.generate(*request)) for request in zip(prompts, parameters, strict=True)]


async def until_sampling(engine: NativeEngine) -> None:
    """Until a request has its first tokens, and goes on."""
    while not any(request.tokens for request in engine._scheduler.requests()):
        await asyncio.sleep(0.001)


def test_abort_returns_what_there_is_and_a_later_step_goes_on_with_it(engine: NativeEngine) -> None:
    """The sample is the one that would have come without the abort, also in log-probabilities and versions."""
    prompts, parameters = [[i + 1] * 9 for i in range(6)], [params(i, max_tokens=40) for i in range(6)]
    expected = engine.generate_all(prompts, parameters)

    async def run() -> list[Completion]:
        tasks = start(engine, prompts, parameters)
        await until_sampling(engine)
        assert engine.abort([parameters[0].key, parameters[5].key]) == 2
        others = await asyncio.gather(*tasks[1:5])
        for other, e in zip(others, expected[1:5], strict=True):
            assert_same(other, e)
        return [await tasks[0], await tasks[5]]

    running, waiting = asyncio.run(run())
    assert (running.stop, waiting.stop, waiting.tokens) == ("abort", "abort", ())
    assert 0 < len(running.tokens) < 40 and running.tokens == expected[0].tokens[: len(running.tokens)]

    async def later() -> list[Completion]:
        again = [engine.generate(prompts[i], parameters[i], partial=b) for i, b in ((0, running), (5, waiting))]
        return await asyncio.gather(*again)

    for completion, e in zip(asyncio.run(later()), (expected[0], expected[5]), strict=True):
        assert_same(completion, e)


def test_only_an_aborted_completion_goes_on(engine: NativeEngine) -> None:
    (done,) = engine.generate_all([[1, 2]], [params(max_tokens=3)])
    with pytest.raises(ValueError, match="a completion of 3 tokens with stop 'length' cannot be resumed"):
        asyncio.run(engine.generate([1, 2], params(max_tokens=3), partial=done))


def test_paused_requests_go_on_where_they_were(engine: NativeEngine) -> None:
    prompts, parameters = requests(6, max_tokens=25)
    expected = engine.generate_all(prompts, parameters)

    async def run() -> list[Completion]:
        tasks = start(engine, prompts, parameters)
        await until_sampling(engine)
        await engine.pause()
        before = [len(r.tokens) for r in engine._scheduler.requests()]
        for _ in range(50):
            await asyncio.sleep(0)
        assert [len(r.tokens) for r in engine._scheduler.requests()] == before and not all(t.done() for t in tasks)
        with pytest.raises(RuntimeError, match="generating already"):
            engine.generate_all([[1]], [params()])
        engine.resume()
        return await asyncio.gather(*tasks)

    for completion, e in zip(asyncio.run(run()), expected, strict=True):
        assert_same(completion, e)


def test_drained_samples_are_of_one_version_each(engine: NativeEngine, model: Decoder) -> None:
    other = tiny_model(seed=1)
    prompts, parameters = [[i + 1] for i in range(7)], [params(i, max_tokens=20) for i in range(7)]

    async def run() -> list[Completion]:
        engine.update_weights(model, 1)
        tasks = start(engine, prompts, parameters)
        await until_sampling(engine)
        await engine.drain()
        done = [task.done() for task in tasks]
        assert engine.num_free == engine.slots and done == [True] * 4 + [False] * 3
        engine.update_weights(other, 2)
        engine.resume()
        return await asyncio.gather(*tasks)

    completions = asyncio.run(run())
    assert [set(c.weights_versions) for c in completions] == [{1}] * 4 + [{2}] * 3
    engine.update_weights(other, 2)
    for completion, e in zip(completions[4:], engine.generate_all(prompts[4:], parameters[4:]), strict=True):
        assert_same(completion, e)


def test_drain_ends_what_a_pause_stopped(engine: NativeEngine) -> None:
    prompts, parameters = [[i + 1] for i in range(7)], [params(i, max_tokens=20) for i in range(7)]

    async def run() -> None:
        tasks = start(engine, prompts, parameters)
        await until_sampling(engine)
        await engine.pause()
        assert engine.abort([parameters[0].key]) == 1
        aborted = await tasks[0]
        # It goes on behind those who have not begun.
        tasks[0] = asyncio.create_task(engine.generate(prompts[0], parameters[0], partial=aborted))
        await asyncio.sleep(0)
        await engine.drain()
        assert engine._scheduler.drained
        assert [task.done() for task in tasks] == [True] * 4 + [False] * 3
        engine.resume()
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_a_pause_during_a_drain_is_an_error_of_the_caller(engine: NativeEngine) -> None:
    async def run() -> None:
        task = asyncio.create_task(engine.generate([1], params(max_tokens=40)))
        await until_sampling(engine)
        drained = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        await engine.pause()
        with pytest.raises(RuntimeError, match=r"drain: pause\(\) or resume\(\) was called"):
            await drained
        engine.resume()
        await task

    asyncio.run(run())


def test_cancelling_while_paused_frees_at_once(engine: NativeEngine) -> None:
    async def run() -> None:
        tasks = start(engine, [[i + 1] for i in range(6)], [params(i, max_tokens=40) for i in range(6)])
        await until_sampling(engine)
        await engine.pause()
        assert engine.num_free == 0 and engine.num_used_blocks > 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert engine.num_free == engine.slots and engine.num_used_blocks == 0
        engine.resume()

    asyncio.run(run())


@pytest.mark.thorough
def test_new_weights_while_prompts_are_read(
    engine: NativeEngine, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of a prompt, and tokens after a prompt that was read before, are of one version."""
    monkeypatch.setattr(scheduler, "PROMPT_CHUNK", 16)
    monkeypatch.setattr(scheduler, "PROMPT_TOKENS", 32)
    other = tiny_model(seed=1)
    prompts = [[7, 8, 9], [*range(50)], [*range(100, 150)]]
    parameters = [params(i, max_tokens=8, prompt_logps=i > 0) for i in range(3)]
    engine.update_weights(model, 1)
    requests = [engine._submit(Call(*request)) for request in zip(prompts, parameters, strict=True)]
    engine.step()
    assert engine._scheduler.running[requests[0].number].ready and not requests[0].tokens, "it waits for the others"
    assert 1 < len(requests[1].prompt_logps) < 50
    engine.update_weights(other, 2)
    while engine.step():
        pass
    naive = NaiveEngine(other)
    for prompt, p, request in zip(prompts, parameters, requests, strict=True):
        expected = naive.generate(prompt, p)
        assert_same(request.future.result(), replace(expected, weights_versions=(2,) * 8))


def test_one_bad_row_fails_alone(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others read again what they had in the cache, which is made anew."""
    prompts, parameters = [[i + 1] * 9 for i in range(6)], [params(i, max_tokens=20) for i in range(6)]
    expected = engine.generate_all(prompts, parameters)
    healthy, emptied = engine._runner.run, []

    def run_one_bad(dispatch: Dispatch) -> DispatchOutcome:
        outcome = healthy(dispatch)
        if dispatch.decode is None or outcome.chunk is None:
            return outcome
        rows = dispatch.decode.places.items()
        bad = [i for i, row in rows if row.request.params == parameters[1] and len(row.request.tokens) >= 5]
        logps = np.array(outcome.chunk.logps)
        logps[1, bad] = np.nan
        chunk = jax.device_put(outcome.chunk)  # whose constructor takes arrays of JAX only
        return replace(outcome, chunk=tree.replace(chunk, logps=jnp.asarray(logps)))

    reset = engine._runner.reset
    monkeypatch.setattr(engine._runner, "run", run_one_bad)
    monkeypatch.setattr(engine._runner, "reset", lambda: emptied.append(reset()))

    async def run() -> list[Any]:
        return await asyncio.gather(*start(engine, prompts, parameters), return_exceptions=True)

    completions = asyncio.run(run())
    assert isinstance(bad := completions[1], FloatingPointError), str(bad)
    assert "not finite" in str(bad) and len(emptied) == 1
    for index in (0, 2, 3, 4, 5):
        assert_same(completions[index], expected[index])


def test_a_tokenizer_that_raises_fails_one_request(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, parameters = [[i + 1] for i in range(6)], [params(i, stop=("none",)) for i in range(6)]
    expected = engine.generate_all(prompts, parameters)
    broken = expected[2].tokens[:2]

    def decode(tokens: Sequence[int], skip_special_tokens: bool = True, *, after: Sequence[int] = ()) -> str:
        if tuple(tokens[:2]) == broken:
            raise UnicodeDecodeError("utf-8", b"", 0, 1, "not text")
        return text_of(tokens)

    monkeypatch.setattr(engine, "_decode_text", decode)

    async def run() -> list[Any]:
        return await asyncio.gather(*start(engine, prompts, parameters), return_exceptions=True)

    completions = asyncio.run(run())
    assert isinstance(completions[2], UnicodeDecodeError)
    for index in (0, 1, 3, 4, 5):
        assert_same(completions[index], expected[index])


def test_hundreds_of_tasks(engine: NativeEngine) -> None:
    """Four slots for 240 callers, a fifth of whom leave."""
    prompts = [[i % 50, i % 7] for i in range(240)]
    parameters = [params(i, max_tokens=3) for i in range(240)]
    expected = engine.generate_all(prompts, parameters)

    async def run() -> list[Any]:
        tasks = start(engine, prompts, parameters)
        while engine.num_free:
            await asyncio.sleep(0)
        for task in tasks[::5]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for index, (got, e) in enumerate(zip(asyncio.run(run()), expected, strict=True)):
        if isinstance(got, Completion):
            assert got.tokens == e.tokens
        else:
            assert index % 5 == 0


@pytest.mark.thorough
@pytest.mark.optimized
def test_a_soak_of_2000_requests() -> None:
    """The benchmark of wear: nothing is lost, compiled late, or grows."""
    report = soak(2000, seed=1, longest=96)
    # How many are aborted depends on the clock.
    assert report.updates > 0 and {"length", "stop"} <= report.ends.keys()


@pytest.mark.thorough
def test_a_merged_adapter_samples_as_the_adapter() -> None:
    adapted = tiny_model(num_layers=1, windows=(None,))
    with pytest.raises(ConfigError, match="rollout.merge_lora: the model has no adapter"):
        make_engine(adapted, merge_lora=True)
    attach_lora(adapted, LoRA(rank=4), seed=0)
    shake(adapted, seed=2, stddev=0.05)
    beside, merged = make_engine(adapted), make_engine(adapted, merge_lora=True)
    assert not any("lora" in path for path in merged._loaded.arrays)
    assert merged._loaded.arrays["final_norm.scale"] is ModelWeights(adapted).read()["final_norm.scale"]
    prompts, parameters = requests(4)
    for completion, e in zip(
        merged.generate_all(prompts, parameters), beside.generate_all(prompts, parameters), strict=True
    ):
        assert_same(completion, e)


def test_a_cache_too_small(model: Decoder) -> None:
    with pytest.raises(ValueError, match=f"a cache of 64 tokens holds no sequence of max_length={LENGTH}"):
        make_engine(model, cache_tokens=64)
