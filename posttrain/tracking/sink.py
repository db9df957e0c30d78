"""Sinks: receivers of the metrics, tables and samples of a stage; names and texts as dashboards show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from posttrain.metrics import Sample


@runtime_checkable
class Sink(Protocol):
    """Receiver of host metrics as returned by `to_host`, with any names."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """Write arrays with too many values for a metric each."""
        ...

    def samples(self, step: int, rows: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


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


def markdown_of(row: Sample) -> str:
    """Format a sample with its texts as indented code, so that nothing in them is parsed as Markdown."""
    numbers = {"reward": row.reward, **row.rewards, "advantage": row.advantage, **row.extra, "stop": row.stop}
    facts = "\n".join(f"{name} = {value}" for name, value in numbers.items())
    parts = (("Prompt", row.prompt), ("Completion", row.completion), ("Scores", facts))
    return "\n\n".join(
        f"**{title}**\n\n" + "\n".join("    " + line for line in text.splitlines() or [""]) for title, text in parts
    )
