"""Functions in the style of other frameworks run unchanged: lists of TRL and Tunix, single samples of verl and
verifiers."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from numpy.testing import assert_array_equal

from posttrain.reward.call import Convention, annotates_text, convention_of
from posttrain.reward.function import Reward, missing_arguments
from posttrain.reward.rubric import Rubric
from posttrain.reward.types import Rewards
from posttrain.runtime.event_loop import run_async
from tests.rl.helpers import trajectory

pytestmark = pytest.mark.fast

ROW = {"prompt": "1+1=", "answer": "2", "data_source": "sums", "reward_model": {"ground_truth": "2", "style": "rule"}}


def score(function: Any, *texts: str, plain: bool = True, row: dict[str, Any] | None = None, **changes: Any) -> Rewards:
    group = [
        trajectory(text, prompt="1+1=", row=row or ROW, sample=number, plain=plain) for number, text in enumerate(texts)
    ]
    reward = Reward(function=function, weight=1.0, timeout_s=60.0, **changes)
    assert missing_arguments(reward, list(row or ROW)) == []
    return run_async(Rubric([reward]).score([group], step=7))


def test_trl() -> None:
    """Message lists for chat rows, the trainer's step, columns and loggers."""

    def accuracy_reward(completions, answer, trainer_state, log_metric=None, **kwargs):  # type: ignore[no-untyped-def]
        contents = [completion[0]["content"] for completion in completions]
        log_metric("step", trainer_state.global_step)
        return [1.0 if content == a else None for content, a in zip(contents, answer, strict=True)]

    found = score(accuracy_reward, "2", "3", plain=False)
    assert_array_equal(found.total_PG, [[1.0, math.nan]])
    assert found.metrics["rewards/accuracy_reward/step"].value() == 7


def test_tunix_gets_strings_if_told() -> None:
    """Tunix renders chat prompts before its functions see them; the signature is that of TRL."""
    pattern = re.compile(r"^\d$")

    def match_format(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
        assert prompts == ["1+1="] * len(prompts)
        return [3.0 if pattern.search(text) else 0.0 for text in completions]

    assert score(match_format, "2", "two", plain=False, text=True).total_PG.tolist() == [[3.0, 0.0]]
    assert len(score(match_format, "2", plain=False).errors) == 1


def test_messages_of_text_prompts_if_told() -> None:
    """Functions that read calls of tools, over a column of plain prompts; `text: false` wins over an annotation."""

    def last(prompts, completions: list[str], **kwargs):  # type: ignore[no-untyped-def]
        assert [prompt[-1]["content"] for prompt in prompts] == ["1+1="] * len(prompts)
        return [float(messages[-1]["content"] == "2") for messages in completions]

    assert score(last, "2", "3", text=False).total_PG.tolist() == [[1.0, 0.0]]
    assert len(score(last, "2").errors) == 1


def test_annotated_functions_get_strings() -> None:
    def annotated(completions: Sequence[str]) -> list[float]:
        return [float(text == "2") for text in completions]

    assert score(annotated, "2", "3", plain=False).total_PG.tolist() == [[1.0, 0.0]]
    assert annotates_text(annotated) and not annotates_text(lambda completions: [])


def test_verl_score_and_its_metrics() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
        if solution_str == "bad":
            raise NotImplementedError(data_source)
        right = solution_str == ground_truth
        return {"score": 1.0 if right else -0.5, "acc": right, "pred": solution_str}

    found = score(compute_score, "2", "3", "bad", plain=False)
    assert_array_equal(found.total_PG, [[1.0, -0.5, math.nan]])
    (error,) = found.errors
    assert error.sample == 2 and error.error.startswith("NotImplementedError: sums")
    assert found.metrics["rewards/compute_score/acc"].value() == 0.5
    assert found.extras == {"pred": ["2", "3", None]}


def test_verl_numbers_columns_and_arguments() -> None:
    def compute_score(solution_str, ground_truth, extra_info, method="strict", format_score=0.0):  # type: ignore[no-untyped-def]
        assert method == "flexible" and extra_info == {"index": 4}
        return 1.0 if solution_str == ground_truth else format_score

    row = {"prompt": "p", "ground_truth": "2", "extra_info": {"index": 4}}
    found = score(compute_score, "2", "3", row=row, args={"method": "flexible", "format_score": 0.25})
    assert found.total_PG.tolist() == [[1.0, 0.25]]
    lines = missing_arguments(Reward(function=compute_score, weight=1.0, timeout_s=1.0), ["prompt", "truth"])
    assert len(lines) == 1 and "no column 'ground_truth'" in lines[0]
    wrong = score(lambda solution_str: {"acc": 1.0}, "2")
    assert "needs the entry 'score'; it has acc" in wrong.errors[0].error


def test_verifiers_sync_and_async() -> None:
    seen: list[Any] = []

    def exact(completion, answer, state, **kwargs):  # type: ignore[no-untyped-def]
        seen.append((state["info"], kwargs["task"], kwargs["prompt"]))
        return 1.0 if completion[-1]["content"] == answer else 0.0

    assert score(exact, "2", "3", plain=False).total_PG.tolist() == [[1.0, 0.0]]
    assert seen[0] == ({}, "default", [{"role": "user", "content": "1+1="}])

    running: list[int] = []

    async def judged(prompt, completion, answer, info):  # type: ignore[no-untyped-def]
        running.append(1)
        await asyncio.sleep(0.01)
        assert len(running) == 3, "all at once"
        if completion == "bad":
            raise ConnectionError("gone")
        return float(completion == answer)

    found = score(judged, "2", "bad", "3")
    assert_array_equal(found.total_PG, [[1.0, math.nan, 0.0]])
    assert found.errors[0].error.startswith("ConnectionError: gone")


@pytest.mark.parametrize(
    ("function", "convention"),
    [
        (lambda prompts, completions, **kwargs: [], Convention.LISTS),
        (lambda trajectories: [], Convention.LISTS),
        (lambda completions, state: [], Convention.LISTS),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0.0, Convention.VERL),
        (lambda completion, answer: 0.0, Convention.VERIFIERS),
        (lambda state: 0.0, Convention.VERIFIERS),
    ],
)
def test_the_signature_tells(function: Any, convention: Convention) -> None:
    assert convention_of(function) is convention
