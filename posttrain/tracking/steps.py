"""Console sink: one line per step with its columns and trend, lines for evaluations, tables of samples."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.metrics import Sample
from posttrain.tracking.console import LiveLine, clean, console, printable
from posttrain.tracking.log_files import keep_line

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


def _of_samples(metrics: Mapping[str, float]) -> str:
    """Format what is known of samples of held-out prompts."""
    words = []
    for name in (name for name in metrics if f"{name}_low" in metrics and name.startswith("samples/")):
        mean, low, high = (metrics[f"{name}{end}"] for end in ("", "_low", "_high"))
        interval = f" ({low:.3f} to {high:.3f})" if math.isfinite(low + high) else ""
        words.append(f"{name.split('/')[1]} {mean:.3f}{interval}")
    length, clipped = (metrics[f"samples/completions/{name}"] for name in ("mean_length", "clipped_ratio"))
    return f"held-out samples: {', '.join((*words, f'length {number(length)}', f'cut off {share(clipped)}'))}"


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
            self._waiting = "  ".join((self._waiting, *warnings))
            due = time.monotonic() - self._printed_at >= self._interval_s
            if (due and self._live is None) or step >= self._num_steps or warnings:
                self._flush()
            elif self._live is not None:
                self._head()
                if due:
                    keep_line(self._waiting)
                    self._printed_at = time.monotonic()
                self._live.show(printable(self._waiting, self._console.encoding))
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if evaluated:
            self._flush()
            self._print(f"{self._number(step)}  {_evaluation(evaluated)}")

        if any(name.startswith("samples/") for name in metrics):
            self._flush()
            self._print(f"{self._number(step)}  {_of_samples(metrics)}")

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
    narrowest = 9 if output.width >= 100 else 6
    folded = [folded_name(name, narrowest) for name in scores]
    heads = ["reward", *("\n".join(printable(line, output.encoding) for line in lines) for lines in folded)]
    heads += ["advantage", "stop"]
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
    texts_of = ([*head.split("\n"), *(cells[i] for cells in body)] for i, head in enumerate(heads))
    widths = [max(map(cell_len, texts)) for texts in texts_of]
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


def folded_name(name: str, cells: int) -> list[str]:
    """Lines of a name, as long as `cells` where its words are, which end with `_`, `/` or `-`.

    >>> folded_name("has_only_numbers", 9), folded_name("reward", 3)
    (['has_only_', 'numbers'], ['reward'])
    """
    lines = [""]
    for word in re.findall(r"[^_/-]+[_/-]*|[_/-]+", name):
        if lines[-1] and len(lines[-1] + word) > cells:
            lines.append("")
        lines[-1] += word
    return lines


EACH = re.compile(r"eval/rewards/(.+)/mean")


def means_of_functions(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, mean before and mean after of each reward function of two evaluations, `-` where it gave no sample a
    reward; none where there is one alone, whose mean is that of the reward."""
    names = dict.fromkeys(name for values in (after, before) for name in values["metrics"])
    found = [match for name in names if (match := EACH.fullmatch(name))]
    if len(found) < 2:
        return []
    shown = [[_mean_text(values["metrics"].get(one[0])) for values in (before, after)] for one in found]
    return [(one[1], old, new) for one, (old, new) in zip(found, shown, strict=True)]


def _mean_text(value: float | None) -> str:
    return "-" if value is None else format(value, ".3f")


def shown_number(value: float | None) -> str:
    """Format a sample's number to three significant digits; `-` for None."""
    return "-" if value is None else f"{value:.3g}"


LEGEND = "trend: mean of the last 10 steps less that of the 10 before; left: time to go"


@dataclass(frozen=True)
class Column:
    header: str
    width: int
    text: Callable[[Mapping[str, float]], str]


@dataclass(frozen=True)
class Layout:
    """Console line of a stage kind, 80 columns wide with up to a thousand steps, of RL 104."""

    headline: str
    """Main metric; lines without it are no steps."""
    rises: bool
    """True if a greater value is better."""
    first: Column
    """Column of the main metric, which its trend and best value follow."""
    columns: tuple[Column, ...]
    legend: tuple[str, ...] = (LEGEND,)

    @property
    def main_number(self) -> Callable[[float], str]:
        """Format of the main metric's best value."""
        return reward_number if self.rises else number

    @property
    def heads(self) -> tuple[tuple[str, int], ...]:
        """Headers and widths of all columns after the step: the main metric, trend, best, the others, time to go."""
        others = ((column.header, column.width) for column in self.columns)
        main = (self.first.header, self.first.width)
        return (main, ("trend", 6), ("best", 6 if self.rises else 7), *others, ("left", 6))


def number(value: float) -> str:
    """Number of three significant digits, with k or M for thousands or millions.

    >>> number(1.29451), number(0.5), number(12345.6), number(3e-6), number(float("nan"))
    ('1.29', '0.500', '12.3k', '3.00e-06', 'nan')
    """
    for limit, letter in ((999_500.0, "M"), (999.5, "k")):
        if limit <= abs(value) < 1e9:
            return number(value / (1e6 if letter == "M" else 1e3)) + letter
    return format(value, "#.3g").rstrip(".") if value else "0"


def reward_number(value: float) -> str:
    """Reward with three decimals, or if it is above one three significant digits."""
    return format(value, ".3f") if abs(value) < 1.0 else number(value)


