"""Intervals cover as often as they say, and the tests agree with scipy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from posttrain.statistics import (
    Interval,
    count_rows,
    difference_of_ratios,
    mean_interval,
    paired_difference,
    paired_ratio_difference,
    prompt_numbers,
    ratio_interval,
    share_interval,
    standard_error,
)

pytestmark = pytest.mark.fast

SIMULATIONS = 2000


def coverage(intervals: list[Interval], truth: float) -> float:
    return sum(i.low <= truth <= i.high for i in intervals) / len(intervals)


@pytest.mark.parametrize(("rate", "prompts"), [(0.5, 64), (0.8, 100), (0.05, 200)])
def test_coverage_of_outcomes(rate, prompts):
    draws = np.random.default_rng(0).random((SIMULATIONS, prompts)) < rate
    assert 0.93 <= coverage([mean_interval(x) for x in draws], rate) <= 0.97


def test_coverage_of_real_rewards():
    draws = np.random.default_rng(1).normal(2.0, 3.0, (SIMULATIONS, 8))
    assert 0.93 <= coverage([mean_interval(x) for x in draws], 2.0) <= 0.97


@pytest.mark.few(1)
@pytest.mark.parametrize("binary", [True, False])
def test_coverage_with_samples_that_share_a_prompt(binary):
    rng = np.random.default_rng(2)
    rates = rng.beta(0.8, 0.8, (SIMULATIONS, 40, 1))
    noise = rng.random((SIMULATIONS, 40, 8))
    draws = (noise < rates).astype(float) if binary else rates + 0.1 * (noise - 0.5)
    prompts = np.repeat(np.arange(40), 8)
    clustered = [mean_interval(x.ravel(), prompts) for x in draws]
    assert 0.93 <= coverage(clustered, 0.5) <= 0.97
    assert clustered[0].n == 40
    # Taking the samples for independent ones would be wrong: this is what the clusters are for.
    assert coverage([mean_interval(x.ravel()) for x in draws], 0.5) < 0.75


def test_wilson_is_scipys():
    for k, n in ((0, 10), (3, 10), (53, 100), (10, 10)):
        ours = mean_interval([1.0] * k + [0.0] * (n - k))
        theirs = stats.binomtest(k, n).proportion_ci(method="wilson")
        np.testing.assert_allclose((ours.low, ours.high), (theirs.low, theirs.high), rtol=1e-12, atol=1e-15)
        assert (ours.mean, ours.n) == (k / n, n)


def test_t_interval_is_scipys_and_clusters_are_averaged_first():
    values = [0.1, 0.7, 0.4, 1.3, 0.2, 0.2]
    ours, clustered = mean_interval(values[:3]), mean_interval(values, [7, 7, 3, 3, 5, 5])
    theirs = stats.t.interval(0.95, 2, np.mean(values[:3]), stats.sem(values[:3]))
    np.testing.assert_allclose((ours.low, ours.high), theirs)
    by_hand = mean_interval([0.85, 0.4, 0.2])
    np.testing.assert_allclose(
        (clustered.mean, clustered.low, clustered.high), (by_hand.mean, by_hand.low, by_hand.high)
    )
    assert str(clustered) == "0.483 [-0.344, 1.310] n=3"


def test_few_outcomes_say_little():
    sure = mean_interval([1.0, 1.0])
    assert sure.high == 1.0
    assert sure.low < 0.4
    assert mean_interval([1.0] * 8, [0] * 8).low < 0.3
    assert mean_interval([1.0] * 16, np.repeat([0, 1], 8)) == sure
    # Prompts that are all solved equally often show no clustering: every sample counts.
    assert mean_interval([1.0, 0.0, 0.0] * 9, np.repeat(np.arange(9), 3)).low == mean_interval([1.0, 0.0, 0.0] * 9).low
    assert (mean_interval([0.3]).low, mean_interval([0.3]).high) == (-math.inf, math.inf)


def test_values_must_be_finite_and_match_their_clusters():
    for values in ([], [1.0, math.nan], [[1.0]]):
        with pytest.raises(ValueError, match="values must be a flat"):
            mean_interval(values)
    with pytest.raises(ValueError, match="one prompt number for each value"):
        mean_interval([1.0, 2.0], [0])


def test_53_against_49_of_100_is_no_evidence():
    before, after = np.repeat([1.0, 0.0], [49, 51]), np.roll(np.repeat([1.0, 0.0], [53, 47]), 10)
    result = paired_difference(before, after)
    assert result.mean == pytest.approx(0.04)
    assert not result.significant
    assert result.low < 0 < result.high


def test_paired_tests_are_scipys():
    rng = np.random.default_rng(3)
    before, after = rng.normal(size=12), rng.normal(0.8, 1.0, 12)
    ours, theirs = paired_difference(before, after), stats.ttest_rel(after, before)
    np.testing.assert_allclose(ours.p_value, theirs.pvalue)
    np.testing.assert_allclose((ours.low, ours.high), theirs.confidence_interval(0.95))
    up = paired_difference([0.0] * 9 + [1.0], [1.0] * 9 + [0.0])
    assert up.p_value == pytest.approx(stats.binomtest(1, 10).pvalue)
    samples = paired_difference(np.array([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]]), np.array([[1.0], [0.5], [0.25]]))
    assert samples.mean == pytest.approx((0.5 + 0.5 - 0.25) / 3)


def test_paired_coverage_and_false_alarms():
    rng = np.random.default_rng(4)
    first, second = (rng.random((SIMULATIONS, 150)) < 0.4, rng.random((SIMULATIONS, 150)) < 0.6)
    assert 0.93 <= coverage([paired_difference(a, b) for a, b in zip(first, second, strict=True)], 0.2) <= 0.97
    noise = rng.normal(size=(2, SIMULATIONS, 20))
    alarms = np.mean([paired_difference(a, b).significant for a, b in zip(*noise, strict=True)])
    assert 0.03 <= alarms <= 0.07


def test_prompts_that_all_moved_alike():
    assert paired_difference([0.0] * 3, [1.0] * 3).p_value == 0.25
    assert paired_difference([0.5] * 8, [0.75] * 8).p_value == 0.5**7
    same = paired_difference([0.5] * 8, [0.5] * 8)
    assert (same.p_value, same.significant) == (1.0, False)


def test_pairs_must_match():
    with pytest.raises(ValueError, match="before has 2 prompts and after 3"):
        paired_difference([0.0, 1.0], [0.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="before has shape"):
        paired_difference(np.zeros((2, 2, 2)), [0.0, 1.0])


def repeated(draw: np.random.Generator, prompts: int, rows: int, rate: float, binary: bool) -> np.ndarray:
    """Outcomes [P, R] of rows that share their prompt's difficulty: an intraclass correlation of 0.4."""
    chances = draw.beta(rate * 1.5, (1 - rate) * 1.5, (prompts, 1))
    outcomes = draw.random((prompts, rows)) < chances
    return outcomes.astype(float) if binary else chances + draw.normal(0, 0.3, (prompts, rows))


