"""Causes of RL stages: each is found beyond its threshold, not before it, and none in a run that learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from posttrain.data.tokenizer import load_tokenizer
from posttrain.diagnosis.causes import Cause, find_causes
from posttrain.diagnosis.diagnose import diagnose
from tests.diagnosis.evidences import STEPS, STILL, answers, evidence, groups, names, section

pytestmark = pytest.mark.fast

DEAD = {"reward": 0.0, "pass_rate": 0.0, "frac_mixed": 0.0, "frac_all_bad": 1.0, "update_skipped": 1.0, "kl": 0.0}
RECORDED = (1, 2, 20, 39, 40)
DIFFERENT = ["1", "2", "3", "4"]


def test_a_run_that_learns_has_none() -> None:
    assert names(evidence({})) == []
    assert names(evidence({}, records=groups(DIFFERENT, [0, 1, 0, 1], steps=RECORDED), answers=answers(1, 0))) == []
    # Nor has one that has solved its task, of which most groups are equal in the end.
    solved = {"frac_mixed": np.linspace(0.6, 0.02, STEPS), "reward": np.linspace(0.3, 0.99, STEPS)}
    assert names(evidence(solved)) == []


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_run_that_has_just_begun_has_none(steps: int) -> None:
    assert names(evidence(STILL, steps=steps)) == []


FELL = np.where(np.arange(STEPS) < 5, 0.6, 0.02)


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"reward": FELL, "kl": np.where(FELL > 0.1, 0.1, 7.0)}, True),
        ({"reward": np.where(FELL > 0.1, 0.6, 0.35), "kl": 7.0}, False),  # less than half of it is lost
        ({"reward": FELL, "kl": 0.1}, False),  # the policy is where it was
        ({"reward": FELL, "kl": np.nan, "entropy": np.where(FELL > 0.1, 0.6, 3.0)}, True),
        ({"reward": FELL, "kl": np.nan, "entropy": 0.6}, False),
        ({"reward": np.linspace(0.3, 0.8, STEPS), "kl": 7.0}, False),
    ],
)
def test_a_rate_too_large(columns: dict[str, Any], found: bool) -> None:
    (cause,) = diagnose(evidence(columns))[:1] or [None]
    assert (cause is not None and cause.name == "rate_too_large") == found
    if found and cause is not None:
        assert "from step 6 on" in cause.summary and "learning_rate" in cause.advice
        assert names(evidence({**columns, "frac_mixed": np.where(FELL > 0.1, 0.6, 0.0)})) == ["rate_too_large"]


def test_a_rate_too_large_is_told_at_the_third_step() -> None:
    columns = {"reward": np.where(np.arange(STEPS) < 1, 0.6, 0.0), "kl": np.where(np.arange(STEPS) < 1, 0.0, 7.0)}
    assert names(evidence(columns, steps=3)) == ["rate_too_large"]


def test_the_entropy_bonus() -> None:
    grown = {**STILL, "entropy": np.linspace(0.6, 3.0, STEPS)}
    with_bonus = {"algorithm": {"kind": "grpo", "entropy_coef": 0.5}}
    assert names(evidence(grown, settings=with_bonus)) == ["entropy_outweighs"]
    assert names(evidence(grown)) == []  # without a bonus the entropy may grow
    assert names(evidence({**STILL, "entropy": np.linspace(0.6, 0.8, STEPS)}, settings=with_bonus)) == []
    assert names(evidence({"entropy": np.linspace(0.6, 3.0, STEPS)}, settings=with_bonus)) == []  # and it learns


def cut_records(text: str) -> list[Any]:
    return [replace(one, stop="length") for one in groups([text] * 4, [0.0, 1.0, 0.0, 1.0], steps=RECORDED)]


def test_answers_that_are_cut() -> None:
    cut = {**STILL, "completions/clipped_ratio": 0.6}
    records = cut_records("???")
    assert names(evidence(cut, records=records)) == ["answers_cut"]
    assert names(evidence({**STILL, "completions/clipped_ratio": 0.4}, records=records)) == []
    # Answers that were cut at first only, or at last only, for which the reward may be the reason.
    assert names(evidence({**STILL, "completions/clipped_ratio": np.linspace(0.9, 0.0, STEPS)})) == []
    assert "answers_cut" not in names(evidence({**STILL, "completions/clipped_ratio": np.linspace(0.0, 0.9, STEPS)}))


def test_answers_that_never_stop() -> None:
    cut = {**STILL, "completions/clipped_ratio": 0.9}
    begins = [replace(one, tokens=tuple(f"{one.row}|9+9=".encode())) for one in cut_records("?")]
    given = evidence(cut, records=begins, answers=answers(1, 0), read_tokenizer=lambda: load_tokenizer("bytes"))
    assert names(given) == ["never_stops"]
    assert "100% of the cut answers begin with the right one" in diagnose(given)[0].evidence[0]


@pytest.mark.parametrize(
    ("texts", "right", "wrong", "name"),
    [
        (DIFFERENT, 0.0, 0.0, "format_never_asked"),
        (DIFFERENT, 1.0, 0.0, "too_hard"),
        (["1"] * 4, 1.0, 0.0, "sampling_too_cold"),
    ],
)
def test_why_there_is_no_signal(texts: list[str], right: float, wrong: float, name: str) -> None:
    given = evidence(DEAD, records=groups(texts, [0.0] * 4, steps=RECORDED), answers=answers(right, wrong))
    assert names(given) == [name]
    assert "nothing was learned at all in 40 of 40 steps" in diagnose(given)[0].summary
    half = {**DEAD, "frac_mixed": np.where(np.arange(STEPS) % 2, 0.5, 0.0), "reward": 0.1, "kl": 0.1}
    assert name not in names(evidence({**half, "pass_rate": 0.5, "update_skipped": 0.0}, answers=answers(right, wrong)))


def test_rewards_that_are_all_equal() -> None:
    good = {**DEAD, "reward": 1.0, "pass_rate": 1.0, "frac_all_bad": 0.0}
    records = groups(DIFFERENT, [1.0] * 4, steps=RECORDED)
    assert names(evidence(good, records=records, answers=answers(1, 0))) == ["too_easy"]
    assert names(evidence(good, records=records, answers=answers(1, 1))) == ["reward_constant"]


def test_a_penalty_that_holds_the_policy() -> None:
    """Its pull is kl_coef sqrt(2 KL) over the share of groups with a signal: 0.5 at a KL of 0.00045 and 10."""
    settings = {"algorithm": {"kind": "grpo", "kl_coef": 10.0}}
    assert names(evidence({**STILL, "kl": 0.0006}, settings=settings)) == ["kl_outweighs"]
    assert names(evidence({**STILL, "kl": 0.0001}, settings=settings)) == ["rate_too_small"]
    assert names(evidence({"kl": 0.0006}, settings=settings)) == []
    assert names(evidence({**STILL, "kl": 0.0006}, settings={"algorithm": "grpo"})) == ["rate_too_small"]


def test_a_rate_too_small() -> None:
    assert names(evidence({**STILL, "kl": 0.004})) == ["rate_too_small"]
    assert names(evidence({**STILL, "kl": 0.006})) == []
    assert names(evidence({**STILL, "kl": 0.004}, steps=9)) == []
    # Where no KL is measured the held-out answers tell.
    for changed, found in ((1, ["rate_too_small"]), (10, [])):
        before = [{"completion": str(n)} for n in range(100)]
        after = [{"completion": f"{n}!" if n < changed else str(n)} for n in range(100)]
        result = {"before": {"samples": before}, "after": {"samples": after}}
        assert names(evidence({**STILL, "kl": np.nan}, result=result)) == found


def test_a_sampler_that_differs() -> None:
    assert names(evidence({"sampling/logp_difference/mean": 2e-3})) == ["sampler_differs"]
    assert names(evidence({"sampling/logp_difference/mean": 0.9e-3})) == []


def test_stale_samples() -> None:
    assert names(evidence({**STILL, "sampling/staleness/mean": 3.1})) == ["stale"]
    assert names(evidence({**STILL, "sampling/staleness/mean": 2.9})) == []
    assert names(evidence({"sampling/staleness/mean": 5.0})) == []


def noisy_records(refused: int) -> list[Any]:
    """Last steps, in which the model is sure of every row; of 10 rows some are refused."""
    records = groups(["7"] * 4, [1.0] * 4, steps=(30, 34, 38, 40), rows=10)
    return [replace(one, reward=0.0) if one.row < refused else one for one in records]


def test_noisy_data() -> None:
    columns = {"frac_all_bad": 0.3, "frac_mixed": np.linspace(0.5, 0.3, STEPS)}
    assert names(evidence(columns, records=noisy_records(3))) == ["noisy_data"]
    assert names(evidence(columns, records=noisy_records(1))) == []
    assert names(evidence({**columns, "frac_all_bad": np.linspace(0.6, 0.2, STEPS)}, records=noisy_records(3))) == []
    cold = evidence(columns, records=noisy_records(3), settings={"sampling": {"max_tokens": 6, "temperature": 0.3}})
    assert "noisy_data" not in names(cold)
    (cause,) = diagnose(evidence(columns, records=noisy_records(3)))
    assert "rows of the dataset: 0, 1, 2" in cause.evidence[-1] and not cause.sure


def test_little_signal() -> None:
    assert names(evidence({**STILL, "frac_mixed": 0.1})) == ["little_signal"]
    assert names(evidence({**STILL, "frac_mixed": 0.2})) == []


def difference(mean: float, half: float) -> dict[str, Any]:
    p_value = 0.5 if abs(mean) < half else 0.01
    found = {"mean": mean, "low": mean - half, "high": mean + half, "n": 30, "p_value": p_value}
    return {"difference": {"eval/reward": found}}


def test_the_held_out_reward() -> None:
    """Training gains 0.5: held-out prompts that may show as much are too few, those that cannot are not learned."""
    seen_often = answers(1, 0, count=4)
    assert names(evidence({}, result=difference(0.1, 0.3), answers=seen_often)) == ["evaluation_too_small"]
    assert names(evidence({}, result=difference(0.4, 0.3), answers=seen_often)) == []
    assert names(evidence({}, result=difference(0.0, 0.05), answers=seen_often)) == ["overfitting"]
    once = replace(seen_often, num_rows=10_000)
    assert names(evidence({}, result=difference(0.0, 0.05), answers=once)) == []


def test_causes_that_another_one_explains() -> None:
    def first(_: Any) -> Cause:
        return Cause(name="a", summary="", evidence=(), advice="", explains=("b",))

    def second(_: Any) -> Cause:
        return Cause(name="b", summary="", evidence=(), advice="")

    assert [cause.name for cause in find_causes(evidence({}), (second, first, first))] == ["a"]
    assert section().kind == "rl"
