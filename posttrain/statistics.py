"""Confidence intervals and tests for evaluations, clustered by prompt or sequence."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

LEVEL = 0.95
"""Coverage of every interval."""


@dataclass(frozen=True)
class Interval:
    """Mean with its 95 % confidence interval; `n` counts independent units: prompts, sequences."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] n={self.n}"


@dataclass(frozen=True)
class PairedDifference(Interval):
    """Mean of after - before over the same prompts, with the two-sided p-value of "no difference"."""

    p_value: float

    @property
    def significant(self) -> bool:
        return self.p_value < 1.0 - LEVEL


def prompt_numbers(prompts: Iterable[Hashable]) -> np.ndarray:
    """Number of each row's prompt, in the order in which they come first: the units of intervals and tests.

    Rows of one prompt are not independent observations of a set of prompts. Where all rows have the same prompt, as
    those of an environment that draws its task, there is no such set, and the rows themselves are the units.

    >>> prompt_numbers(["a", "b", "a"]), prompt_numbers(["a", "a"])
    (array([0, 1, 0]), array([0, 1]))
    """
    numbers: dict[Hashable, int] = {}
    found = np.asarray([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], int)
    return found if len(numbers) > 1 else np.arange(len(found))


def count_rows(prompts: Sequence[Hashable], rows: str = "rows") -> str:
    """Number of rows and of their prompts in words.

    >>> count_rows(["a", "b", "a"])
    '3 rows, 2 prompts'
    """
    one = len(set(prompts)) == 1
    return f"{len(prompts):,} {rows}, {len(set(prompts)):,} {'prompt' if one else 'prompts'}"


