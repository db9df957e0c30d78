"""avg@k, pass@k and maj@k are the means over all choices of k samples, and their intervals cover."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from posttrain.config import EvaluateSection
from posttrain.evaluation.at_k import intervals_at_k, majority_at_k, pass_at_k, values_at_k
from posttrain.statistics import Interval, mean_interval, paired_difference, share_interval

pytestmark = pytest.mark.fast

SIMULATIONS = 2000


def winner_passes(answers: Sequence[Any], passed: Sequence[float]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    first = [answer for answer, count in votes.items() if count == max(votes.values())]
    return float(np.mean([passed[answers.index(answer)] for answer in first])) if first else 0.0


@pytest.mark.parametrize("seed", range(6))
def test_equal_to_the_mean_over_all_choices(seed: int) -> None:
    draw = np.random.default_rng(seed)
    answers = [["a", "b", "c", "d", None][i] for i in draw.integers(0, 5, 8)]
    right = {"a": True, "b": seed % 2 == 0, "c": False, "d": False, None: False}
    passed = [right[answer] for answer in answers]
    for k in range(1, 9):
        choices = [list(chosen) for chosen in itertools.combinations(range(8), k)]
        some = np.mean([any(passed[i] for i in chosen) for chosen in choices])
        assert_allclose(pass_at_k(np.asarray([8]), np.asarray([sum(passed)]), k), some, atol=1e-12)
        most = np.mean([winner_passes([answers[i] for i in c], [passed[i] for i in c]) for c in choices])
        assert_allclose(majority_at_k(answers, passed, k), most, atol=1e-12)
    assert_allclose(majority_at_k(answers, passed, 1), np.mean(passed), atol=1e-12)


def test_an_answer_of_which_some_samples_pass_counts_with_their_share() -> None:
    assert majority_at_k(["x", "x", "x", "y"], [True, False, False, True], 4) == pytest.approx(1 / 3)
    assert majority_at_k([None, None], [True, True], 2) == 0.0


def test_many_samples_take_no_time() -> None:
    draw = np.random.default_rng(0)
    answers = draw.integers(0, 20, 256).tolist()
    found = [majority_at_k(answers, [answer == 3 for answer in answers], k) for k in (1, 16, 64, 256)]
    assert_allclose(found[0], np.mean(np.asarray(answers) == 3), rtol=1e-9)
    assert all(0 <= value <= 1 for value in found)


def test_samples_without_a_reward_are_left_out() -> None:
    """Of the first prompt one sample is left, too few for pass@2; the second has none."""
    section = EvaluateSection(samples=3, report=("avg", "pass", "majority"), k=(1, 2))
    rewards = np.asarray([[np.nan, 1.0, np.nan], [np.nan] * 3, [0.0, 1.0, 1.0]], np.float32)
    values = values_at_k(rewards, [["a", "b", "c"], ["a"] * 3, ["x", "y", "y"]], section, 0.5)
    assert_allclose(values["avg@3"], [1.0, np.nan, 2 / 3], rtol=1e-6)
    assert_allclose(values["pass@1"], [1.0, np.nan, 2 / 3])
    assert_allclose(values["pass@2"], [np.nan, np.nan, 1.0])
    assert_allclose(values["maj@2"], [np.nan, np.nan, 2 / 3])
    found = intervals_at_k(values, rewards, np.arange(3))
    assert {name: one.n for name, one in found.items()} == {
        "avg@3": 2,
        "pass@1": 2,
        "pass@2": 1,
        "maj@1": 2,
        "maj@2": 1,
    }
    assert EvaluateSection(samples=6).ks == (1, 2, 4, 6) and EvaluateSection(samples=8).ks == (1, 2, 4, 8)


def test_pass_above_decides_what_passes() -> None:
    rewards = np.asarray([[0.2, 0.8]], np.float32)
    above = [values_at_k(rewards, None, EvaluateSection(samples=2), bar)["pass@1"] for bar in (0.1, 0.5, 0.8)]
    assert_allclose(above, [[1.0], [0.5], [0.0]])


def coverage(found: Sequence[Interval], truth: float) -> float:
    return sum(one.low <= truth <= one.high for one in found) / len(found)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["avg@8", "pass@1", "pass@4", "pass@8", "maj@8"])
def test_intervals_cover_as_often_as_they_say(name: str) -> None:
    """Prompts differ in difficulty, so that samples of one prompt are alike; of two answers, right and wrong."""
    draw = np.random.default_rng(3)
    rates = draw.beta(0.8, 1.2, (SIMULATIONS, 60, 1))
    right = (draw.random((SIMULATIONS, 60, 8)) < rates).astype(np.float32)
    known = draw.beta(0.8, 1.2, 200_000)
    counts = np.arange(9)
    chances = (
        np.asarray([math.comb(8, c) for c in counts]) * known[:, None] ** counts * (1 - known[:, None]) ** (8 - counts)
    )
    metric, k = name.split("@")
    by_count = {
        "avg": counts / 8,
        "pass": pass_at_k(np.full(9, 8), counts, int(k)),
        "maj": np.where(counts == 4, 0.5, counts > 4),
    }[metric]
    truth = float((chances * by_count).sum(axis=1).mean())
    section = EvaluateSection(
        samples=8, k=(int(k),), report=({"avg": "avg", "pass": "pass", "maj": "majority"}[metric],)
    )
    found = []
    for rewards in right:
        values = {name: by_count[rewards.sum(axis=1).astype(int)]}
        found.append(intervals_at_k(values, rewards, np.arange(len(rewards)))[name])
    answers = [["r" if reward else "w" for reward in rewards] for rewards in right[0]]
    assert_allclose(
        values_at_k(right[0], answers, section, 0.5)[name], by_count[right[0].sum(axis=1).astype(int)], atol=1e-12
    )
    assert 0.93 <= coverage(found, truth) <= 0.97
    if metric == "avg":  # samples as if they were independent
        assert coverage([mean_interval(rewards.ravel()) for rewards in right], truth) < 0.8


def test_shares_are_shares() -> None:
    assert str(share_interval([0.0, 0.0, 0.0], 8)).startswith("0.000 [0.000, ")
    assert share_interval([0.5, 0.5, 0.5], 2).low > 0.1
    with pytest.raises(ValueError, match="shares must lie between 0 and 1, got -1 to 0.5"):
        share_interval([-1.0, 0.5], 2)


def test_53_against_49_of_100_is_no_evidence() -> None:
    """Also where no prompt was lost and four were won."""
    before = np.arange(100) < 49
    for won in (4, 20):
        after = before.copy()
        after[49 : 49 + won] = True
        after[: won - 4] = False
        assert (before.sum(), after.sum()) == (49, 53)
        assert not paired_difference(before.astype(float), after.astype(float)).significant
