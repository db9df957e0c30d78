"""Sinks: receivers of the metrics, tables and samples of a stage; names and texts as dashboards show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import numpy as np

from posttrain.errors import ConfigError
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


class Ending(Enum):
    """Answer of a callback."""

    STOP = "stop"

    def __repr__(self) -> str:
        return f"pt.{self.name}"


STOP = Ending.STOP
"""Returned by a callback: the stage ends after the step that runs, as after its last one, with evaluation, checkpoint
and model."""
OnStep = Callable[[int, Mapping[str, float]], Ending | None]
"""Function of a step's number and its metrics."""
OnSamples = Callable[[int, Sequence[Sample]], Ending | None]
"""Function of a step's number and some of its samples."""


class CallbackSink:
    """Sink that calls `on_step(step, metrics)` for every line of metrics, also of evaluations (`eval/...`), and
    `on_samples(step, samples)` for the samples that `samples.jsonl` has. `end`: called when one returns `STOP`."""

    def __init__(self, on_step: OnStep | None, on_samples: OnSamples | None, end: Callable[[], None]) -> None:
        self._on_step, self._on_samples, self._end = on_step, on_samples, end

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._on_step is not None:
            self._obey("on_step", self._on_step(step, metrics))

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """Ignored: a callback sees numbers."""

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        if self._on_samples is not None:
            self._obey("on_samples", self._on_samples(step, rows))

    def close(self) -> None:
        """Nothing to close."""

    def _obey(self, name: str, answer: Any) -> None:
        if answer is STOP:
            self._end()
        elif answer is not None:
            raise ConfigError(f"{name}: returned {repr(answer)[:60]}; return nothing, or pt.STOP to end the stage")


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
