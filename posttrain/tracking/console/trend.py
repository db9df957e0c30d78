"""Trend, best value and remaining time of a stage from the metrics of its steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from posttrain.tracking.console.columns import number

WINDOW = 10
"""Steps of each of the two means whose difference is the trend."""


class Trend:
    """Trend of a main metric, its best value so far, and the time to go, over the steps seen by this process."""

    def __init__(self, headline: str, rises: bool, num_steps: int) -> None:
        self._headline, self._rises, self._num_steps = headline, rises, num_steps
        self._values: deque[float] = deque(maxlen=2 * WINDOW)
        self._times: deque[float] = deque(maxlen=2 * WINDOW)
        self._best = math.nan
        self._step = 0
        self._compiled = True
        """True while every known time includes compilation."""

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step; times that include compilation count only until there is another."""
        value = metrics[self._headline]
        self._step = step
        if math.isfinite(value):
            self._values.append(value)
            better = value > self._best if self._rises else value < self._best
            self._best = value if better or math.isnan(self._best) else self._best
        if "step_time" in metrics:
            self._add_time(metrics["step_time"], compiled=metrics.get("perf/compilations", 0.0) > 0)

    def _add_time(self, seconds: float, *, compiled: bool) -> None:
        if self._compiled:
            self._times.clear()
        if self._compiled or not compiled:
            self._times.append(seconds)
        self._compiled = self._compiled and compiled

    @property
    def change(self) -> float:
        """Mean of the newer half of the last steps less that of the older half; NaN before the fourth step."""
        values = list(self._values)
        half = len(values) // 2
        if half < 2:
            return math.nan
        return sum(values[-half:]) / half - sum(values[-2 * half : -half]) / half

    @property
    def left_s(self) -> float:
        """Estimated seconds to the last step; NaN before the first time of a step."""
        if not self._times:
            return math.nan
        return (self._num_steps - self._step) * sum(self._times) / len(self._times)

    @property
    def best(self) -> float:
        """Best value so far; NaN without a finite one."""
        return self._best

    @property
    def shown(self) -> str:
        """Change with its sign; `-` if unknown."""
        change = self.change
        if math.isnan(change):
            return "-"
        return "0" if abs(change) < 5e-4 else f"{'+' if change > 0 else ''}{_short(change)}"


def _short(value: float) -> str:
    """Number of two significant digits, and at most three decimals."""
    if abs(value) < 0.1:
        return f"{value:.3f}"
    return number(value) if abs(value) >= 100 else format(value, ".2g")
