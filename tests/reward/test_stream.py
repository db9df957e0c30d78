"""Groups scored as they end: the same values as all at once, within one time-out after the last one."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from posttrain.errors import ConfigError
from posttrain.reward.call import Failure, Scores
from posttrain.reward.function import Reward
from posttrain.reward.rubric import Rubric
from posttrain.reward.types import Rewards
from posttrain.runtime.event_loop import run_async
from tests.rl.helpers import groups

pytestmark = pytest.mark.fast

TEXTS = [["a", "bb"], ["ccc", ""], ["dddd", "e"], ["ff", "g"]]


def reward(function: Any, **changes: Any) -> Reward:
    fields: dict[str, Any] = {"function": function, "weight": 1.0, "timeout_s": 60.0}
    return Reward(**fields | changes)


def length(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
    log_metric("mean", sum(map(len, completions)) / len(completions))
    log_extra("text", completions)
    if "ccc" in completions and len(completions) == 1:
        raise KeyError("ccc")
    return [math.nan if text == "ccc" else float(len(text)) for text in completions]


def streamed(rubric: Rubric, order: list[int], pause_s: float = 0.0) -> Rewards:
    """Rewards of groups that end in this order."""
    made = groups(TEXTS)

    async def run() -> Rewards:
        async with rubric.scoring(0) as scoring:
            for number in order:
                scoring.add(made[number])
                await asyncio.sleep(pause_s)
            return await scoring.result(made)

    return run_async(run())


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 3, 0, 1], [1]])
@pytest.mark.parametrize("pause_s", [0.0, 0.01])
def test_values_are_those_of_all_at_once(order: list[int], pause_s: float) -> None:
    rubric = Rubric([reward(length), reward(lambda completions: [1.0] * len(completions), name="one", weight=2.0)])
    whole, found = run_async(rubric.score(groups(TEXTS))), streamed(rubric, order, pause_s)
    assert_array_equal(found.total_PG, whole.total_PG)
    assert found.errors == whole.errors and len(whole.errors) == 1
    assert found.extras == whole.extras == {"text": [text for group in TEXTS for text in group]}
    name = "rewards/length/mean"
    assert found.metrics[name].value() == pytest.approx(whole.metrics[name].value())


def test_the_first_group_is_scored_while_others_are_sampled() -> None:
    """Red if functions wait for the last group: then nothing has been called before it."""
    calls: list[int] = []

    def counts(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        called.set()
        sampled.wait(10)
        return [1.0] * len(completions)

    rubric, made = Rubric([reward(counts)]), groups(TEXTS)
    called, sampled = threading.Event(), threading.Event()

    async def run() -> None:
        async with rubric.scoring(0) as scoring:
            scoring.add(made[0])
            assert await asyncio.to_thread(called.wait, 10)
            for group in made[1:]:
                scoring.add(group)
            sampled.set()
            await scoring.result(made)
        assert calls == [2, 6], "one call for all that have come during the first"

    run_async(run())


def test_one_time_out_after_the_last_group() -> None:
    """Red if each call had a full time-out one after the other: three calls with a hanging sample each."""

    async def hangs(completions: list[str]) -> list[float]:
        await asyncio.sleep(30 if {"a", "ccc", "dddd"} & {*completions} else 0)
        return [1.0] * len(completions)

    start = time.monotonic()
    found = streamed(Rubric([reward(hangs, timeout_s=0.8)]), [0, 1, 2, 3], pause_s=0.1)
    assert time.monotonic() - start < 0.4 + 2 * 0.8
    assert_array_equal(found.total_PG, [[math.nan, 1], [math.nan, 1], [math.nan, 1], [1, 1]])
    assert {(error.prompt, error.kind) for error in found.errors} == {(0, "timeout"), (1, "timeout"), (2, "timeout")}


def test_groups_behind_a_call_that_hangs_have_time() -> None:
    """Red if the last call waited for the first one: then nothing would be left of its time-out."""

    async def hangs(completions: list[str]) -> list[float]:
        await asyncio.sleep(30 if "a" in completions else 0.3)
        return [1.0] * len(completions)

    found = streamed(Rubric([reward(hangs, timeout_s=2.0)]), [0, 1, 2, 3], pause_s=0.02)
    assert_array_equal(found.total_PG, [[math.nan, 1], [1, 1], [1, 1], [1, 1]])


def test_calls_end_with_a_failed_step() -> None:
    ended = asyncio.Event()

    async def waits(completions: list[str]) -> list[float]:
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()
        return []

    rubric = Rubric([reward(waits)])

    async def run() -> None:
        async with rubric.scoring(0) as scoring:
            scoring.add(groups(TEXTS)[0])
            await asyncio.sleep(0.05)
            raise RuntimeError("of the sampler")

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="of the sampler"):
        run_async(run())
    while not ended.is_set() and time.monotonic() - start < 10.0:
        time.sleep(0.01)
    assert ended.is_set()


def test_cached_values_are_not_made_again() -> None:
    calls: list[list[str]] = []

    def graded(completions: list[str], answer: list[str], scale: float) -> list[float | None]:
        calls.append(list(completions))
        if "bad" in completions:
            raise ValueError("bad")
        return [None if text == "none" else scale * len(text + a) for text, a in zip(completions, answer, strict=True)]

    rubric = Rubric([reward(graded, cache=True, args={"scale": 2.0})])
    rows = [{"prompt": "p", "answer": "1"}, {"prompt": "q", "answer": "22"}]
    first = run_async(rubric.score(groups([["a", "a"], ["a", "none"]], rows)))
    assert calls == [["a", "a", "none"]], "equal samples of a call are scored once"
    assert_array_equal(first.parts_PG["graded"], [[4.0, 4.0], [6.0, np.nan]])
    again = run_async(rubric.score(groups([["a", "b"], ["none", "bad"]], rows)))
    assert calls[1:] == [["b", "bad"], ["b"], ["bad"]]
    assert_array_equal(again.parts_PG["graded"], [[4.0, 4.0], [np.nan, np.nan]])
    assert [(error.prompt, error.sample) for error in again.errors] == [(1, 1)], "None is a value, and kept"
    assert again.metrics["rewards/graded/cache_hits"].value() == 0.5
    run_async(rubric.score(groups([["bad", "a"]], rows)))
    assert calls[4] == ["bad"], "failures are made again"


def test_functions_that_cannot_be_cached() -> None:
    with pytest.raises(ConfigError, match="cache: length takes log_metric; name only arguments that determine"):
        Rubric([reward(length, cache=True)])

    def reads(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(columns))]

    with pytest.raises(ConfigError, match=r"cache: reads reads all its keywords \(\*\*\)"):
        Rubric([reward(reads, cache=True)])


def test_concurrent_scorings_share_calls() -> None:
    """As in an asynchronous run, where each group is scored for itself: no worker for each of them."""
    calls: list[int] = []

    def counts(completions: list[str], log_metric: Any) -> list[float]:
        calls.append(len(completions))
        log_metric("calls", len(calls))
        time.sleep(0.05)
        return [float(len(text)) for text in completions]

    rubric, made = Rubric([reward(counts)]), groups(TEXTS)

    async def run() -> list[Rewards]:
        return await asyncio.gather(*(rubric.score([group]) for group in made))

    found = run_async(run())
    assert_array_equal(np.concatenate([one.total_PG for one in found]), [[1, 2], [3, 0], [4, 1], [2, 1]])
    assert sum(calls) == 8 and len(calls) <= 2
    assert found[0].metrics["rewards/counts/calls"].weight == 2, "a mean over its own samples"


def test_an_error_of_the_call_reaches_all_who_wait() -> None:
    def needs(completions: list[str], odd: Any) -> list[float]:
        return []

    async def run(rubric: Rubric) -> list[Any]:
        made = groups(TEXTS)
        return await asyncio.gather(*(rubric.score([group]) for group in made), return_exceptions=True)

    rubric = Rubric([reward(needs, args={"odd": lambda: 0}, isolated=("posttrain.tree:Mean", "."))])
    with rubric.running():
        found = run_async(run(rubric))
    assert [type(error) for error in found] == [ConfigError] * 4


def test_scores_of_parts_are_those_of_the_whole() -> None:
    failures = {1: Failure("error", "no"), 3: Failure("timeout", "late")}
    scores = Scores([1.0, math.nan, 0.5, math.nan], failures, {"length": [(2.5, 4)]}, {"answer": ["a", "b", "c", "d"]})
    parts = Scores.concatenated([scores.part(0, 1), scores.part(1, 3)])
    assert [str(value) for value in parts.values] == [str(value) for value in scores.values]
    assert (parts.failures, parts.extras) == (failures, scores.extras)
    assert parts.metrics == {"length": [(2.5, 1), (2.5, 3)]}
    whole = scores._replace(failures={1: Failure("error", "no")})
    sent = Scores.from_json(json.loads(json.dumps(whole.to_json())), 4)
    assert str(sent) == str(whole)
