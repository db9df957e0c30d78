"""A single call of a reward function: keyword arguments in, one validated value per sample out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.reward.conventions import Convention, call_rows, convention_of
from posttrain.user_code import describe_error, number_of

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

    def to_json(self) -> list[Any]:
        """Lists and mappings of plain values, as `result_of` reads them."""
        return [self.values, [*self.errors.items()], self.metrics, self.extras]


def result_of(made: Any, count: int) -> CallResult:
    """Result for `count` samples from `CallResult.to_json`. Raises ValueError, TypeError or AttributeError for anything
    else: model code in the same process may have written it."""
    values, errors, metrics, extras = made
    plain = (str, int, float, bool, type(None))
    right = len(values) == count and all(type(value) in (int, float) for value in values)
    right = right and all(type(at) is int and 0 <= at < count and type(text) is str for at, text in errors)
    right = right and all(type(value) in (int, float) for column in metrics.values() for value in column)
    right = right and all(len(column) == count for column in extras.values())
    if not (right and all(type(value) in plain for column in extras.values() for value in column)):
        raise ValueError("no result of a call")
    numbers = {name: [*map(float, column)] for name, column in metrics.items()}
    return CallResult([*map(float, values)], dict(errors), numbers, extras)


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
    listed = hasattr(result, "__len__") and getattr(result, "shape", (count,)) != ()
    if isinstance(result, (str, bytes, Mapping)) or not listed:
        raise CallError(f"must return a list of {count} numbers or None, got {type(result).__name__}")
    if len(result) != count:
        raise CallError(f"must return one value per completion, got {len(result)} for {count}")
    values: list[float] = []
    errors: dict[int, str] = {}
    for index, value in enumerate(result):
        number = number_of(value)
        is_finite = number is not None and math.isfinite(number)
        values.append(number if number is not None and is_finite else math.nan)
        if value is not None and not is_finite:
            errors[index] = (
                describe_error(value)
                if isinstance(value, BaseException)
                else f"a value must be a finite number or None, got {value!r}"
            )
    return values, errors


def _plain(value: Any) -> Any:
    """Convert a value for the samples table: numbers and text are kept, everything else becomes text."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    number = number_of(value)
    return str(value) if number is None else number
