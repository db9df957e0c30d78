"""Length shaping: rewards that depend on a completion's number of tokens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.user_code import import_object


def cosine(
    completions: Sequence[str],
    completion_tokens: Sequence[Sequence[int]],
    *,
    correct: str,
    max_tokens: int,
    correct_short: float,
    correct_long: float,
    wrong_short: float,
    wrong_long: float,
    exceeded: float,
    **columns: Any,
) -> list[float | None]:
    """Cosine reward, arXiv:2502.03373 eq. 1: from `*_short` at 0 tokens to `*_long` at `max_tokens`, half a cosine in
    between, and `exceeded` from there on. Correct answers are made shorter by `correct_short` > `correct_long`, wrong
    ones longer by `wrong_short` < `wrong_long`.

    `correct`: function that says which are correct, such as `rewards.gsm8k:correct`; a value above 0.5 is correct, None
    is not applicable.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    function: Any = import_object(correct, Path.cwd())
    known = {"completions": completions, "completion_tokens": completion_tokens, **columns}
    names = inspect.signature(function).parameters
    values = function(**{name: value for name, value in known.items() if name in names})
    rewards: list[float | None] = []
    for value, tokens in zip(values, completion_tokens, strict=True):
        if value is None:
            rewards.append(None)
        elif len(tokens) >= max_tokens:
            rewards.append(exceeded)
        else:
            short, long = (correct_short, correct_long) if value > 0.5 else (wrong_short, wrong_long)
            rewards.append(long + 0.5 * (short - long) * (1 + math.cos(math.pi * len(tokens) / max_tokens)))
    return rewards


def budget(
    completion_tokens: Sequence[Sequence[int]], token_budget: int | Sequence[int], *, per_token: float
) -> list[float]:
    """Penalty -`per_token` |tokens - budget|, to be added to a reward of correctness. L1 (LCPO-Exact), arXiv:2503.04697
    eq. 1. `token_budget`: a number, or a column.

    >>> budget([[7] * 90, [7] * 120], 100, per_token=0.01)
    [-0.1, -0.2]
    """
    if not per_token > 0:
        raise ValueError(
            f"per_token={per_token} must be above 0: the penalty is subtracted, and below 0 it pays distance"
        )
    budgets = [token_budget] * len(completion_tokens) if isinstance(token_budget, int) else token_budget
    return [-per_token * abs(len(one) - most) for one, most in zip(completion_tokens, budgets, strict=True)]


def within_budget(
    completion_tokens: Sequence[Sequence[int]], token_budget: int | Sequence[int], *, slack_tokens: int
) -> list[float]:
    """Penalty of tokens beyond a budget only: 0 up to it, then a line down to -1 at `slack_tokens` more.

    >>> within_budget([[7] * 90, [7] * 105, [7] * 130], 100, slack_tokens=20)
    [0.0, -0.25, -1.0]
    """
    if slack_tokens < 1:
        raise ValueError(
            f"slack_tokens={slack_tokens} must be at least 1: the line goes down to -1 over so many tokens"
        )
    budgets = [token_budget] * len(completion_tokens) if isinstance(token_budget, int) else token_budget
    over = [max(len(one) - most, 0) / slack_tokens for one, most in zip(completion_tokens, budgets, strict=True)]
    return [-min(share, 1.0) if share else 0.0 for share in over]
