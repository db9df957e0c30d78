"""Reward functions: any callable that takes the keywords it names; several are weighted and summed."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from posttrain.data.chat import Message
from posttrain.errors import ConfigError, did_you_mean
from posttrain.rl.types import Group, RewardError, RewardFunction, Rewards, Trajectory
from posttrain.tracking.console import cut
from posttrain.user_code import describe_error

PROVIDED = ("prompts", "completions", "completion_tokens", "completion_ids", "trajectories", "log_metric", "log_extra")
"""Keywords that every reward function may name; `completion_ids` is what other frameworks call `completion_tokens`."""

SHOWN_CELLS = 80
"""Of a sample in an error."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A function with its weight; `args` are more keyword arguments, `timeout_s` bounds one call."""

    function: RewardFunction
    weight: float
    args: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


def missing_arguments(reward: Reward, columns: Sequence[str]) -> list[str]:
    """One line for each required parameter that neither the framework, nor `args`, nor a dataset column provides."""
    known = [*PROVIDED, *reward.args, *columns]
    parameters = inspect.signature(reward.function).parameters
    lines = []
    for name, p in parameters.items():
        if p.kind is p.POSITIONAL_ONLY:
            lines.append(f"reward {reward.name}: parameter {name!r} is positional-only; arguments are passed by name")
        elif p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.default is p.empty and name not in known:
            near = did_you_mean(name, known)
            lines.append(f"reward {reward.name}: no column {name!r} in the dataset ({', '.join(columns)}){near}")
    return lines + [
        f"reward {reward.name}: it takes no argument {name!r}, which rewards.args gives"
        for name in reward.args
        if name not in parameters and not _takes_any(parameters)
    ]


class Rubric:
    """Scores groups with all functions: with none of them, as where only a teacher speaks, every total is 0.

    Raises when a function breaks its contract or fails on every sample.
    """

    def __init__(self, rewards: Sequence[Reward]):
        names = [reward.name for reward in rewards]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"rewards: the function name {repeated[0]!r} stands twice; metrics need distinct names")
        self.rewards = tuple(rewards)

    async def score(self, groups_P: Sequence[Group], advance: Callable[[int], None] | None = None) -> Rewards:
        """`advance(1)` is called for each function that is done."""
        group_size = len(groups_P[0])
        samples = [trajectory for group in groups_P for trajectory in group]
        calls = [_Call(reward, samples, group_size) for reward in self.rewards]
        await asyncio.gather(*(call.run(advance) for call in calls))
        shape = (len(groups_P), group_size)
        parts = {call.reward.name: np.asarray(call.values, np.float32).reshape(shape) for call in calls}
        errors = [error for call in calls for error in call.errors]
        total = _weighted_sum(self.rewards, parts, shape)
        for error in errors:
            total[error.prompt, error.sample] = np.nan
        metrics = {
            f"rewards/{call.reward.name}/{name}": float(np.mean(values))
            for call in calls
            for name, values in call.metrics.items()
        }
        extras = {name: values for call in calls for name, values in call.extras.items()}
        return Rewards(total_PG=total, parts_PG=parts, errors=errors, metrics=metrics, extras=extras)


