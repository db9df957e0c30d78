"""What people see while a run goes on: one line per step, tables of samples, progress bars."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from posttrain.metrics import Sample

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

T = TypeVar("T")

HEADER_EVERY = 20
SAMPLE_CELLS = 240
"""Of a completion in a narrow table; never fewer than three lines, nor more than eight."""
PLAIN_WIDTH = 120
"""Columns of a log file or a notebook, where `COLUMNS` does not say otherwise."""


@dataclass(frozen=True)
class Column:
    header: str
    width: int
    text: Callable[[Mapping[str, float]], str]


def _column(header: str, width: int, name: str, form: str, scale: float = 1.0) -> Column:
    def text(metrics: Mapping[str, float]) -> str:
        return format(scale * metrics[name], form) if name in metrics else "-"

    return Column(header, width, text)


def _reward(metrics: Mapping[str, float]) -> str:
    error = f" ±{metrics['reward_stderr']:.3f}" if "reward_stderr" in metrics else ""
    return f"{metrics['reward']:.3f}{error}"


def _mixed(metrics: Mapping[str, float]) -> str:
    return f"{1.0 - metrics['frac_reward_zero_std']:.0%}" if "frac_reward_zero_std" in metrics else "-"


_SPEED = (_column("tokens/s", 9, "perf/tokens_per_s", ",.0f"), _column("s/step", 7, "step_time", ".2f"))

COLUMNS: dict[str, tuple[str, tuple[Column, ...]]] = {
    "sft": (
        "nll",
        (
            _column("nll", 8, "nll", ".4f"),
            _column("lr", 9, "learning_rate", ".2e"),
            _column("grad norm", 9, "grad_norm", ".3g"),
            *_SPEED,
        ),
    ),
    "preference": (
        "loss",
        (
            _column("loss", 8, "loss", ".4f"),
            _column("accuracy", 8, "rewards/accuracies", ".3f"),
            _column("margin", 8, "rewards/margins", ".4f"),
            _column("lr", 9, "learning_rate", ".2e"),
            _column("grad norm", 9, "grad_norm", ".3g"),
            *_SPEED,
        ),
    ),
    "distill": (
        "distill/kl",
        (
            _column("kl", 8, "distill/kl", ".4f"),
            _column("loss", 8, "loss", ".4f"),
            _column("nll", 8, "nll", ".4f"),
            _column("teacher", 8, "distill/teacher_nll", ".4f"),
            _column("lr", 9, "learning_rate", ".2e"),
            *_SPEED,
        ),
    ),
    "rl_distill": (
        "distill/kl",
        (
            _column("kl", 8, "distill/kl", ".4f"),
            _column("teacher", 8, "distill/teacher_nll", ".4f"),
            _column("length", 7, "completions/mean_length", ".1f"),
            _column("clipped", 7, "completions/clipped_ratio", ".0%"),
            *_SPEED,
        ),
    ),
    "rl": (
        "reward",
        (
            Column("reward", 15, _reward),
            _column("length", 7, "completions/mean_length", ".1f"),
            _column("clipped", 7, "completions/clipped_ratio", ".0%"),
            Column("mixed", 6, _mixed),
            *_SPEED,
        ),
    ),
    "online_preference": (
        "reward",
        (
            Column("reward", 15, _reward),
            _column("accuracy", 8, "rewards/accuracies", ".3f"),
            _column("margin", 8, "rewards/margins", ".4f"),
            _column("ties", 5, "frac_ties", ".0%"),
            _column("length", 7, "completions/mean_length", ".1f"),
            *_SPEED,
        ),
    ),
}
COLUMNS["reward_model"] = COLUMNS["preference"]
"""By kind of stage: the metric that makes a line, and the line's columns after the step."""


