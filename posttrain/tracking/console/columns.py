"""Columns of the console line per stage kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


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
"""Headline metric and columns after the step number, by stage kind."""