@pytest.mark.parametrize("binary", [True, False])
def test_coverage_where_rows_repeat_their_prompts(binary: bool) -> None:
    """Means, shares, ratios and paired differences of 30 prompts x 8 rows, in any order of the rows; as rows they would
    cover far less. The estimate of the variance is that of cluster-robust regression on a constant."""
    draw = np.random.default_rng(3)
    prompts, rows, rate = 30, 8, 0.4
    keys = np.repeat(np.arange(prompts), rows)
    found: dict[str, list[Interval]] = {name: [] for name in ("mean", "ratio", "paired", "rows", "paired rows")}
    for _ in range(600):
        order = draw.permutation(prompts * rows)
        numbers = prompt_numbers([f"prompt {key}" for key in keys[order]])
        values = repeated(draw, prompts, rows, rate, binary).ravel()[order]
        later = repeated(draw, prompts, rows, rate, binary).ravel()[order]
        found["mean"].append(mean_interval(values, numbers))
        found["ratio"].append(ratio_interval(values, np.ones(len(values)), numbers))
        found["paired"].append(paired_difference(values, later, numbers))
        found["rows"].append(mean_interval(values))
        found["paired rows"].append(paired_difference(values, later))
    assert {i.n for name in ("mean", "ratio", "paired") for i in found[name]} == {prompts}
    for name, truth in (("mean", rate), ("ratio", rate), ("paired", 0.0)):
        assert 0.92 <= coverage(found[name], truth) <= 0.98, name
    assert coverage(found["rows"], rate) < 0.85 and coverage(found["paired rows"], 0.0) < 0.85

    # Sandwich estimator with the correction P / (P - 1): sum over prompts of (sum of residuals)^2.
    residuals = np.zeros(prompts)
    np.add.at(residuals, numbers, values - values.mean())
    error = np.sqrt(prompts / (prompts - 1) * np.square(residuals).sum()) / len(values)
    half = stats.t.ppf(0.975, prompts - 1) * error
    assert found["ratio"][-1].high - values.mean() == pytest.approx(half)
    alike = share_interval(values, 1, numbers) if binary else found["mean"][-1]
    assert (alike.low, alike.high) == pytest.approx((found["mean"][-1].low, found["mean"][-1].high))
    groups = [values[numbers == n] for n in range(prompts)]
    assert standard_error(values[:, None], numbers) == pytest.approx(standard_error(groups)) == pytest.approx(error)


