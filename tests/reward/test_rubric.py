"""The reward contract: keywords by name, None is not applicable, failures are counted and never 0."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError, RunError
from posttrain.reward.function import Reward, missing_arguments
from posttrain.reward.keywords import accepted
from posttrain.reward.rubric import Rubric, error_lines
from posttrain.reward.types import Rewards
from posttrain.rl.by_hand import make_examples
from posttrain.rl.metrics import NoRewardGuard
from posttrain.runtime.event_loop import run_async
from tests.rl.helpers import groups, trajectory

pytestmark = pytest.mark.fast

TEXTS = (("x", "yy"), ("zzz", ""))


def score(*functions: Callable[..., Any], texts: Any = TEXTS, **kwargs: Any) -> Rewards:
    rows = [{"prompt": f"p{i}", "answer": f"a{i}"} for i in range(len(texts))]
    fields: dict[str, Any] = {"weight": 1.0, "timeout_s": 60.0, **kwargs}
    rewards = [Reward(function=f, **fields) for f in functions]
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


def test_a_column_of_some_rows_is_none_in_the_others() -> None:
    """Whatever groups a call gets: columns are those of the dataset."""
    tokenizer = load_tokenizer("bytes")
    given: list[dict[str, Any]] = [{"prompt": "p", "hint": "x"}, {"prompt": "q", "info": {"n": 1}}]
    rows = [example.row for example in make_examples(given, tokenizer)]
    assert rows == [{"prompt": "p", "hint": "x", "info": None}, {"prompt": "q", "hint": None, "info": {"n": 1}}]

    def hinted(completions: list[str], hint: Any = "default", **_: Any) -> list[float]:
        return [0.0 if one is None else float(one == "x") for one in hint]

    def informed(completion: str, info: dict[str, int]) -> float:
        return float(info.get("n", 0))

    rubric = Rubric([Reward(function=one, weight=1.0, timeout_s=60.0) for one in (hinted, informed)])
    for chosen in ([0], [1], [0, 1], [1, 0]):
        found = run_async(rubric.score(groups([["x"]] * len(chosen), [rows[n] for n in chosen])))
        assert not found.errors
        assert_array_equal(found.parts_PG["hinted"][:, 0], [float(n == 0) for n in chosen])
        assert_array_equal(found.parts_PG["informed"][:, 0], [float(n == 1) for n in chosen])


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
    def hangs(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        time.sleep(1.2 if "zzz" in completions else 0)
        log_metric("late", 1.0)
        log_extra("late", ["x"])
        return [1.0] * len(completions)

    async def stalls(completions: list[str]) -> list[float]:
        await asyncio.sleep(30 if "x" in completions else 0)
        return [1.0] * len(completions)

    start = time.monotonic()
    rewards = score(hangs, stalls, timeout_s=0.8)
    assert time.monotonic() - start < 1.55, "one time-out, not two"
    assert_array_equal(rewards.total_PG, [[math.nan, 2.0], [math.nan, 2.0]])
    found = {(e.function, e.prompt, e.sample, e.kind, e.error) for e in rewards.errors}
    assert found == {
        ("hangs", 1, 0, "timeout", "no answer within 0.8 s"),
        ("stalls", 0, 0, "timeout", "no answer within 0.8 s"),
    }
    time.sleep(0.6)
    assert rewards.metrics == {} and rewards.extras == {}, "written after the time-out"


def test_calls_that_never_return_cost_only_themselves() -> None:
    """Later calls are made however many hang, and a coroutine is cancelled with its thread."""
    release = threading.Event()

    def hangs(completions: list[str]) -> list[float]:
        release.wait(30)
        return [1.0] * len(completions)

    async def sleeps(completions: list[str]) -> list[float]:
        await asyncio.sleep(30)
        return []

    rubric = Rubric([Reward(function=f, weight=1.0, timeout_s=0.7) for f in (hangs, sleeps)])
    before = threading.active_count()
    for _ in range(2):
        rewards = run_async(rubric.score(groups(TEXTS)))
    assert np.isnan(rewards.total_PG).all()
    assert {error.kind for error in rewards.errors} == {"timeout"}
    release.set()
    deadline = time.monotonic() + 10.0  # a cancelled coroutine's thread ends when it next runs
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before
    assert not np.isnan(run_async(rubric.score(groups(TEXTS))).parts_PG["hangs"]).any()


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
    watch = NoRewardGuard(2)
    for step in range(3):
        watch.check(step, score())  # of a run that has no functions
    for step, rewards in enumerate((nothing, something, nothing, something), start=1):
        watch.check(step, rewards)
    watch.check(5, nothing)
    with pytest.raises(
        RunError, match="step 6: no sample has a reward for 2 consecutive steps.*the functions return None"
    ):
        watch.check(6, nothing)


def test_failing_on_every_sample_ends_a_run_only_where_it_goes_on() -> None:
    def broken(completions: list[str]) -> list[float]:
        raise KeyError("answer")

    for on_error in ("drop", 0.0):
        rewards = score(broken, on_error=on_error)
        assert len(rewards.errors) == 4
        watch = NoRewardGuard(2)
        watch.check(1, rewards)
        with pytest.raises(RunError, match=r"step 2: no sample has a reward.*\(reward broken: KeyError: 'answer' "):
            watch.check(2, rewards)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("3", "a value must be a finite number or None, got '3'"),
        (math.nan, "a value must be a finite number or None, got nan"),
        (-math.inf, "a value must be a finite number or None, got -inf"),
        (np.zeros(2), r"a value must be a finite number or None, got array\(\[0., 0.\]\)"),
        (ValueError("of a judge"), "ValueError: of a judge"),
    ],
)
def test_a_wrong_value_is_an_error_of_its_sample(value: Any, message: str) -> None:
    calls = []

    def odd(completions: list[str]) -> list[Any]:
        calls.append(completions)
        return [value if text == "zzz" else np.float32(1) for text in completions]

    (error,) = (rewards := score(odd)).errors
    assert (error.prompt, error.sample, error.kind) == (1, 0, "error") and re.fullmatch(message, error.error)
    assert_array_equal(rewards.total_PG, [[1.0, 1.0], [math.nan, 1.0]])
    assert len(calls) == 1, "the other values of the call are right"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (0.5, "must return a list of 1 numbers or None, got float"),
        ([1.0, 2.0], "must return one value per completion, got 2 for 1"),
        ({"reward": 1.0}, "must return a list of 1 numbers or None, got dict"),
    ],
)
def test_a_result_of_the_wrong_form_is_an_error_of_the_samples_alone(result: Any, message: str) -> None:
    def broken(completions: list[str]) -> Any:
        return result if "x" in completions else [1.0] * len(completions)

    (error,) = (rewards := score(broken)).errors
    assert error.error == message
    assert_array_equal(rewards.total_PG, [[math.nan, 1.0], [1.0, 1.0]])


def test_samples_scored_alone_without_need_are_told() -> None:
    def logs(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("half", completions[:1])
        return [0.0] * len(completions)

    def slow(completions: list[str]) -> list[float]:
        time.sleep(0.9)
        return [float(len(text)) for text in completions]

    rewards = score(logs, slow, timeout_s=1.7)
    assert rewards.extras == {} and not rewards.errors
    assert_array_equal(rewards.total_PG, [[1.0, 2.0], [3.0, 0.0]])
    of_logs, of_slow = error_lines(rewards, groups(TEXTS))
    assert of_logs == (
        "reward logs: the call on all 4 samples failed, each alone did not: "
        "log_extra('half') must be given one value per completion, got 1 for 4"
    )
    assert of_slow.startswith("reward slow: took 0.") and of_slow.endswith("raise timeout_s")


def test_metrics_and_extra_columns() -> None:
    def logs(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("share", 0.25)
        log_extra("upper", [text.upper() for text in completions])
        return [0.0] * len(completions)

    rewards = score(logs)
    assert {name: mean.value() for name, mean in rewards.metrics.items()} == {"rewards/logs/share": 0.25}
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


def test_one_function_twice_needs_a_name() -> None:
    once = Reward(function=length, weight=1.0, timeout_s=60.0)
    with pytest.raises(ConfigError, match="the name 'length' is used twice.*set `name` of one of them"):
        Rubric([once, once])
    rewards = run_async(Rubric([once, dataclasses.replace(once, name="again", weight=2.0)]).score(groups(TEXTS)))
    assert_array_equal(rewards.total_PG, [[3.0, 6.0], [9.0, 0.0]])
    assert list(rewards.parts_PG) == ["length", "again"]


class Judge:
    async def __call__(self, completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]


def test_an_object_with_an_async_call_is_awaited() -> None:
    assert_array_equal(score(Judge()).parts_PG["Judge"], [[1.0, 2.0], [3.0, 0.0]])


def test_only_arguments_that_are_read_are_made() -> None:
    def named(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    def reads(completions: list[str], **rest: Any) -> list[float]:
        return [float(len(rest))] * len(completions)

    def inner(completions: list[str], **rest: Any) -> list[float]:
        return [float(len(rest)) for _ in completions]

    assert accepted(named) == {"completions", "_"}
    assert accepted(reads) is None and accepted(inner) is None and accepted(functools.wraps(reads)(named)) is None
    assert score(reads).total_PG.tolist() == [[9.0, 9.0], [9.0, 9.0]], "two columns, five provided and two loggers"


def test_a_reward_model_is_called_once_without_a_time_out_and_one_at_a_time() -> None:
    running: list[str] = []

    def model(name: str) -> Any:
        def scores(trajectories: Any) -> list[Any]:
            running.append(name)
            assert len(set(running)) == 1
            time.sleep(0.05)
            running.remove(name)
            return [ValueError("too long") if t.text == "zzz" else 1.0 for t in trajectories]

        return Reward(function=scores, weight=1.0, timeout_s=None, name=name)

    def fails(trajectories: Any) -> list[float]:
        raise MemoryError("of the device")

    rewards = run_async(Rubric([model("one"), model("two")]).score(groups(TEXTS)))
    assert_array_equal(rewards.total_PG, [[2.0, 2.0], [math.nan, 2.0]])
    assert {error.error for error in rewards.errors} == {"ValueError: too long"}
    with pytest.raises(MemoryError, match="of the device"):
        run_async(Rubric([Reward(function=fails, weight=1.0, timeout_s=None)]).score(groups(TEXTS)))
