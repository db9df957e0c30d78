"""Exactness over random schedules: whatever the engine does with them, each request gets what it would get alone."""

from __future__ import annotations

import os

import pytest

from posttrain.models.decoder import Decoder
from posttrain.rollout.native import NativeEngine
from tests.rollout.engines import VOCABULARY, NaiveEngine, assert_same, make_engine
from tests.rollout.schedules import run, schedule

LENGTH = 208
SCHEDULES = int(os.environ.get("ROLLOUT_SCHEDULES", "6"))
"""Each in turn greedy and drawn, plain and with unusual settings; the judgement is over 200."""


@pytest.fixture(scope="module")
def small(model: Decoder) -> NativeEngine:
    """Blocks for one and a half sequences: preemptions are the rule."""
    return make_engine(model, slots=4, max_length=LENGTH, decode_steps=20, cache_tokens=3 * LENGTH // 2)


@pytest.fixture(scope="module")
def naive(model: Decoder) -> NaiveEngine:
    return NaiveEngine(model, length=LENGTH)


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_engine_equals_naive(small: NativeEngine, naive: NaiveEngine, seed: int) -> None:
    plan = schedule(
        seed, vocabulary=VOCABULARY, longest=LENGTH - 8, temperature=float(seed % 2), unusual=seed // 2 % 3 == 2
    )
    for (prompt, p), completion in zip(plan.requests, run(small, plan), strict=True):
        assert_same(completion, naive.generate(prompt, p))
    assert small.num_free == small.slots
    assert all(lane.blocks.used == 0 for lane in small._scheduler.lanes)


def test_they_shared_and_were_preempted(small: NativeEngine) -> None:
    """What the schedules are for; after all of them."""
    metrics = small.metrics()
    assert metrics["rollout/prefix_hit_rate"] > 0.3
    assert metrics["rollout/preemptions"] > 0
    assert metrics["rollout/cache_peak"] > 0.8
