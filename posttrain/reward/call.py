"""One call of a reward function: its calling convention, told apart by its parameters, lists (TRL, Tunix) or one sample
at a time (verl, verifiers), and its values, checked. Child processes import this, and no JAX."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

from posttrain.user_code import describe_error, number_of

LOGGERS = ("log_metric", "log_extra")
"""Keywords created in the process or thread that runs the function: they write into the call's result."""


class CallError(Exception):
    """Call without usable values; the message is one line."""


class Failure(NamedTuple):
    """Error or timeout of a sample."""

    kind: Literal["error", "timeout"]
    message: str


class Scores(NamedTuple):
    """Values of one reward function for some samples, with its failures. Plain values only, so that they can be sent
    between processes."""

    values: Sequence[float]
    """Value per sample. NaN: not applicable or failed."""
    failures: Mapping[int, Failure] = {}
    """Failure by sample."""
    metrics: Mapping[str, Sequence[tuple[float, int]]] = {}
    """Means of what was given to `log_metric`, call by call, each with its number of samples."""
    extras: Mapping[str, Sequence[Any]] = {}
    """Values given to `log_extra`, one per sample; None for those of calls without."""
    notes: Sequence[str] = ()
    """Reasons for scoring samples individually although none failed."""

    def to_json(self) -> list[Any]:
        """Lists and mappings of plain values of a single call, as `from_json` reads them."""
        failures = [(index, failure.message) for index, failure in self.failures.items()]
        return [self.values, failures, {name: mean for name, ((mean, _),) in self.metrics.items()}, self.extras]

    @classmethod
    def from_json(cls, sent: Any, count: int) -> Scores:
        """Scores of `count` samples from `to_json`. Raises ValueError, TypeError or AttributeError for anything else:
        model code in the same process may have written it."""
        values, failures, metrics, extras = sent
        plain = (str, int, float, bool, type(None))
        right = len(values) == count and all(type(value) in (int, float) for value in values)
        right = right and all(type(at) is int and 0 <= at < count and type(text) is str for at, text in failures)
        right = right and all(type(mean) in (int, float) for mean in metrics.values())
        right = right and all(len(column) == count for column in extras.values())
        if not (right and all(type(value) in plain for column in extras.values() for value in column)):
            raise ValueError("no scores of a call")
        means = {name: [(float(mean), count)] for name, mean in metrics.items()}
        return cls([*map(float, values)], {at: Failure("error", text) for at, text in failures}, means, extras)

    def part(self, first: int, count: int) -> Scores:
        """Scores of `count` samples from the first on, with the metrics of all."""
        end = first + count
        return Scores(
            self.values[first:end],
            {index - first: failure for index, failure in self.failures.items() if first <= index < end},
            {name: [(mean, count) for mean, _ in means] for name, means in self.metrics.items()},
            {name: column[first:end] for name, column in self.extras.items()},
            self.notes,
        )

    @classmethod
    def concatenated(cls, parts: Sequence[Scores]) -> Scores:
        """Scores of the samples of several calls, in this order."""
        names = dict.fromkeys(name for part in parts for name in part.extras)
        values: list[float] = []
        failures: dict[int, Failure] = {}
        metrics: dict[str, list[tuple[float, int]]] = {}
        for part in parts:
            failures |= {len(values) + index: failure for index, failure in part.failures.items()}
            values += part.values
            for name, means in part.metrics.items():
                metrics.setdefault(name, []).extend(means)
        extras = {
            name: [value for part in parts for value in part.extras.get(name, [None] * len(part.values))]
            for name in names
        }
        notes = list(dict.fromkeys(note for part in parts for note in part.notes))
        return cls(values, failures, metrics, extras, notes)


class Convention(Enum):
    """Calling convention of a reward function."""

    LISTS = "lists"
    """One call on all samples: `f(prompts, completions, **columns) -> list`, as in TRL and Tunix."""
    VERL = "verl"
    """One call per sample: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, which returns a
    number, or a dict with `score` whose other entries become metrics."""
    VERIFIERS = "verifiers"
    """One call per sample: `f(prompt, completion, answer, state, info, task)`, any of them, which returns a number."""

    def provided(self, columns: Sequence[str]) -> list[str]:
        """Parameters that are provided besides columns of the dataset."""
        if self is Convention.VERIFIERS:
            return ["prompt", "completion", "answer", "info", "task", "state"]
        nested = ["ground_truth"] if "reward_model" in columns else []
        return ["solution_str", "extra_info", *nested]


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """State of the trainer for functions written for TRL."""

    global_step: int


