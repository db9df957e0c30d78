"""Console sink: one line per step, lines for evaluations, tables of samples."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from posttrain.metrics import Sample
from posttrain.tracking.console.columns import LAYOUTS, number, seconds, share
from posttrain.tracking.console.screen import LiveLine, clean, console, printable
from posttrain.tracking.console.trend import Trend

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
        return f"held-out reward {with_interval(metrics, 'reward')}, length {number(length)}, cut off {share(clipped)}"
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
    """Console sink: one line per step with the stage's main metric; evaluations (`eval/...`) on separate lines.

    On a terminal the line is redrawn in place, and one stays for the last step and for steps with a warning; elsewhere
    runs of more than 100 steps print at most one line per second. NaN is printed as such: nothing was counted, or the
    run has diverged. Samples are printed as a table with `sample_tables`, else once after the last step.
    """

    def __init__(self, kind: str, num_steps: int, output: Console | None = None, *, sample_tables: bool) -> None:
        self._layout, self._num_steps = LAYOUTS[kind], num_steps
        self._trend = Trend(self._layout.headline, self._layout.rises, num_steps)
        self._console = console() if output is None else output
        self._live = LiveLine(self._console) if self._console.is_terminal else None
        self._interval_s = 1.0 if num_steps > 100 else 0.0
        self._sample_tables = sample_tables
        self._last_samples: tuple[int, Sequence[Sample]] | None = None
        self._lines = self._step = 0
        self._printed_at = -math.inf
        self._waiting: str | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._layout.headline in metrics:
            self._step = step
            self._trend.add(step, metrics)
            self._waiting = self._line(step, metrics)
            warnings = list(_warnings(metrics))
            due = self._live is None and time.monotonic() - self._printed_at >= self._interval_s
            if due or step >= self._num_steps or warnings:
                self._flush()
            elif self._live is not None:
                self._head()
                self._live.show(printable(self._waiting, self._console.encoding))
            if warnings:
                self._print("  ".join((self._number(step), *warnings)))
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if evaluated:
            self._flush()
            self._print(f"{self._number(step)}  {_evaluation(evaluated)}")

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """Ignored: tables are written to files only."""

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        self._last_samples = (step, rows)
        if self._sample_tables:
            self._print_samples()

    def close(self) -> None:
        self._flush()
        if self._step >= self._num_steps:
            self._print_samples()
        if self._live is not None:
            self._live.close()

    def _print_samples(self) -> None:
        if self._last_samples is None:
            return
        self._flush()
        (step, rows), self._last_samples = self._last_samples, None
        self._console.print(sample_table(f"step {step}", rows, self._console))

    def _head(self) -> None:
        """Print the header, and the legend once."""
        if self._lines % HEADER_EVERY == 0 and (self._lines == 0 or self._live is None):
            layout = self._layout
            heads = (f"{header:>{width}}" for header, width in layout.heads)
            for line in layout.legend if self._lines == 0 else ():
                self._print(line)
            self._print("  ".join((f"{'step':>{len(self._number(0))}}", *heads)))
        self._lines += 1

    def _flush(self) -> None:
        if self._waiting is None:
            return
        self._head()
        self._print(self._waiting)
        self._printed_at = time.monotonic()
        self._waiting = None

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        layout = self._layout
        own = (column.text(metrics) for column in layout.columns)
        texts = (layout.first.text(metrics), self._trend.shown, self._best(), *own, seconds(self._trend.left_s))
        cells = (f"{text:>{width}}" for text, (_, width) in zip(texts, layout.heads, strict=True))
        return "  ".join((self._number(step), *cells))

    def _best(self) -> str:
        return "-" if math.isnan(self._trend.best) else self._layout.main_number(self._trend.best)

    def _number(self, step: int) -> str:
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
