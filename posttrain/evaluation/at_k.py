"""Values of held-out prompts, avg@k, pass@k and maj@k: their intervals, and paired differences between evaluations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from posttrain.config import EvaluateSection
from posttrain.statistics import (
    Interval,
    PairedDifference,
    mean_interval,
    paired_difference,
    prompt_numbers,
    share_interval,
)


def values_at_k(
    rewards_PG: Float[np.ndarray, "P G"],
    answers_PG: Sequence[Sequence[Hashable]] | None,
    section: EvaluateSection,
    pass_above: float,
) -> dict[str, Float[np.ndarray, " P"]]:
    """Values of each prompt by name, such as `pass@4`; NaN where the prompt has fewer than k samples with a reward.

    avg@k, over all samples, is the mean reward. A sample passes if its reward is above `pass_above`. `answers_PG`:
    what samples vote for in maj@k; None without it.
    """
    samples, valid_PG = rewards_PG.shape[1], ~np.isnan(rewards_PG)
    passed_PG = valid_PG & (rewards_PG > pass_above)
    values: dict[str, np.ndarray] = {}
    if "avg" in section.report:
        values[f"avg@{samples}"] = prompt_means(rewards_PG)
    if "pass" in section.report:
        counts = valid_PG.sum(axis=1), passed_PG.sum(axis=1)
        values |= {f"pass@{k}": pass_at_k(*counts, k) for k in section.ks}
    if "majority" in section.report:
        assert answers_PG is not None
        votes = [
            ([answer for answer, valid in zip(answers, valids, strict=True) if valid], passed[valids].tolist())
            for answers, passed, valids in zip(answers_PG, passed_PG, valid_PG, strict=True)
        ]
        values |= {f"maj@{k}": np.asarray([majority_at_k(*of_prompt, k) for of_prompt in votes]) for k in section.ks}
    return values


def intervals_at_k(
    values: Mapping[str, Float[np.ndarray, " P"]],
    rewards_PG: Float[np.ndarray, "P G"],
    prompts_P: Int[np.ndarray, " P"],
) -> dict[str, Interval]:
    """Means over prompts with 95 % intervals, in which prompts are independent, not rows or samples. `prompts_P`:
    prompt of each row. Names without any value are left out."""
    samples = rewards_PG.shape[1]
    intervals = {}
    for name, values_P in values.items():
        if np.isnan(values_P).all():
            continue
        if name == f"avg@{samples}":
            intervals[name] = interval_over_prompts(rewards_PG, prompts_P)
        else:
            known_P = ~np.isnan(values_P)
            intervals[name] = share_interval(values_P[known_P], samples, prompts_P[known_P])
    return intervals


def interval_over_prompts(values_PG: Float[np.ndarray, "P G"], prompts_P: Int[np.ndarray, " P"]) -> Interval:
    """Mean over prompts of the values that are known, with its 95 % interval. `prompts_P`: prompt of each row."""
    known = ~np.isnan(values_PG)
    return mean_interval(values_PG[known], np.broadcast_to(prompts_P[:, None], values_PG.shape)[known])


def prompt_means(values_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, " P"]:
    """Mean of each prompt's valid values; NaN without any."""
    valid_PG = ~np.isnan(values_PG)
    totals = np.where(valid_PG, values_PG, 0.0).sum(axis=1, dtype=np.float64)
    return np.where(valid_PG.any(axis=1), totals / np.maximum(valid_PG.sum(axis=1), 1), np.nan)


def pass_at_k(num: Int[np.ndarray, " P"], passed: Int[np.ndarray, " P"], k: int) -> Float[np.ndarray, " P"]:
    """Probability that at least one of k samples passes: 1 - C(n - c, k) / C(n, k) with c of n samples passing, which
    is unbiased. arXiv:2107.03374 eq. 1. NaN where n < k."""
    return np.asarray(
        [
            1.0 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan
            for n, c in zip(num.tolist(), passed.tolist(), strict=True)
        ]
    )


def majority_at_k(answers: Sequence[Hashable], passed: Sequence[bool], k: int) -> float:
    """Probability that the answer with the most votes of k samples passes, over all choices of k of the n samples and a
    fair draw among answers with equally many votes.

    A sample without an answer (None) does not vote; without any vote nothing passes. An answer of which only some
    samples pass counts with their share. NaN if n < k.

    >>> majority_at_k(["12", "12", "7"], [True, True, False], 3)
    1.0
    >>> majority_at_k(["12", "7"], [True, False], 2)
    0.5
    """
    if len(answers) < k:
        return math.nan
    count = Counter(answers)
    passing = Counter(answer for answer, passes in zip(answers, passed, strict=True) if passes)
    silent = count.pop(None, 0)
    # Answers with equally many samples win equally often: once for each such number.
    shares: dict[int, float] = {}
    for answer, votes in count.items():
        shares[votes] = shares.get(votes, 0.0) + passing[answer] / votes
    total = 0.0
    for votes, share in shares.items():
        if share:
            others = list(count.values())
            others.remove(votes)
            total += share * _ways_to_win(votes, others, silent, k)
    return total / math.comb(len(answers), k)


def _ways_to_win(votes: int, others: Sequence[int], silent: int, k: int) -> float:
    """Number of choices of k samples in which an answer with so many samples wins, a tie of t answers being 1 / t."""
    total = 0.0
    for most in range(1, min(votes, k) + 1):
        # Choices by number of samples and of tied answers, with at most `most` of each other answer.
        ways = np.zeros((k - most + 1, (k - most) // most + 1))
        quiet = [math.comb(silent, chosen) for chosen in range(min(silent, k - most) + 1)]
        ways[: len(quiet), 0] = quiet
        for other in others:
            longer = ways.copy()
            for chosen in range(1, min(other, most, k - most) + 1):
                tied = int(chosen == most)
                before = ways[: k - most + 1 - chosen, : ways.shape[1] - tied]
                longer[chosen:, tied:] += math.comb(other, chosen) * before
            ways = longer
        total += math.comb(votes, most) * float((ways[-1] / np.arange(1, ways.shape[1] + 1)).sum())
    return total


Record = dict[str, Any]


def prompt_differences(before: Record, after: Record) -> Record:
    """Paired differences over the same prompts, by metric; the difficulty of prompts, which widens each interval,
    cancels."""
    differences: Record = {}
    for name in (None, *before["sets"]):
        old, new = (record if name is None else record["sets"][name] for record in (before, after))
        for metric in old["values"]:
            compared = paired(old, new, metric)
            if compared is not None:
                differences[f"{prefix_of(name)}/{metric}"] = asdict(compared)
    return differences


def paired(before: Mapping[str, Any], after: Mapping[str, Any], metric: str) -> PairedDifference | None:
    """Difference of one dataset's values over the prompts that have them before and after; None for fewer than two.
    Rows of one prompt are averaged (`prompts` of the record)."""
    first, second = (np.asarray(record["values"][metric], np.float64) for record in (before, after))
    valid = ~np.isnan(first) & ~np.isnan(second)
    prompts = prompt_numbers(after["prompts"])[valid]
    return paired_difference(first[valid], second[valid], prompts) if len(set(prompts.tolist())) > 1 else None


def prefix_of(name: str | None) -> str:
    """Prefix of the metrics of a dataset by its name; None: `eval_dataset`."""
    return "eval" if name is None else f"eval/{name}"