def convention_of(function: Callable[..., Any]) -> Convention:
    """Calling convention by parameter names."""
    names = inspect.signature(function).parameters.keys()
    if "solution_str" in names:
        return Convention.VERL
    lists = {"completions", "prompts", "completion_ids", "completion_tokens", "trajectories"} & names
    return Convention.VERIFIERS if {"completion", "state"} & names and not lists else Convention.LISTS


def annotates_text(function: Callable[..., Any]) -> bool:
    """Tell whether the annotation of `completions` is a list or sequence of strings."""
    parameter = inspect.signature(function).parameters.get("completions")
    if parameter is None or parameter.annotation is parameter.empty:
        return False
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else str(annotation)
    return text.rpartition(".")[2].lower() in ("list[str]", "sequence[str]", "iterable[str]")


def call_rows(
    function: Callable[..., Any],
    rows: Sequence[Mapping[str, Any]],
    args: Mapping[str, Any],
    wait: Callable[[Awaitable[Any]], Any],
    log: tuple[Callable[[str, Any], None], Callable[[str, Sequence[Any]], None]],
) -> list[Any]:
    """Call a function for each sample; an exception is the value of its sample. Entries of returned dicts besides
    `score` are logged, numbers as metrics and text as columns. `wait` runs an awaitable, all of them together."""
    results: list[Any] = []
    for row in rows:
        try:
            results.append(function(**{**row, **args}))
        except (Exception, SystemExit) as error:
            results.append(error)
    awaited = [result for result in results if inspect.isawaitable(result)]
    if awaited:
        done = iter(wait(_all(awaited)))
        results = [next(done) if inspect.isawaitable(result) else result for result in results]
    log_metric, log_extra = log
    for name in dict.fromkeys(name for result in results if isinstance(result, Mapping) for name in result):
        if name != "score":
            column = [result.get(name) if isinstance(result, Mapping) else None for result in results]
            _log_column(name, column, log_metric, log_extra)
    return list(_scores(results))


async def _all(awaited: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaited, return_exceptions=True)


def _log_column(
    name: str,
    column: Sequence[Any],
    log_metric: Callable[[str, Any], None],
    log_extra: Callable[[str, Sequence[Any]], None],
) -> None:
    numbers = [number_of(value) for value in column if value is not None]
    if None in numbers:
        log_extra(name, column)
        return
    for number in numbers:
        if number is not None and math.isfinite(number):
            log_metric(name, number)


def _scores(results: Sequence[Any]) -> Iterator[Any]:
    for result in results:
        if not isinstance(result, Mapping):
            yield result
        elif "score" in result:
            yield result["score"]
        else:
            yield KeyError(f"a returned dict needs the entry 'score'; it has {', '.join(map(str, result))}")


def call_reward(
    function: Callable[..., Any],
    keywords: Mapping[str, Any],
    loggers: Sequence[str],
    count: int,
    wait: Callable[[Awaitable[Any]], Any],
) -> Scores:
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
        scores = check_values(result, count)
    except (Exception, SystemExit) as error:
        raise error if isinstance(error, CallError) else CallError(describe_error(error)) from error
    for name, column in extras.items():
        if len(column) != count:
            raise CallError(
                f"log_extra({name!r}) must be given one value per completion, got {len(column)} for {count}"
            )
    means = {name: [(sum(logged) / len(logged), count)] for name, logged in metrics.items()}
    # Copies: an abandoned thread of the function may still write.
    return scores._replace(metrics=means, extras={name: list(column) for name, column in extras.items()})


def check_values(result: Any, count: int) -> Scores:
    """Scores of returned values as floats, None as NaN; a value that is no finite number is an error of its sample.

    An exception in place of a value (from `asyncio.gather(..., return_exceptions=True)`) is an error of its
    sample. Raises CallError unless there is one value per sample.
    """
    listed = hasattr(result, "__len__") and getattr(result, "shape", (count,)) != ()
    if isinstance(result, (str, bytes, Mapping)) or not listed:
        raise CallError(f"must return a list of {count} numbers or None, got {type(result).__name__}")
    if len(result) != count:
        raise CallError(f"must return one value per completion, got {len(result)} for {count}")
    values: list[float] = []
    failures: dict[int, Failure] = {}
    for index, value in enumerate(result):
        number = number_of(value)
        is_finite = number is not None and math.isfinite(number)
        values.append(number if number is not None and is_finite else math.nan)
        if value is not None and not is_finite:
            wrong = f"a value must be a finite number or None, got {value!r}"
            message = describe_error(value) if isinstance(value, BaseException) else wrong
            failures[index] = Failure("error", message)
    return Scores(values, failures)


def _plain(value: Any) -> Any:
    """Convert a value for the samples table: numbers and text are kept, everything else becomes text."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    number = number_of(value)
    return str(value) if number is None else number