def test_rows_of_a_single_prompt_are_their_own_units() -> None:
    assert prompt_numbers(["b", "a", "b"]).tolist() == [0, 1, 0]
    assert prompt_numbers(["a"] * 3).tolist() == [0, 1, 2]
    assert count_rows(["a"] * 3) == "3 rows, 1 prompt"
    with pytest.raises(ValueError, match="the rows have one prompt"):
        paired_difference([0.0, 1.0], [1.0, 0.0], [0, 0])


def test_standard_error_counts_prompts():
    rewards_PG = [[1.0, 0.0, math.nan], [1.0, 1.0, 1.0], [math.nan] * 3, [0.0, 0.0, 0.0]]
    assert standard_error(rewards_PG) == pytest.approx(np.std([0.5, 1.0, 0.0], ddof=1) / math.sqrt(3))
    repeated = np.repeat(np.random.default_rng(0).random((20, 1)), 8, axis=1)
    assert standard_error(repeated) == pytest.approx(standard_error(repeated[:, :1]))
    assert math.isnan(standard_error([[1.0, 0.0]]))


def sequences(seed: int, n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Totals and numbers of tokens; long sequences are harder, and the mean over tokens is 2 in the long run."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(5, 100, n)
    means = 2.0 + 0.01 * (lengths - RATIO_LENGTH) + draw.normal(0, 0.5, n)
    return means * lengths, lengths


LENGTHS = np.arange(5, 100)
RATIO_LENGTH = float((LENGTHS**2).sum() / LENGTHS.sum())


def test_coverage_of_a_ratio_of_sums():
    assert 0.92 <= coverage([ratio_interval(*sequences(seed)) for seed in range(SIMULATIONS)], 2.0) <= 0.97


def test_coverage_of_a_difference_of_two_means():
    """Of prompts with answers of either kind or both, which are then alike."""
    rng, found = np.random.default_rng(6), []
    for _ in range(SIMULATIONS):
        weights = rng.integers(0, 3, (2, 60)).astype(float)
        of_prompt = rng.normal(size=60)
        first, second = (
            w * (mean + of_prompt) + np.sqrt(w) * rng.normal(size=60)
            for w, mean in zip(weights, (0.7, 0.2), strict=True)
        )
        found.append(difference_of_ratios(first, weights[0], second, weights[1]))
    assert 0.93 <= coverage(found, 0.5) <= 0.97


def test_a_difference_of_two_means_is_the_paired_or_the_unpaired_one():
    rng = np.random.default_rng(7)
    first, second, ones = rng.normal(size=9), rng.normal(size=9), np.ones(9)
    paired, found = paired_difference(second, first), difference_of_ratios(first, ones, second, ones)
    np.testing.assert_allclose((found.mean, found.low, found.high), (paired.mean, paired.low, paired.high))
    assert found.n == 9
    none = np.zeros(9)
    apart = difference_of_ratios(np.r_[first, none], np.r_[ones, none], np.r_[none, second], np.r_[none, ones])
    assert apart.n == 18
    error = np.sqrt(18 / 17 * (first.var() + second.var()) / 9)
    np.testing.assert_allclose((apart.high - apart.low) / 2, stats.t.ppf(0.975, 17) * error)
    one = difference_of_ratios([1.0], [1.0], [0.5], [1.0])
    assert (one.mean, one.low, one.high) == (0.5, -math.inf, math.inf)
    with pytest.raises(ValueError, match="some positive weight"):
        difference_of_ratios(first, none, second, ones)


def test_a_ratio_of_equal_weights_is_a_mean():
    values = np.random.default_rng(0).normal(size=20)
    ratio, mean = ratio_interval(3 * values, np.full(20, 3.0)), mean_interval(values)
    np.testing.assert_allclose((ratio.mean, ratio.low, ratio.high), (mean.mean, mean.low, mean.high))
    assert ratio_interval([*values, 0.0], [*np.ones(20), 0.0]).n == 20
    assert ratio_interval([2.0], [4.0]) == Interval(0.5, -math.inf, math.inf, 1)
    after = values - 0.1 + 0.01 * values**2
    ratio, plain = paired_ratio_difference(values, after, np.ones(20)), paired_difference(values, after)
    np.testing.assert_allclose((ratio.mean, ratio.low, ratio.p_value), (plain.mean, plain.low, plain.p_value))
    assert paired_ratio_difference(values, values, np.ones(20)).p_value == 1.0
    for totals, weights in [([1.0, 2.0], [1.0]), ([1.0], [0.0]), ([1.0], [-1.0])]:
        with pytest.raises(ValueError, match="must have equal lengths"):
            ratio_interval(totals, weights)