def mean_interval(values: ArrayLike, clusters: ArrayLike | None = None) -> Interval:
    """Mean over prompts with its 95 % interval: Wilson's for 0/1 outcomes, Student's t otherwise.

    `clusters`: prompt of each value; prompt means are averaged, so each prompt counts once. For 0/1 outcomes with
    several samples per prompt, Wilson's interval uses the effective sample size p (1 - p) / se^2 with the t correction
    of Korn and Graubard (1998). A single prompt of real-valued outcomes has no interval: (-inf, inf).
    """
    outcomes = _finite(values, "values")
    means = outcomes if clusters is None else _cluster_means(outcomes, np.asarray(clusters))
    n, mean = len(means), float(means.mean())
    error = float(means.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    if np.isin(outcomes, (0.0, 1.0)).all():
        if n == len(outcomes):
            return Interval(mean, *_wilson(mean, float(n)), n)
        return _effective_wilson(means, len(outcomes))
    half = _t_quantile(n - 1) * error if n > 1 else math.inf
    return Interval(mean, mean - half, mean + half, n)


def share_interval(shares: ArrayLike, samples: int, clusters: ArrayLike | None = None) -> Interval:
    """Mean over prompts of shares between 0 and 1, such as pass@k, each estimated from so many samples. `clusters`:
    prompt of each share.

    The 95 % interval is that of `mean_interval` for 0/1 outcomes with several samples per prompt. ValueError for a
    number that is no share.
    """
    checked = _finite(shares, "shares")
    if checked.min() < 0.0 or checked.max() > 1.0:
        raise ValueError(f"shares must lie between 0 and 1, got {checked.min():g} to {checked.max():g}")
    means = checked if clusters is None else _cluster_means(checked, np.asarray(clusters))
    return _effective_wilson(means, len(checked) * samples)


def paired_difference(before: ArrayLike, after: ArrayLike, clusters: ArrayLike | None = None) -> PairedDifference:
    """Difference after - before, paired by prompt; arrays are [P], or [P, G] averaged per prompt first. `clusters`:
    prompt of each row, whose rows are averaged too.

    Differences of 0/1 outcomes use the interval of Agresti and Min (2005) and McNemar's exact test; others Student's
    paired t. Raises ValueError for unequal numbers of prompts, and for fewer than two.
    """
    first, second = _prompt_means(before, "before"), _prompt_means(after, "after")
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(
            f"paired_difference: before has {len(first)} prompts and after {len(second)}; "
            "give the same two or more prompts in the same order"
        )
    if clusters is not None:
        first, second = (_cluster_means(means, np.asarray(clusters)) for means in (first, second))
        if len(first) < 2:
            raise ValueError("paired_difference: the rows have one prompt; give two or more")
    difference = second - first
    n, mean = len(difference), float(difference.mean())
    if np.isin(np.concatenate([first, second]), (0.0, 1.0)).all():
        up, down = int((difference > 0).sum()), int((difference < 0).sum())
        p_value = min(1.0, 2.0 * float(special.bdtr(min(up, down), up + down, 0.5))) if up + down else 1.0
        centre = (up - down) / (n + 2)
        half = _normal_quantile() * math.sqrt(((up + down + 1) / (n + 2) - centre**2) / (n + 2))
        return PairedDifference(mean, max(-1.0, centre - half), min(1.0, centre + half), n, p_value)
    error = float(difference.std(ddof=1)) / math.sqrt(n)
    if error == 0.0:
        # All prompts changed equally: only the sign test is informative.
        p_value = 1.0 if mean == 0.0 else 0.5 ** (n - 1)
    else:
        p_value = 2.0 * float(special.stdtr(n - 1, -abs(mean) / error))
    half = _t_quantile(n - 1) * error
    return PairedDifference(mean, mean - half, mean + half, n, p_value)


def ratio_interval(totals: ArrayLike, weights: ArrayLike, clusters: ArrayLike | None = None) -> Interval:
    """Ratio sum(totals) / sum(weights), such as a token mean, with its 95 % interval; one entry per sequence.
    `clusters`: prompt of each sequence, whose entries are added up first.

    The variance is that of the linearized ratio R: n / (n - 1) sum((total - R weight)^2) / sum(weights)^2, and the
    interval Student's t. Cochran, Sampling Techniques, section 6.4. A single sequence has no interval: (-inf, inf).
    """
    total, weight = _weighted(totals, weights, clusters)
    n, ratio = len(total), float(total.sum() / weight.sum())
    half = _t_quantile(n - 1) * _ratio_error(total, weight) if n > 1 else math.inf
    return Interval(ratio, ratio - half, ratio + half, n)


def paired_ratio_difference(
    before: ArrayLike, after: ArrayLike, weights: ArrayLike, clusters: ArrayLike | None = None
) -> PairedDifference:
    """Change of `ratio_interval`'s ratio over the same sequences, from totals before and after."""
    first, weight = _weighted(before, weights, clusters)
    second, _ = _weighted(after, weights, clusters)
    interval = ratio_interval(second - first, weight)
    if interval.n < 2:
        return PairedDifference(interval.mean, interval.low, interval.high, interval.n, 1.0)
    error = _ratio_error(second - first, weight)
    p_value = (
        2.0 * float(special.stdtr(interval.n - 1, -abs(interval.mean) / error))
        if error
        else float(interval.mean == 0.0)
    )
    return PairedDifference(interval.mean, interval.low, interval.high, interval.n, p_value)


def difference_of_ratios(
    totals: ArrayLike, weights: ArrayLike, other_totals: ArrayLike, other_weights: ArrayLike
) -> Interval:
    """Difference sum(totals) / sum(weights) - sum(other_totals) / sum(other_weights), one entry of each per
    prompt.

    The 95 % interval uses the residuals of both ratios (see `ratio_interval`); a prompt may have weight in only
    one.
    """
    parts = []
    for total, weight in ((totals, weights), (other_totals, other_weights)):
        _weighted(total, weight)
        total, weight = np.asarray(total, np.float64), np.asarray(weight, np.float64)
        ratio = total.sum() / weight.sum()
        parts.append((ratio, (total - ratio * weight) / weight.sum(), weight > 0))
    (first_ratio, first, counted), (second_ratio, second, second_counted) = parts
    n, mean = int((counted | second_counted).sum()), float(first_ratio - second_ratio)
    half = _t_quantile(n - 1) * math.sqrt(n / (n - 1) * float(np.square(first - second).sum())) if n > 1 else math.inf
    return Interval(mean, mean - half, mean + half, n)


def standard_error(rewards_PG: Iterable[ArrayLike], clusters: ArrayLike | None = None) -> float:
    """Standard error of a step's mean reward, clustered by prompt: sd(prompt means) / sqrt(P). `clusters`: prompt of
    each group.

    NaN marks a sample without a reward; prompts without any reward are excluded. NaN if fewer than two prompts remain.
    """
    rows = [np.asarray(row, np.float64) for row in rewards_PG]
    known = np.asarray([not np.isnan(row).all() for row in rows], bool)
    means = np.asarray([row[~np.isnan(row)].mean() for row, has in zip(rows, known, strict=True) if has])
    if clusters is not None and len(means):
        means = _cluster_means(means, np.asarray(clusters)[known])
    return float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.nan


def _effective_wilson(shares: np.ndarray, most: int) -> Interval:
    """Wilson's interval of the mean share over prompts, at its effective sample size of at most `most`."""
    n, mean = len(shares), float(shares.mean())
    effective = float(n)
    if n > 1 and 0.0 < mean < 1.0:
        variance = float(shares.var(ddof=1)) / n
        effective = mean * (1.0 - mean) / max(variance, 1e-30) * (_normal_quantile() / _t_quantile(n - 1)) ** 2
    return Interval(mean, *_wilson(mean, min(effective, float(most))), n)


def _wilson(p: float, n: float) -> tuple[float, float]:
    """Wilson (1927) score interval of a proportion; its ends are exactly 0 or 1 if all outcomes are."""
    z = _normal_quantile()
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return 0.0 if p == 0.0 else centre - half, 1.0 if p == 1.0 else centre + half


def _normal_quantile() -> float:
    return float(special.ndtri(0.5 + LEVEL / 2))


def _t_quantile(degrees: int) -> float:
    return float(special.stdtrit(degrees, 0.5 + LEVEL / 2))


def _cluster_means(values: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    if clusters.shape != values.shape:
        raise ValueError(
            f"clusters has shape {clusters.shape}, values {values.shape}; give one prompt number for each value"
        )
    _, inverse, counts = np.unique(clusters, return_inverse=True, return_counts=True)
    return np.bincount(inverse, weights=values) / counts


def _prompt_means(values: ArrayLike, name: str) -> np.ndarray:
    array = np.asarray(values, np.float64)
    if array.ndim not in (1, 2):
        raise ValueError(f"{name} has shape {array.shape}; give [P] or [P, G]")
    return _finite(array.mean(axis=1) if array.ndim == 2 else array, name)


def _weighted(
    totals: ArrayLike, weights: ArrayLike, clusters: ArrayLike | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Totals and weights of sequences with positive weight, or of prompts, each the sum over its sequences."""
    total, weight = _finite(totals, "totals"), _finite(weights, "weights")
    if len(total) != len(weight) or (weight < 0).any() or not weight.any():
        raise ValueError(
            f"totals and weights must have equal lengths, no negative and some positive weight; got {len(total)} and "
            f"{len(weight)} from {weight.min()} to {weight.max()}"
        )
    if clusters is not None:
        _, inverse = np.unique(np.asarray(clusters), return_inverse=True)
        total, weight = np.bincount(inverse, total), np.bincount(inverse, weight)
    return total[weight > 0], weight[weight > 0]


def _ratio_error(total: np.ndarray, weight: np.ndarray) -> float:
    n, residual = len(total), total - total.sum() / weight.sum() * weight
    return math.sqrt(n / (n - 1) * float(np.square(residual).sum())) / float(weight.sum())


def _finite(values: ArrayLike, name: str) -> np.ndarray:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or len(array) == 0 or not np.isfinite(array).all():
        raise ValueError(
            f"{name} must be a flat, non-empty sequence of finite numbers, got shape {array.shape} with "
            f"{int((~np.isfinite(array)).sum())} not finite; remove samples without an outcome"
        )
    return array
