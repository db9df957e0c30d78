"""Evaluations on held-out prompts as JSON objects, and their paired comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from posttrain.statistics import PairedDifference, paired_difference

Record = dict[str, Any]


def difference(before: Record, after: Record) -> Record:
    """Paired differences over the same prompts, by metric; the difficulty of prompts, which widens each interval,
    cancels."""
    found: Record = {}
    for name in (None, *before["sets"]):
        old, new = (record if name is None else record["sets"][name] for record in (before, after))
        for metric in old["values"]:
            compared = paired(old, new, metric)
            if compared is not None:
                found[f"{prefix_of(name)}/{metric}"] = asdict(compared)
    return found


def paired(before: Mapping[str, Any], after: Mapping[str, Any], metric: str) -> PairedDifference | None:
    """Difference of one dataset's values over the prompts that have them before and after; None for fewer than two."""
    first, second = (np.asarray(record["values"][metric], np.float64) for record in (before, after))
    valid = ~np.isnan(first) & ~np.isnan(second)
    return paired_difference(first[valid], second[valid]) if valid.sum() > 1 else None


def prefix_of(name: str | None) -> str:
    """Prefix of the metrics of a dataset by its name; None: `eval_dataset`."""
    return "eval" if name is None else f"eval/{name}"
