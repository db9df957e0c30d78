"""Scoring of all samples of a step by one reward function within a single timeout, with retries of single samples."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from posttrain.reward.call import CallError, CallResult

MAX_ALONE = 64
"""Maximum number of samples that are scored individually at the same time."""
PATIENCE_S = 0.02
"""Seconds to wait for an individual call before another one is started beside it."""


@runtime_checkable
class Caller(Protocol):
    """Interface of a reward function that is called in a child process or a thread."""

    async def prepare(self) -> None: ...

    async def call(self, keywords: Mapping[str, Any], loggers: Sequence[str], count: int) -> CallResult: ...

    def finish(self, *, strange: bool) -> None: ...

    def close(self) -> None: ...


class Failure(NamedTuple):
    """Error or timeout of a sample."""

    kind: Literal["error", "timeout"]
    message: str


class RewardScores(NamedTuple):
    """Values and failures of one reward function over the samples of a step."""

    values: Sequence[float]
    """Value per sample. NaN: not applicable or failed."""
    failures: Mapping[int, Failure]
    """Failure by sample."""
    metrics: Mapping[str, Sequence[float]] = {}
    extras: Mapping[str, Sequence[Any]] = {}
    note: str | None = None
    """Reason for scoring samples individually although none failed."""


Keywords = Callable[[Sequence[int]], Mapping[str, Any]]
"""Keyword arguments of a call for the samples with these numbers."""


class Scoring:
    """One reward function over all samples of a step.

    The first call gets all samples. If it fails, or takes more than half of `timeout_s`, each sample is scored
    individually, several at a time, so that only failing samples have no value. After `timeout_s` every running call is
    killed. Logs of individual calls are dropped.
    """

    def __init__(self, caller: Caller, keywords: Keywords, loggers: Sequence[str], count: int, timeout_s: float):
        self._caller, self._keywords, self._loggers, self._count = caller, keywords, loggers, count
        self._timeout_s = timeout_s
        self._values = [math.nan] * count
        self._failures: dict[int, Failure] = {}

    async def run(self, spent_s: float = 0.0) -> RewardScores:
        """Score all samples. `spent_s`: part of the time-out that has passed already."""
        await self._caller.prepare()
        start = time.monotonic()
        left = self._timeout_s - spent_s
        end = start + left
        whole = asyncio.ensure_future(self._call(range(self._count)))
        tasks: set[asyncio.Future[Any]] = {whole}
        try:
            await asyncio.wait(tasks, timeout=left / (1 if self._count == 1 else 2))
            if not _succeeded(whole) and self._count > 1:
                # An individual sample should take no longer than the failed call of all samples.
                failed_after = time.monotonic() - start if whole.done() else 0.0
                tasks.add(asyncio.ensure_future(self._each_alone(end, failed_after)))
                await self._first(whole, tasks)
            elif not whole.done():
                self._failures[0] = self._timeout()
            elif not _succeeded(whole):
                self._failures[0] = Failure("error", str(whole.exception()))
        finally:
            await _cancel(tasks)
            self._caller.finish(strange=len(tasks) > 1)
        note = self._note(whole, time.monotonic() - start) if len(tasks) > 1 else None
        if not _succeeded(whole):
            return RewardScores(self._values, self._failures, note=None if self._failures else note)
        result = whole.result()
        failures = {index: Failure("error", message) for index, message in result.errors.items()}
        return RewardScores(result.values, failures, result.metrics, result.extras, note)

    async def _first(self, whole: asyncio.Future[CallResult], tasks: set[asyncio.Future[Any]]) -> None:
        """Wait until the call of all samples succeeds or all individual calls return; the latter end by the
        deadline."""
        running = tasks
        while running and not _succeeded(whole):
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if done != {whole}:
                break
        for task in tasks - {whole}:
            if task.done():
                task.result()

    async def _call(self, indexes: Sequence[int]) -> CallResult:
        return await self._caller.call(self._keywords(indexes), self._loggers, len(indexes))

    async def _each_alone(self, end: float, failed_after: float) -> None:
        """Score samples individually, one at a time at first; double the number whenever calls do not return soon."""
        remaining = end - time.monotonic()
        limit = remaining / math.ceil(self._count / MAX_ALONE)
        patience = min(max(failed_after, PATIENCE_S), remaining / 20)
        waiting, slots = deque(range(self._count)), 1
        running: set[asyncio.Task[None]] = set()
        try:
            while waiting or running:
                while waiting and len(running) < slots:
                    running.add(asyncio.create_task(self._alone(waiting.popleft(), end, limit)))
                done, running = await asyncio.wait(running, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if not done:
                    slots = min(2 * slots, MAX_ALONE)
        finally:
            await _cancel(running)

    async def _alone(self, index: int, end: float, limit: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, min(limit, end - time.monotonic()))):
                result = await self._call([index])
        except TimeoutError:
            self._failures[index] = self._timeout()
        except CallError as error:
            self._failures[index] = Failure("error", str(error))
        else:
            self._values[index] = result.values[0]
            if result.errors:
                self._failures[index] = Failure("error", result.errors[0])

    def _timeout(self) -> Failure:
        return Failure("timeout", f"no answer within {self._timeout_s:g} s")

    def _note(self, whole: asyncio.Future[CallResult], took: float) -> str:
        if whole.done() and not whole.cancelled() and whole.exception() is not None:
            return f"the call on all {self._count} samples failed, each alone did not: {whole.exception()}"
        return (
            f"took {took:.2g} s; a call that takes more than half of timeout_s={self._timeout_s:g} is also made for "
            "each sample alone: raise timeout_s"
        )


def _succeeded(call: asyncio.Future[CallResult]) -> bool:
    """Tell whether a call succeeded. Raises exceptions that are not the function's failure."""
    if not call.done() or call.cancelled():
        return False
    error = call.exception()
    if error is not None and not isinstance(error, CallError):
        raise error
    return error is None


async def _cancel(tasks: set[asyncio.Future[Any]] | set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
