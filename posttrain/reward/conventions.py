"""Calling conventions of reward functions, told apart by their parameters: lists (TRL, Tunix) or one sample at a time
(verl, verifiers)."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from posttrain.user_code import number_of


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
    found = [number_of(value) for value in column if value is not None]
    if None in found:
        log_extra(name, column)
        return
    for number in found:
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
