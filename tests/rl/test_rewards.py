"""The reward contract: keywords by name, None is not applicable, failures are counted and never 0."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from posttrain.errors import ConfigError, RunError
from posttrain.rl.rewards import Reward, Rubric, error_lines, missing_arguments
from posttrain.rl.step import RewardWatch
from posttrain.rl.types import Rewards
from posttrain.runtime.run_async import run_async
from tests.rl.helpers import groups, trajectory

TEXTS = (("x", "yy"), ("zzz", ""))


def score(*functions: Callable[..., Any], texts: Any = TEXTS, **kwargs: Any) -> Rewards:
    rows = [{"prompt": f"p{i}", "answer": f"a{i}"} for i in range(len(texts))]
    rewards = [
        Reward(function=f, weight=kwargs.get("weight", 1.0), timeout_s=kwargs.get("timeout_s", 60.0)) for f in functions
    ]
    return run_async(Rubric(rewards).score(groups(texts, rows)))


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


async def answered(completions: list[str], answer: list[str]) -> list[float]:
    return [float(a == "a1") for a in answer]


def test_functions_are_weighted_summed_and_get_columns_by_name() -> None:
    rubric = Rubric(
        [Reward(function=length, weight=2.0, timeout_s=60.0), Reward(function=answered, weight=-1.0, timeout_s=60.0)]
    )
    rows = [{"prompt": "p", "answer": "a0"}, {"prompt": "q", "answer": "a1"}]
    rewards = run_async(rubric.score(groups([["x", "yy"], ["zzz", ""]], rows)))
    assert rewards.total_PG.dtype == np.float32
    assert_array_equal(rewards.total_PG, [[2.0, 4.0], [5.0, -1.0]])
    assert_array_equal(rewards.parts_PG["length"], [[1.0, 2.0], [3.0, 0.0]])


def test_strings_for_plain_prompts_message_lists_for_conversations() -> None:
    seen: dict[str, Any] = {}

    def look(prompts: Any, completions: Any, completion_ids: Any, trajectories: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, ids=completion_ids)
        return [0.0] * len(trajectories)

    run_async(Rubric([Reward(function=look, weight=1.0, timeout_s=60.0)]).score([[trajectory("b")]]))
    assert seen == {"prompts": ["a"], "completions": ["b"], "ids": [[2, 3]]}
    run_async(Rubric([Reward(function=look, weight=1.0, timeout_s=60.0)]).score([[trajectory("b", plain=False)]]))
    assert seen["completions"] == [[{"role": "assistant", "content": "b"}]]
    assert seen["prompts"] == [[{"role": "user", "content": "a"}]]


def test_none_is_not_applicable_and_never_zero() -> None:
    def odd(completions: list[str]) -> list[float | None]:
        return [1.0 if len(text) % 2 else None for text in completions]

    rewards = score(odd, length)
    assert_array_equal(rewards.total_PG, [[2.0, 2.0], [4.0, 0.0]])
    alone = score(odd)
    assert_array_equal(alone.total_PG, [[1.0, math.nan], [1.0, math.nan]])
    assert not alone.errors


def test_an_exception_costs_only_the_samples_that_cause_it() -> None:
    def fragile(completions: list[str]) -> list[float]:
        return [1.0 / len(text) for text in completions]

    rewards = score(fragile, length)
    assert_array_equal(rewards.total_PG, [[2.0, 2.5], [np.float32(3 + 1 / 3), math.nan]])
    (error,) = rewards.errors
    assert (error.function, error.prompt, error.sample, error.kind) == ("fragile", 1, 1, "error")
    assert error.error == "ZeroDivisionError: float division by zero" or "division by zero" in error.error


def test_only_the_sample_that_hangs_loses_its_reward() -> None:
    def hangs(completions: list[str]) -> list[float]:
        time.sleep(30 if "zzz" in completions else 0)
        return [1.0] * len(completions)

    async def stalls(completions: list[str]) -> list[float]:
        await asyncio.sleep(30 if "x" in completions else 0)
        return [1.0] * len(completions)

    start = time.monotonic()
    rewards = score(hangs, stalls, timeout_s=0.3)
    assert time.monotonic() - start < 10
    assert_array_equal(rewards.total_PG, [[math.nan, 2.0], [math.nan, 2.0]])
    found = {(e.function, e.prompt, e.sample, e.kind, e.error) for e in rewards.errors}
    assert found == {
        ("hangs", 1, 0, "timeout", "no answer within 0.3 s"),
        ("stalls", 0, 0, "timeout", "no answer within 0.3 s"),
    }


def test_a_timeout_inside_a_function_is_its_own_error() -> None:
    def judge(completions: list[str]) -> list[float]:
        if "x" in completions:
            raise TimeoutError("socket")
        return [1.0] * len(completions)

    (error,) = score(judge).errors
    assert error.kind == "error" and error.error.startswith("TimeoutError: socket (") and __file__ in error.error


def test_a_function_that_exits_is_an_error_like_others() -> None:
    def leaves(completions: list[str]) -> list[float]:
        if "x" in completions:
            sys.exit(3)
        return [1.0] * len(completions)

    async def leaves_later(completions: list[str]) -> list[float]:
        return leaves(completions)

    start = time.monotonic()
    rewards = score(leaves, leaves_later, timeout_s=20.0)
    assert time.monotonic() - start < 10
    assert_array_equal(rewards.total_PG, [[math.nan, 2.0], [2.0, 2.0]])
    assert {(e.function, e.kind) for e in rewards.errors} == {("leaves", "error"), ("leaves_later", "error")}
    assert all(e.error.startswith(f"SystemExit: sys.exit(3) is called ({__file__}:") for e in rewards.errors)


def test_one_line_for_each_function_that_failed() -> None:
    def fragile(completions: list[str]) -> list[float]:
        return [1.0 / (len(text) - 2) for text in completions]

    def never(completions: list[str]) -> list[float]:
        return [{"x": 1.0, "yy": 1.0}[text] for text in completions]

    (of_fragile, of_never) = error_lines(score(fragile, never), groups(TEXTS))
    assert of_fragile.startswith("reward fragile: no value for 1 of 4 samples; the first, error: ZeroDivisionError: ")
    assert of_fragile.endswith(f"{__file__}:{fragile.__code__.co_firstlineno + 1}); sample 1 of prompt 0: 'yy'")
    assert "no value for 2 of 4 samples; the first, error: KeyError: 'zzz'" in of_never
    assert of_never.endswith("sample 0 of prompt 1: 'zzz'")
    assert error_lines(score(length), groups(TEXTS)) == []


def test_steps_without_any_reward_end_the_run_unless_one_comes_between() -> None:
    def never(completions: list[str]) -> list[None]:
        return [None] * len(completions)

    nothing, something = score(never), score(length)
    watch = RewardWatch(2)
    for step in range(3):
        watch.see(step, score())  # of a run that has no functions
    for step, rewards in enumerate((nothing, something, nothing, something), start=1):
        watch.see(step, rewards)
    watch.see(5, nothing)
    with pytest.raises(
        RunError, match="step 6: no sample has a reward, in 2 steps in a row.*the functions return None"
    ):
        watch.see(6, nothing)


def test_failing_on_every_sample_stops_the_run() -> None:
    def broken(completions: list[str]) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(ConfigError, match="reward broken: failed on every sample; the first error: KeyError: 'answer'"):
        score(broken)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (0.5, "must return a list of 4 numbers or None, got float"),
        ([1.0], "must return one value per completion, got 1 for 4"),
        ([1.0, 2.0, "3", 4.0], "each value must be a finite number or None, got '3'"),
        ([1.0, 2.0, math.nan, 4.0], "each value must be a finite number or None, got nan"),
    ],
)
def test_a_broken_contract_stops_the_run(result: Any, message: str) -> None:
    def broken() -> Any:
        return result

    with pytest.raises(ConfigError, match=f"reward broken: {message}"):
        score(broken)


def test_metrics_and_extra_columns() -> None:
    def logs(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("share", 0.25)
        log_extra("upper", [text.upper() for text in completions])
        return [0.0] * len(completions)

    rewards = score(logs)
    assert rewards.metrics == {"rewards/logs/share": 0.25}
    assert rewards.extras == {"upper": ["X", "YY", "ZZZ", ""]}


def test_missing_columns_are_found_without_a_call() -> None:
    def wants(completions: list[str], anwser: list[str], limit: int = 3) -> list[float]:
        return []

    lines = missing_arguments(Reward(function=wants, weight=1.0, timeout_s=60.0), ["prompt", "answer"])
    assert lines == ["reward wants: no column 'anwser' in the dataset (prompt, answer); did you mean 'answer'?"]
    assert missing_arguments(Reward(function=length, weight=1.0, timeout_s=60.0, args={"x": 1}), ["prompt"]) == []
    assert missing_arguments(Reward(function=wants, weight=1.0, timeout_s=60.0, args={"anwser": "1", "z": 2}), []) == [
        "reward wants: it takes no argument 'z', which rewards.args gives"
    ]


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="the function name 'length' stands twice"):
        Rubric(
            [Reward(function=length, weight=1.0, timeout_s=60.0), Reward(function=length, weight=1.0, timeout_s=60.0)]
        )
