"""Sink that calls a function of the user after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from posttrain.metrics import Sample

OnStep = Callable[[int, Mapping[str, float]], None]
"""Function of a step's number and its metrics."""


class CallbackSink:
    """Sink that calls `on_step(step, metrics)` for every line of metrics, also of evaluations (`eval/...`)."""

    def __init__(self, on_step: OnStep) -> None:
        self._on_step = on_step

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._on_step(step, metrics)

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """Ignored: a callback sees numbers."""

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Ignored: `samples.jsonl` has them."""

    def close(self) -> None:
        """Nothing to close."""
