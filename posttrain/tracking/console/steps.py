"""One line for each step, led by what the stage is about, and lines for evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from posttrain.metrics import Sample
from posttrain.tracking.console.columns import COLUMNS
from posttrain.tracking.console.samples import sample_table
from posttrain.tracking.console.screen import console, printable

if TYPE_CHECKING:
    from rich.console import Console

HEADER_EVERY = 20


HELD_OUT = (
    ("rewards/accuracies", "accuracy", ".3f"),
    ("rewards/margins", "margin", ".3g"),
    ("perplexity", "perplexity", ".4g"),
    ("distill/kl", "KL", ".4g"),
    ("distill/teacher_perplexity", "the teacher's perplexity", ".4g"),
)
"""What the line of an evaluation says where it has an interval: its name, the word for it and its digits."""


def _evaluation(metrics: Mapping[str, float]) -> str:
    """What is held out with its interval in words; evaluations that have none as they are named."""
    if "eval/reward" in metrics:
        length, clipped = (metrics[f"eval/completions/{name}"] for name in ("mean_length", "clipped_ratio"))
        return f"held-out reward {with_interval(metrics, 'reward')}, length {length:.1f}, clipped {clipped:.0%}"
    found = [
        f"{word} {with_interval(metrics, n, digits)}" for n, word, digits in HELD_OUT if f"eval/{n}_low" in metrics
    ]
    if found:
        found += [f"loss {metrics['eval/loss']:.4f}"] if "eval/loss" in metrics else []
        return f"held-out {', '.join(found)}"
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def with_interval(metrics: Mapping[str, float], name: str, digits: str = ".3f") -> str:
    """An evaluation's number with its interval."""
    mean, low, high = (format(metrics[f"eval/{name}{end}"], digits) for end in ("", "_low", "_high"))
    return f"{mean} ({low} to {high})"


def _remarks(metrics: Mapping[str, float]) -> Iterator[str]:
    """What a step's line says only where there is something to say."""
    failed = metrics.get("rewards/errors", 0.0) + metrics.get("rewards/timeouts", 0.0)
    if failed > 0:
        yield f"rewards failed {failed:.2%}"
    without = metrics.get("rewards/invalid", 0.0)
    if without > 0:
        yield f"no reward {without:.2%}"
    if metrics.get("update_skipped", 0.0) > 0:
        yield "update skipped"
    compiled = metrics.get("perf/compilations", 0.0)
    if compiled > 0:
        yield f"compiled {compiled:.0f} programs in {metrics['perf/compile_s']:.1f} s"


class ConsoleSink:
    """One line per step, led by what the stage is about; evaluations (`eval/...`) on lines of their own.

    Runs of more than 100 steps print at most four lines a second; the last line, and steps that compiled, lost rewards
    or changed nothing, are never left out. NaN is printed as such: nothing was counted, or the run has diverged.
    """

    def __init__(self, kind: str, num_steps: int, output: Console | None = None) -> None:
        self._headline, self._columns = COLUMNS[kind]
        self._num_steps = num_steps
        self._interval_s = 0.25 if num_steps > 100 else 0.0
        self._console = console() if output is None else output
        self._lines = 0
        self._printed_at = -math.inf
        self._waiting: str | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._headline in metrics:
            self._waiting = self._line(step, metrics)
            due = time.monotonic() - self._printed_at >= self._interval_s
            if due or step >= self._num_steps or any(_remarks(metrics)):
                self._flush()
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if evaluated:
            self._flush()
            self._print(f"{self._step(step)}  {_evaluation(evaluated)}")

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """They are for files."""

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        self._flush()
        self._console.print(sample_table(f"step {step}", rows, self._console))

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        if self._waiting is None:
            return
        if self._lines % HEADER_EVERY == 0:
            heads = (f"{column.header:>{column.width}}" for column in self._columns)
            self._print("  ".join((f"{'step':>{len(self._step(0))}}", *heads)))
        self._print(self._waiting)
        self._lines += 1
        self._printed_at = time.monotonic()
        self._waiting = None

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        cells = (f"{column.text(metrics):>{column.width}}" for column in self._columns)
        line = "  ".join((self._step(step), *cells))
        return "  ".join((line, *_remarks(metrics)))

    def _step(self, step: int) -> str:
        digits = len(str(self._num_steps))
        return f"{step:>{digits}}/{self._num_steps}".rjust(len("step"))

    def _print(self, line: str) -> None:
        self._console.print(printable(line, self._console.encoding), markup=False, soft_wrap=True)
