"""A single call of a reward function: keyword arguments in, one validated value per sample out."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.reward.conventions import Convention, call_rows, convention_of
from posttrain.user_code import describe_error

LOGGERS = ("log_metric", "log_extra")
"""Keywords created in the process or thread that runs the function: they write into the call's result."""


class CallError(Exception):
    """Call without usable values; the message is one line."""


class CallResult(NamedTuple):
    """Result of a call, of plain values only, so that it can be sent between processes."""

    values: list[float]
    """Value per sample. NaN: not applicable, or an error."""
    errors: dict[int, str]
    """Error message by sample."""
    metrics: dict[str, list[float]]
    extras: dict[str, list[Any]]


def call_reward(
    function: Callable[..., Any],
    keywords: Mapping[str, Any],
    loggers: Sequence[str],
    count: int,
    wait: Callable[[Awaitable[Any]], Any],
) -> CallResult:
    """Call a function on `count` samples; `wait` runs its result if that is awaitable.

    Raises CallError if the function raises, or if its result has the wrong type or length.
    """
    metrics: dict[str, list[float]] = {}
    extras: dict[str, list[Any]] = {}
    make = {
        "log_metric": lambda name, value: metrics.setdefault(name, []).append(float(value)),
        "log_extra": lambda name, values: extras.setdefault(name, []).extend(map(_plain, values)),
    }
    try:
        if convention_of(function) is Convention.LISTS:
            result = function(**keywords, **{name: make[name] for name in loggers})
        else:
            result = call_rows(
                function, keywords["rows"], keywords["args"], wait, (make["log_metric"], make["log_extra"])
            )
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
    # Copies: an abandoned thread of the function may still write.
    return CallResult(values, errors, {k: list(v) for k, v in metrics.items()}, {k: list(v) for k, v in extras.items()})


def check_values(result: Any, count: int) -> tuple[list[float], dict[int, str]]:
    """Convert values to floats (None to NaN) and collect the errors of samples whose value is not a finite number.

    An exception in place of a value (from `asyncio.gather(..., return_exceptions=True)`) is an error of its
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
    """Convert a value for the samples table: numbers and text are kept, everything else becomes text."""
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
