"""Console sink: one line per step, lines for evaluations, tables of samples."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from posttrain.metrics import Sample
from posttrain.tracking.console.columns import COLUMNS
from posttrain.tracking.console.screen import clean, console, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HEADER_EVERY = 20

SAMPLE_CELLS = 240
"""Terminal cells of a completion in a narrow table; between three and eight lines."""


EVAL_METRICS = (
    ("rewards/accuracies", "accuracy", ".3f"),
    ("rewards/margins", "margin", ".3g"),
    ("perplexity", "perplexity", ".4g"),
    ("distill/kl", "KL", ".4g"),
    ("distill/teacher_perplexity", "the teacher's perplexity", ".4g"),
)
"""Metrics with an interval in evaluation lines: name, label, format."""


def _evaluation(metrics: Mapping[str, float]) -> str:
    """Format held-out metrics with intervals; other evaluations by metric name."""
    if "eval/reward" in metrics:
        length, clipped = (metrics[f"eval/completions/{name}"] for name in ("mean_length", "clipped_ratio"))
        return f"held-out reward {with_interval(metrics, 'reward')}, length {length:.1f}, clipped {clipped:.0%}"
    found = [
        f"{word} {with_interval(metrics, n, digits)}" for n, word, digits in EVAL_METRICS if f"eval/{n}_low" in metrics
    ]
    if found:
        found += [f"loss {metrics['eval/loss']:.4f}"] if "eval/loss" in metrics else []
        return f"held-out {', '.join(found)}"
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def with_interval(metrics: Mapping[str, float], name: str, digits: str = ".3f") -> str:
    """Format an evaluation metric with its interval."""
    mean, low, high = (format(metrics[f"eval/{name}{end}"], digits) for end in ("", "_low", "_high"))
    return f"{mean} ({low} to {high})"


def _warnings(metrics: Mapping[str, float]) -> Iterator[str]:
    """Warnings appended to a step's line."""
    failed = metrics.get("rewards/errors", 0.0) + metrics.get("rewards/timeouts", 0.0)
    if failed > 0:
        yield f"rewards failed {failed:.2%}"
    invalid = metrics.get("rewards/invalid", 0.0)
    if invalid > 0:
        yield f"no reward {invalid:.2%}"
    if metrics.get("update_skipped", 0.0) > 0:
        yield "update skipped"
    compiled = metrics.get("perf/compilations", 0.0)
    if compiled > 0:
        yield f"compiled {compiled:.0f} programs in {metrics['perf/compile_s']:.1f} s"


class ConsoleSink:
    """Console sink: one line per step with the stage's headline metric; evaluations (`eval/...`) on separate lines.

    Runs of more than 100 steps print at most four lines per second; the last line, and steps that compiled, lost
    rewards or skipped the update, are always printed. NaN is printed as such: nothing was counted, or the run has
    diverged.
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
            if due or step >= self._num_steps or any(_warnings(metrics)):
                self._flush()
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if evaluated:
            self._flush()
            self._print(f"{self._step(step)}  {_evaluation(evaluated)}")

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """Ignored: tables are written to files only."""

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
        return "  ".join((line, *_warnings(metrics)))

    def _step(self, step: int) -> str:
        digits = len(str(self._num_steps))
        return f"{step:>{digits}}/{self._num_steps}".rjust(len("step"))

    def _print(self, line: str) -> None:
        self._console.print(printable(line, self._console.encoding), markup=False, soft_wrap=True)


def sample_table(title: str, rows: Sequence[Sample], output: Console) -> Table:
    """Build a table as wide as the console: end of the prompt, start of the completion, rewards, advantage, stop
    reason."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    names = list(dict.fromkeys(name for row in rows for name in row.rewards))
    scores = [] if len(names) == 1 else names
    heads = [printable(head, output.encoding) for head in ("reward", *scores, "advantage", "stop")]
    body = [
        [
            shown_number(row.reward),
            *(shown_number(row.rewards.get(n)) for n in scores),
            shown_number(row.advantage),
            row.stop,
        ]
        for row in rows
    ]
    body = [[printable(cell, output.encoding) for cell in cells] for cells in body]
    narrowest = 9 if output.width >= 100 else 6
    widths = [max(min(cell_len(h), narrowest), *(cell_len(cells[i]) for cells in body), 1) for i, h in enumerate(heads)]
    # Each column takes 3 cells for padding and border, plus one border at the end.
    free = max(24, output.width - sum(widths) - 3 * (len(widths) + 2) - 1)
    texts = free // 3, free - free // 3
    table = Table(title=Text(title), title_justify="left", show_lines=True, highlight=False)
    for head, width in zip(("prompt", "completion", *heads), (*texts, *widths), strict=True):
        table.add_column(Text(head), width=width, overflow="fold")
    lines = max(3, min(8, SAMPLE_CELLS // texts[1]))
    for row, cells in zip(rows, body, strict=True):
        prompt = clean(row.prompt, lines * texts[0], output, keep_end=True)
        completion = clean(row.completion, lines * texts[1], output)
        table.add_row(prompt, completion, *(Text(cell) for cell in cells))
    return table


def shown_number(value: float | None) -> str:
    """Format a sample's number to three significant digits; `-` for None."""
    return "-" if value is None else f"{value:.3g}"
