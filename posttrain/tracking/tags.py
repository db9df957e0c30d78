"""Names of metrics in dashboards, which group them by the part before the first slash."""

from __future__ import annotations

import math
from collections.abc import Mapping

PERFORMANCE = ("step_time", "num_tokens")


def grouped(name: str) -> str:
    """Name with a group: `train/` of metrics that have none.

    >>> grouped("reward"), grouped("rewards/correct/mean"), grouped("step_time")
    ('train/reward', 'rewards/correct/mean', 'perf/step_time')
    """
    if "/" in name:
        return name
    return f"perf/{name}" if name in PERFORMANCE else f"train/{name}"


def shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics by grouped name, without NaN."""
    return {grouped(name): value for name, value in metrics.items() if not math.isnan(value)}