def _weighted_sum(rewards: Sequence[Reward], parts: Mapping[str, np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Sum over the functions that apply; NaN where none does."""
    if not rewards:
        return np.zeros(shape, np.float32)
    stacked = np.stack([parts[r.name] * np.float32(r.weight) for r in rewards])
    return np.where(np.isnan(stacked).all(axis=0), np.nan, np.nansum(stacked, axis=0)).astype(np.float32)


def error_lines(rewards: Rewards, groups_P: Sequence[Group]) -> list[str]:
    """One line for each function that failed: on how many samples, and the first error with its sample."""
    count = sum(map(len, groups_P))
    lines = []
    for name in dict.fromkeys(error.function for error in rewards.errors):
        errors = [error for error in rewards.errors if error.function == name]
        first = min(errors, key=lambda error: (error.prompt, error.sample))
        text = groups_P[first.prompt][first.sample].text
        lines.append(
            f"reward {name}: no value for {len(errors)} of {count} samples; the first, {first.kind}: {first.error}; "
            f"sample {first.sample} of prompt {first.prompt}: {cut(repr(text), SHOWN_CELLS)}"
        )
    return lines


class _DeadlineError(Exception):
    """Ours, and so told apart from a TimeoutError that a function raises itself."""


class _ExitError(Exception):
    """A function called `sys.exit`, which would end the thread or the loop that waits for it."""


class _Call:
    """One function over all samples of a step."""

    def __init__(self, reward: Reward, samples: Sequence[Trajectory], group_size: int):
        self.reward = reward
        self.samples = samples
        self.group_size = group_size
        self.values: list[float] = []
        self.errors: list[RewardError] = []
        self.metrics: dict[str, list[float]] = {}
        self.extras: dict[str, list[Any]] = {}

    async def run(self, advance: Callable[[int], None] | None) -> None:
        try:
            self.values = await self._values(self.samples)
        except ConfigError:
            raise
        except Exception:
            await self._one_by_one()
        if len(self.errors) == len(self.samples):
            first = self.errors[0]
            raise ConfigError(
                f"reward {self.reward.name}: failed on every sample; the first {first.kind}: {first.error}"
            )
        if advance is not None:
            advance(1)

    async def _one_by_one(self) -> None:
        """After a failure each sample is scored alone, side by side: only those that cause it lose their reward.

        What the functions logged is dropped, since it would be in another order than the samples.
        """
        self.values = [value for (value,) in await asyncio.gather(*map(self._alone, range(len(self.samples))))]
        self.metrics.clear()
        self.extras.clear()

    async def _alone(self, index: int) -> list[float]:
        try:
            return await self._values([self.samples[index]])
        except ConfigError:
            raise
        except _DeadlineError:
            self._fail(index, "timeout", f"no answer within {self.reward.timeout_s:g} s")
        except Exception as error:
            self._fail(index, "error", str(error) if isinstance(error, _ExitError) else describe_error(error))
        return [math.nan]

    def _fail(self, index: int, kind: Literal["error", "timeout"], message: str) -> None:
        prompt, sample = divmod(index, self.group_size)
        self.errors.append(
            RewardError(function=self.reward.name, prompt=prompt, sample=sample, kind=kind, error=message)
        )

    async def _values(self, samples: Sequence[Trajectory]) -> list[float]:
        function, keywords = self.reward.function, self._keywords(samples)
        if inspect.iscoroutinefunction(function):
            call: asyncio.Future[Any] = asyncio.ensure_future(_awaited(function, keywords))
        else:
            call = _in_daemon_thread(function, keywords)
        done, _ = await asyncio.wait([call], timeout=self.reward.timeout_s)
        if not done:
            call.cancel()
            raise _DeadlineError
        result = call.result()
        return _checked(self.reward.name, result, len(samples))

    def _keywords(self, samples: Sequence[Trajectory]) -> dict[str, Any]:
        rows = [s.example.row for s in samples]
        columns = {name: [row[name] for row in rows] for name in rows[0] if all(name in row for row in rows)}
        tokens = [s.completion_tokens for s in samples]
        provided = {
            "prompts": [_prompt(s) for s in samples],
            "completions": [s.text if s.example.plain else [_turn(s)] for s in samples],
            "completion_tokens": tokens,
            "completion_ids": tokens,
            "trajectories": list(samples),
            "log_metric": lambda name, value: self.metrics.setdefault(name, []).append(float(value)),
            "log_extra": lambda name, values: self.extras.setdefault(name, []).extend(values),
        }
        keywords = {**columns, **provided, **self.reward.args}
        parameters = inspect.signature(self.reward.function).parameters
        return keywords if _takes_any(parameters) else {k: v for k, v in keywords.items() if k in parameters}


async def _awaited(function: RewardFunction, keywords: Mapping[str, Any]) -> Any:
    try:
        return await function(**keywords)
    except SystemExit as error:
        raise _ExitError(describe_error(error)) from error


def _in_daemon_thread(function: RewardFunction, keywords: Mapping[str, Any]) -> asyncio.Future[Any]:
    """Like `asyncio.to_thread`, but a function that never returns does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def work() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = (function(**keywords), None)
        except SystemExit as error:
            outcome = (None, _ExitError(describe_error(error)))
        except Exception as error:
            outcome = (None, error)
        # After a time-out the loop may be gone; nobody waits for this answer any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, daemon=True, name=f"reward {getattr(function, '__name__', '')}").start()
    return future


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _prompt(sample: Trajectory) -> Any:
    return sample.example.messages[-1]["content"] if sample.example.plain else list(sample.example.messages)


def _turn(sample: Trajectory) -> Message:
    return {"role": "assistant", "content": sample.text}


def _checked(name: str, result: Any, count: int) -> list[float]:
    """The function's answer as floats, None as NaN; ConfigError when it is not one number or None per sample."""
    if isinstance(result, (str, bytes)) or not hasattr(result, "__len__"):
        raise ConfigError(f"reward {name}: must return a list of {count} numbers or None, got {type(result).__name__}")
    if len(result) != count:
        raise ConfigError(f"reward {name}: must return one value per completion, got {len(result)} for {count}")
    values = []
    for value in result:
        if value is None:
            values.append(math.nan)
            continue
        scalar = value.item() if hasattr(value, "item") else value
        if not isinstance(scalar, numbers.Real) or not math.isfinite(scalar):
            raise ConfigError(f"reward {name}: each value must be a finite number or None, got {value!r}")
        values.append(float(scalar))
    return values
