"""One call of a reward function: keyword arguments in, one checked value per sample out."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.user_code import describe_error

LOGGERS = ("log_metric", "log_extra")
"""Keywords made where the function runs: they write into the result of the call."""


class CallError(Exception):
    """A call that gave no usable values; the message is one line."""


class CallResult(NamedTuple):
    """Plain values only, so that it passes from one process to another."""

    values: list[float]
    """One per sample. NaN: not applicable, or an error."""
    errors: dict[int, str]
    """By sample."""
    metrics: dict[str, list[float]]
    extras: dict[str, list[Any]]


def call_reward(
    function: Callable[..., Any],
    keywords: Mapping[str, Any],
    loggers: Sequence[str],
    count: int,
    wait: Callable[[Awaitable[Any]], Any],
) -> CallResult:
    """Call a function on `count` samples; `wait` runs what it returns if that is awaitable.

    Raises CallError where the function raises, or where its result as a whole is of the wrong type or length.
    """
    metrics: dict[str, list[float]] = {}
    extras: dict[str, list[Any]] = {}
    make = {
        "log_metric": lambda name, value: metrics.setdefault(name, []).append(float(value)),
        "log_extra": lambda name, values: extras.setdefault(name, []).extend(map(_plain, values)),
    }
    try:
        result = function(**keywords, **{name: make[name] for name in loggers})
        if inspect.isawaitable(result):
            result = wait(result)
        values, errors = check_values(result, count)
    except (Exception, SystemExit) as error:
        raise error if isinstance(error, CallError) else CallError(describe_error(error)) from error
    for name, column in extras.items():
        if len(column) != count:
            raise CallError(
                f"log_extra({name!r}) must be given one value per completion, got {len(column)} for {count}"
            )
    # Copies: a thread that the function left behind may still write.
    return CallResult(values, errors, {k: list(v) for k, v in metrics.items()}, {k: list(v) for k, v in extras.items()})


def check_values(result: Any, count: int) -> tuple[list[float], dict[int, str]]:
    """Values as floats, None as NaN, and the errors of samples whose value is no finite number.

    An exception in place of a value (as `asyncio.gather(..., return_exceptions=True)` leaves it) is an error of its
    sample. Raises CallError unless there is one value per sample.
    """
    if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__len__"):
        raise CallError(f"must return a list of {count} numbers or None, got {type(result).__name__}")
    if len(result) != count:
        raise CallError(f"must return one value per completion, got {len(result)} for {count}")
    values: list[float] = []
    errors: dict[int, str] = {}
    for index, value in enumerate(result):
        scalar = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
        if scalar is None:
            values.append(math.nan)
        elif isinstance(scalar, numbers.Real) and math.isfinite(scalar):
            values.append(float(scalar))
        else:
            values.append(math.nan)
            errors[index] = (
                describe_error(value)
                if isinstance(value, BaseException)
                else f"a value must be a finite number or None, got {value!r}"
            )
    return values, errors


def _plain(value: Any) -> Any:
    """Value of a samples table: numbers and text as they are, everything else as its text."""
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