def share(value: float) -> str:
    """Share as a whole percentage; above nothing and below everything never 0% or 100%."""
    if math.isnan(value):
        return "-"
    return ">99%" if 0.995 <= value < 1.0 else "<1%" if 0.0 < value < 0.005 else f"{value:.0%}"


def seconds(value: float) -> str:
    """Duration as `42 s`, `3:05`, `2:14 h` or `3.4 d`; `-` if unknown.

    >>> seconds(42.2), seconds(185.0), seconds(8040.0), seconds(3e5), seconds(math.nan)
    ('42 s', '3:05', '2:14 h', '3.5 d', '-')
    """
    if not math.isfinite(value):
        return "-"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h" if whole < 48 * 3600 else f"{whole / 86400:.1f} d"


def _column(header: str, width: int, name: str, form: Callable[[float], str] = number) -> Column:
    def text(metrics: Mapping[str, float]) -> str:
        return form(metrics[name]) if name in metrics else "-"

    return Column(header, width, text)


def _reward(metrics: Mapping[str, float]) -> str:
    error = f" ±{metrics['reward_stderr']:.2g}" if math.isfinite(metrics.get("reward_stderr", math.nan)) else ""
    return f"{reward_number(metrics['reward'])}{error}"


def _signal(metrics: Mapping[str, float]) -> str:
    return share(1.0 - metrics["frac_reward_zero_std"]) if "frac_reward_zero_std" in metrics else "-"


_RATE, _NORM = _column("lr", 8, "learning_rate"), _column("grad", 6, "grad_norm")
_SPEED = (_column("tokens/s", 8, "perf/tokens_per_s"), _column("s/step", 6, "step_time"))
_KL = _column("kl", 6, "kl", lambda value: f"{value:.2g}")
_SHORT_RATE = _column("lr", 6, "learning_rate", lambda value: f"{value:.1g}")
_LENGTH, _SECONDS = _column("length", 6, "completions/mean_length"), _column("s/step", 6, "step_time")
_CUT_OFF = _column("cut off", 7, "completions/clipped_ratio", share)
_REWARD = Column("reward", 12, _reward)

LAYOUTS: dict[str, Layout] = {
    "sft": Layout("nll", False, _column("nll", 7, "nll"), (_RATE, _NORM, *_SPEED)),
    "preference": Layout(
        "loss",
        False,
        _column("loss", 7, "loss"),
        (_column("accuracy", 8, "rewards/accuracies", share), _column("margin", 7, "rewards/margins"), *_SPEED),
    ),
    "distill": Layout(
        "distill/kl",
        False,
        _column("kl", 8, "distill/kl"),
        (_column("nll", 6, "nll"), _column("teacher", 7, "distill/teacher_nll"), *_SPEED),
        (LEGEND, "kl: of student and teacher; teacher: the teacher's nll of the same tokens"),
    ),
    "rl_distill": Layout(
        "distill/kl",
        False,
        _column("kl", 8, "distill/kl"),
        (_column("teacher", 7, "distill/teacher_nll"), _LENGTH, _CUT_OFF, _SECONDS),
        (LEGEND, "teacher: its nll of the answers; cut off: answers that max_tokens ended"),
    ),
    "drafter": Layout(
        "drafter/kl",
        False,
        _column("kl", 7, "drafter/kl"),
        (_column("length", 6, "drafter/length"), _column("overlap", 7, "drafter/overlap", share), *_SPEED),
        (LEGEND, "length: tokens of a pass that judges drafts; overlap: of first drafts"),
    ),
    "rl": Layout(
        "reward",
        True,
        _REWARD,
        (_LENGTH, _CUT_OFF, Column("signal", 6, _signal), _KL, _NORM, _SHORT_RATE, _SECONDS),
        (
            LEGEND,
            "cut off: answers that max_tokens ended; signal: groups with unequal rewards; kl: of the policy and the",
            "reference, nats a token; grad: norm of the gradient; lr: learning rate",
        ),
    ),
    "online_preference": Layout(
        "reward",
        True,
        _REWARD,
        (
            _column("accuracy", 8, "rewards/accuracies", share),
            _column("ties", 5, "frac_ties", share),
            _LENGTH,
            _SECONDS,
        ),
        (LEGEND, "accuracy: pairs ordered as rewarded; ties: pairs with equal rewards"),
    ),
}
LAYOUTS["reward_model"] = LAYOUTS["preference"]
"""Console lines by stage kind."""


COMPILING = 3
"""Steps after which times that include compilation count where there are no others."""
WINDOW = 10
"""Steps of each of the two means whose difference is the trend."""


class Trend:
    """Trend of a main metric, its best value so far, and the time to go, over the steps seen by this process."""

    def __init__(self, headline: str, rises: bool, num_steps: int) -> None:
        self._headline, self._rises, self._num_steps = headline, rises, num_steps
        self._values: deque[float] = deque(maxlen=2 * WINDOW)
        self._times: deque[float] = deque(maxlen=2 * WINDOW)
        self._best = math.nan
        self._step = self._steps = 0
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
        self._steps += 1
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
        """Estimated seconds to the last step; NaN before the first time of a step, and while the first ones compile."""
        if not self._times or (self._compiled and self._steps < COMPILING):
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
