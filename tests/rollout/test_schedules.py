"""Exactness over random schedules: whatever the engine does with them, each request gets what it would get alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest

from posttrain.models.decoder import Decoder
from posttrain.rollout import scheduler
from posttrain.rollout.blocks import BLOCK, Window
from posttrain.rollout.engine import NativeEngine
from tests.rollout.engines import VOCABULARY, NaiveEngine, make_engine
from tests.rollout.schedules import Run, check, schedule
from tests.tiny import WINDOW, tiny_model

LENGTH = 208
FEW, ALL = 2, 200


@pytest.fixture(scope="module")
def models(model: Decoder) -> Sequence[Decoder]:
    return model, tiny_model(seed=1)


@pytest.fixture(scope="module")
def small(model: Decoder) -> Iterator[NativeEngine]:
    """Blocks for one and a half sequences: preemptions are the rule. Layers with a window have fewer, which serve
    prompts of 32 tokens at once."""
    with patch.multiple(scheduler, PROMPT_TOKENS=32, PROMPT_CHUNK=32):
        engine = make_engine(model, slots=4, max_length=LENGTH, decode_steps=20, cache_tokens=22 * BLOCK)
        assert engine._runner.window == Window(WINDOW, 20)
        yield engine


@pytest.fixture(scope="module")
def naive(models: Sequence[Decoder]) -> Sequence[NaiveEngine]:
    return [NaiveEngine(model, length=LENGTH) for model in models]


def run(engine: NativeEngine, naive: Sequence[NaiveEngine], models: Sequence[Decoder], seed: int) -> None:
    """In turn greedy and drawn, plain, plain with trouble, and with unusual settings and trouble."""
    kind = seed // 2 % 3
    plan = schedule(
        seed,
        vocabulary=VOCABULARY,
        longest=LENGTH - 8,
        temperature=float(seed % 2),
        unusual=kind == 2,
        troubled=kind > 0,
    )
    whole = check(plan, asyncio.run(Run(engine, plan, models).completions()), naive)
    assert whole == len(plan.requests) or "update" in plan.troubles
    assert engine.num_free == engine.slots and engine.num_used_blocks == 0


@pytest.mark.parametrize("seed", range(FEW))
def test_engine_equals_naive(
    small: NativeEngine, naive: Sequence[NaiveEngine], models: Sequence[Decoder], seed: int
) -> None:
    run(small, naive, models, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(FEW, ALL))
def test_engine_equals_naive_over_200_schedules(
    small: NativeEngine, naive: Sequence[NaiveEngine], models: Sequence[Decoder], seed: int
) -> None:
    run(small, naive, models, seed)


@pytest.mark.thorough
def test_they_shared_and_were_preempted(
    small: NativeEngine, naive: Sequence[NaiveEngine], models: Sequence[Decoder]
) -> None:
    """What the schedules are for."""
    small.metrics()
    for seed in range(2):
        run(small, naive, models, seed)
    metrics = small.metrics()
    assert metrics["rollout/prefix_hit_rate"] > 0.1
    assert metrics["rollout/preemptions"] > 0
    assert metrics["rollout/cache_peak"] > 0.8
