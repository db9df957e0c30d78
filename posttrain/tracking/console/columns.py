"""Columns of the console line per stage kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LEGEND = "trend: mean of the last 10 steps less that of the 10 before; left: time to go"


@dataclass(frozen=True)
class Column:
    header: str
    width: int
    text: Callable[[Mapping[str, float]], str]


@dataclass(frozen=True)
class Layout:
    """Console line of a stage kind, 80 columns wide with up to a thousand steps."""

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
    error = f" ±{metrics['reward_stderr']:.2g}" if "reward_stderr" in metrics else ""
    return f"{reward_number(metrics['reward'])}{error}"


def _signal(metrics: Mapping[str, float]) -> str:
    return share(1.0 - metrics["frac_reward_zero_std"]) if "frac_reward_zero_std" in metrics else "-"


_RATE, _NORM = _column("lr", 8, "learning_rate"), _column("grad", 6, "grad_norm")
_SPEED = (_column("tokens/s", 8, "perf/tokens_per_s"), _column("s/step", 6, "step_time"))
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
    "rl": Layout(
        "reward",
        True,
        _REWARD,
        (_LENGTH, _CUT_OFF, Column("signal", 6, _signal), _SECONDS),
        (LEGEND, "cut off: answers that max_tokens ended; signal: groups with unequal rewards"),
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
