"""Evaluations on held-out prompts as JSON objects, and their paired comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Float

from posttrain.evaluation.at_k import prompt_means
from posttrain.evaluation.rollouts import RolloutEvaluation
from posttrain.statistics import PairedDifference, paired_difference

Record = dict[str, Any]


def record_of(evaluations: Mapping[str | None, RolloutEvaluation]) -> Record:
    """JSON object of evaluations by name of the dataset: that without a name, with the metrics of all, and under `sets`
    the others."""
    metrics: dict[str, float] = {}
    for name, found in evaluations.items():
        metrics |= found.metrics(_prefix(name))
    sets = {name: _of_set(found) for name, found in evaluations.items() if name is not None}
    return {**_of_set(evaluations[None]), "metrics": metrics, "sets": sets}


def difference(before: Record, after: Record) -> Record:
    """Paired differences over the same prompts, by metric; the difficulty of prompts, which widens each interval,
    cancels."""
    found: Record = {}
    for name in (None, *before["sets"]):
        old, new = (record if name is None else record["sets"][name] for record in (before, after))
        for metric in old["values"]:
            compared = paired(old, new, metric)
            if compared is not None:
                found[f"{_prefix(name)}/{metric}"] = asdict(compared)
    return found


def paired(before: Mapping[str, Any], after: Mapping[str, Any], metric: str) -> PairedDifference | None:
    """Difference of one dataset's values over the prompts that have them before and after; None for fewer than two."""
    first, second = (np.asarray(record["values"][metric], np.float64) for record in (before, after))
    valid = ~np.isnan(first) & ~np.isnan(second)
    return paired_difference(first[valid], second[valid]) if valid.sum() > 1 else None


def _prefix(name: str | None) -> str:
    return "eval" if name is None else f"eval/{name}"


def _of_set(found: RolloutEvaluation) -> Record:
    """Confidence interval of the reward, or of the KL without rewards, the values of each prompt, and the first sample
    of each."""
    if found.interval is not None:
        measure, metric, interval, values_PG = "reward", "reward", found.interval, found.rewards.total_PG
    else:
        assert found.distance is not None and found.distances_PG is not None
        measure, metric, interval, values_PG = "reverse KL", "distill/kl", found.distance, found.distances_PG
    values_P = prompt_means(values_PG)
    samples = [
        {
            "prompt": "".join(str(message["content"]) for message in group[0].answer.example.messages),
            "completion": group[0].shown,
            measure: value,
        }
        for group, value in zip(found.groups_P, _numbers(values_P), strict=True)
    ]
    return {
        "measure": measure,
        "mean": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "n": interval.n,
        "values": {name: _numbers(values) for name, values in {metric: values_P, **found.at_k}.items()},
        "samples": samples,
    }


def _numbers(values: Float[np.ndarray, " P"]) -> Sequence[float | None]:
    return [None if math.isnan(value) else float(value) for value in values]
