"""Abort, pause, drain, resume, and what becomes of samples meanwhile; a soak; merged adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from bench.soak import soak
from posttrain.config import ConfigError, LoRA
from posttrain.models.decoder import Decoder
from posttrain.rollout.native import NativeEngine
from posttrain.rollout.types import Completion, SamplingParams
from posttrain.weights.lora import attach_lora
from posttrain.weights.state import ModelWeights
from tests.rollout.engines import LENGTH, assert_same, make_engine, params, requests
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
        again = [engine.generate(prompts[i], parameters[i], begun=b) for i, b in ((0, running), (5, waiting))]
        return await asyncio.gather(*again)

    for completion, e in zip(asyncio.run(later()), (expected[0], expected[5]), strict=True):
        assert_same(completion, e)


def test_only_an_aborted_completion_goes_on(engine: NativeEngine) -> None:
    (done,) = engine.generate_all([[1, 2]], [params(max_tokens=3)])
    with pytest.raises(ValueError, match="a completion of 3 tokens that ended by 'length' cannot go on"):
        asyncio.run(engine.generate([1, 2], params(max_tokens=3), begun=done))


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
def test_a_short_soak() -> None:
    """The benchmark of wear, which also says that nothing is compiled after the warm-up."""
    report = soak(150, seed=1, longest=96)
    # How many are aborted depends on the clock.
    assert report.updates > 0 and {"length", "stop"} <= report.ends.keys()
    assert report.metrics["rollout/preemptions"] > 0


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