@functools.cache
def console() -> Console:
    """The one console of lines and tables: plain text in logs and notebooks, on whatever `sys.stdout` is then."""
    from rich.console import Console

    found = Console(force_jupyter=False, highlight=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = PLAIN_WIDTH
    return found


def _evaluation(metrics: Mapping[str, float]) -> str:
    """A held-out reward or accuracy with its interval in words; other evaluations as they are named."""
    if "eval/rewards/accuracies" in metrics:
        share, low, high = (metrics[f"eval/rewards/accuracies{end}"] for end in ("", "_low", "_high"))
        margin = f", margin {metrics['eval/rewards/margins']:.4g}" if "eval/rewards/margins" in metrics else ""
        return f"held-out accuracy {share:.3f} ({low:.3f} to {high:.3f}){margin}, loss {metrics['eval/loss']:.4f}"
    if "eval/reward" not in metrics:
        return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    mean, low, high = (metrics[f"eval/reward{end}"] for end in ("", "_low", "_high"))
    length, clipped = (metrics[f"eval/completions/{name}"] for name in ("mean_length", "clipped_ratio"))
    return f"held-out reward {mean:.3f} ({low:.3f} to {high:.3f}), length {length:.1f}, clipped {clipped:.0%}"


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


def printable(text: str, encoding: str) -> str:
    """The text with what cannot be seen or encoded as Python escapes: a newline is `\\n`."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if encoding.lower().replace("-", "") not in ("utf8", "utf16", "utf32"):
        shown = shown.replace("±", "+-").replace("…", "...")
    return shown.encode(encoding, errors="backslashreplace").decode(encoding)


def sample_table(title: str, rows: Sequence[Sample], output: Console) -> Table:
    """A table as wide as the console: the prompt's end, the completion's start, rewards, advantage, stop reason."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    names = list(dict.fromkeys(name for row in rows for name in row.rewards))
    scores = [] if len(names) == 1 else names
    heads = [printable(head, output.encoding) for head in ("reward", *scores, "advantage", "stop")]
    body = [
        [_score(row.reward), *(_score(row.rewards.get(n)) for n in scores), _score(row.advantage), row.stop]
        for row in rows
    ]
    body = [[printable(cell, output.encoding) for cell in cells] for cells in body]
    narrowest = 9 if output.width >= 100 else 6
    widths = [max(min(cell_len(h), narrowest), *(cell_len(cells[i]) for cells in body), 1) for i, h in enumerate(heads)]
    # Each column takes 3 more for its padding and border; one border is left over.
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


def clean(text: str, cells: int, output: Console | None = None, *, keep_end: bool = False) -> Text:
    """Anyone's text as a table cell: printable, at most `cells` wide, and never read as markup."""
    from rich.text import Text

    encoding = (console() if output is None else output).encoding
    return Text(cut(printable(text, encoding), cells, encoding, keep_end=keep_end))


def cut(text: str, cells: int, encoding: str = "utf-8", *, keep_end: bool = False) -> str:
    """The start (or the end) of a text, as many terminal cells wide; what is missing is marked."""
    from rich.cells import cell_len

    if cell_len(text) <= cells:
        return text
    mark = printable("…", encoding)
    room, kept = cells - len(mark), []
    for character in reversed(text) if keep_end else text:
        room -= cell_len(character)
        if room < 0:
            break
        kept.append(character)
    return mark + "".join(reversed(kept)) if keep_end else "".join(kept) + mark


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def progress(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """The items, with a bar if they take longer than two seconds. `total` is their number, where it is known."""
    with progress_bar(description, total) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def progress_bar(
    description: str,
    total: int | None = None,
    *,
    delay_s: float = 2.0,
    closing: bool = True,
    every_s: float = 30.0,
    output: Console | None = None,
) -> Iterator[Callable[[int], None]]:
    """A bar for work that lasts longer than `delay_s`; yields `advance(count)`. Without a total it shows time only.

    A bar is drawn on a terminal, or in a notebook that has ipywidgets, and then removed; elsewhere there is a line
    every `every_s` seconds. With `closing` one line stays, on stderr. A bar inside another one is not drawn.
    """
    from rich.console import Console

    output = Console(stderr=True, highlight=False) if output is None else output
    bar = _Bar(description, total, output)
    drawn = output.is_terminal or (output.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)
    timer = threading.Timer(delay_s, bar.show) if drawn else threading.Timer(every_s, bar.tell, (every_s,))
    timer.daemon = True
    timer.start()
    try:
        yield bar.advance
    finally:
        timer.cancel()
        bar.hide()
    if closing and bar.seconds >= delay_s:
        count = f"{bar.count:,} in " if bar.count else ""
        bar.print(f"{count}{bar.seconds:.1f} s")


_screen = threading.Lock()


class _Bar:
    """Shown by a timer's thread, advanced and hidden by the worker's."""

    def __init__(self, description: str, total: int | None, output: Console) -> None:
        self.count = 0
        self._description, self._total, self._output = description, total, output
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._progress: Progress | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def print(self, text: str) -> None:
        line = printable(f"{self._description}: {text}", self._output.encoding)
        self._output.print(line, markup=False, soft_wrap=True)

    def tell(self, every_s: float) -> None:
        """A line now and then, until the work is over."""
        while not self._over.is_set():
            of = f" of {self._total:,}" if self._total is not None else ""
            self.print(
                f"{self.count:,}{of} after {self.seconds:.0f} s" if of or self.count else f"{self.seconds:.0f} s"
            )
            self._over.wait(every_s)

    def show(self) -> None:
        from rich import progress as parts
        from rich.markup import escape

        with self._lock:
            if self._over.is_set() or not _screen.acquire(blocking=False):
                return
            self._progress = parts.Progress(
                parts.TextColumn("{task.description}"),
                parts.BarColumn(),
                parts.MofNCompleteColumn(),
                parts.TimeElapsedColumn(),
                parts.TimeRemainingColumn(),
                console=self._output,
                transient=True,
            )
            self._progress.add_task(escape(self._description), total=self._total, completed=self.count)
            self._progress.start()

    def advance(self, count: int) -> None:
        with self._lock:
            self.count += count
            if self._progress is not None:
                self._progress.advance(self._progress.task_ids[0], count)

    def hide(self) -> None:
        with self._lock:
            self._over.set()
            if self._progress is not None:
                self._progress.stop()
                _screen.release()
                self._progress = None


class _LogHandler(logging.Handler):
    """Lines of the package's log among those of the run."""

    def emit(self, record: logging.LogRecord) -> None:
        console().print(record.getMessage(), style="dim", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def shown_log() -> Iterator[None]:
    """Print what the package logs meanwhile, such as the kernels that it chose, and only here: a library that sets up
    logging for all would print it once more."""
    logger, handler = logging.getLogger("posttrain"), _LogHandler()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
