"""Scoring of groups as they end, by one reward function: calls on those that have come, within a single timeout, with
retries of single samples."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.reward.call import CallError, Failure, Scores
from posttrain.reward.caller import Caller
from posttrain.reward.function import Keywords, Reward, RewardCache
from posttrain.rollout.trajectory import Group, Trajectory

MAX_ALONE = 64
"""Maximum number of samples that are scored individually at the same time."""
PATIENCE_S = 0.02
"""Seconds to wait for an individual call before another one is started beside it."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Samples of a group within a call."""

    call: asyncio.Task[Scores]
    first: int
    count: int


class RewardStream:
    """One reward function over groups that are added as they end.

    The first group is scored at once; the next call gets all groups that have come in the meantime, so that one worker
    is enough. A call that takes more than half of its time-out no longer holds up the next one, and once the scores of
    a group are awaited, its call starts within a quarter of the time-out: `timeout_s` after that it is over.
    """

    def __init__(self, reward: Reward, keywords: Keywords, caller: Caller, cache: RewardCache | None):
        assert reward.timeout_s is not None
        self._timeout_s = reward.timeout_s
        self._keywords, self._caller, self._cache = keywords, caller, cache
        self._waiting: list[tuple[Group, int, asyncio.Future[_Place]]] = []
        self._places: dict[int, asyncio.Future[_Place]] = {}
        self._calls: set[asyncio.Task[Scores]] = set()
        self._came, self._urgent = asyncio.Event(), asyncio.Event()
        self._awaited_at = math.inf
        self._starting = asyncio.ensure_future(self._start_calls())

    def add(self, group: Group, step: int) -> None:
        """Hand over a finished group of a step."""
        place = self._places[id(group)] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, step, place))
        self._came.set()

    async def result(self, groups_P: Sequence[Group]) -> Scores:
        """Wait for the scores of these groups, which have been added; in this order, and once."""
        if any(id(group) in (id(one) for one, _, _ in self._waiting) for group in groups_P):
            self._awaited_at = min(self._awaited_at, time.monotonic())
            self._urgent.set()
        places = [await self._places.pop(id(group)) for group in groups_P]
        scores = {place.call: await asyncio.shield(place.call) for place in places}
        return Scores.concatenated([scores[place.call].part(place.first, place.count) for place in places])

    async def close(self) -> None:
        """Cancel what is still running."""
        tasks: list[asyncio.Future[Any]] = [self._starting, *self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_calls(self) -> None:
        while True:
            await self._came.wait()
            call = self._start()
            await _first_of(self._timeout_s / 2, call, self._urgent)
            if self._urgent.is_set():
                await _first_of(self._timeout_s / 4, call)

    def _start(self) -> asyncio.Task[Scores]:
        added, self._waiting = self._waiting, []
        spent_s = max(0.0, time.monotonic() - self._awaited_at)
        self._awaited_at = math.inf
        self._came.clear()
        self._urgent.clear()
        samples = [sample for group, _, _ in added for sample in group]
        call = asyncio.get_running_loop().create_task(self._scored(samples, max(step for _, step, _ in added), spent_s))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        first = 0
        for group, _, place in added:
            if not place.done():
                place.set_result(_Place(call=call, first=first, count=len(group)))
            first += len(group)
        return call

    async def _scored(self, samples: Sequence[Trajectory], step: int, spent_s: float) -> Scores:
        if self._cache is None:
            return await self._call(samples, step, spent_s)
        keys = [self._cache.key(sample) for sample in samples]
        known = {key: value for key in dict.fromkeys(keys) if (value := self._cache.get(key)) is not None}
        first: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            if key not in known:
                first.setdefault(key, index)
        new = list(first)
        misses = [samples[index] for index in first.values()]
        scores = await self._call(misses, step, spent_s) if misses else Scores([])
        failed = {new[index]: failure for index, failure in scores.failures.items()}
        for key, value in zip(new, scores.values, strict=True):
            if key not in failed:
                self._cache.put(key, value)
        values = known | dict(zip(new, scores.values, strict=True))
        failures = {index: failed[key] for index, key in enumerate(keys) if key in failed}
        hits = [float(index != first.get(key)) for index, key in enumerate(keys)]
        hit_ratio = sum(hits) / len(hits)
        return Scores([values[key] for key in keys], failures, {"cache_hits": [(hit_ratio, len(keys))]})

    async def _call(self, samples: Sequence[Trajectory], step: int, spent_s: float) -> Scores:
        def keywords(indexes: Sequence[int]) -> Mapping[str, Any]:
            return self._keywords([samples[index] for index in indexes], step)

        return await Scoring(self._caller, keywords, self._keywords.loggers, len(samples), self._timeout_s).run(spent_s)


async def _first_of(timeout_s: float, call: asyncio.Task[Any], event: asyncio.Event | None = None) -> None:
    """Wait for a call or an event; neither fails nor is cancelled by this."""
    waiter = [] if event is None else [asyncio.ensure_future(event.wait())]
    try:
        await asyncio.wait({call, *waiter}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiter:
            one.cancel()


class Scoring:
    """One reward function over all samples of a step.

    The first call gets all samples. If it fails, or takes more than half of `timeout_s`, each sample is scored
    individually, several at a time, so that only failing samples have no value. After `timeout_s` every running call is
    killed. Logs of individual calls are dropped. `keywords`: arguments of a call for the samples with these numbers.
    """

    def __init__(
        self,
        caller: Caller,
        keywords: Callable[[Sequence[int]], Mapping[str, Any]],
        loggers: Sequence[str],
        count: int,
        timeout_s: float,
    ):
        self._caller, self._keywords, self._loggers, self._count = caller, keywords, loggers, count
        self._timeout_s = timeout_s
        self._values = [math.nan] * count
        self._failures: dict[int, Failure] = {}

    async def run(self, spent_s: float = 0.0) -> Scores:
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
        notes = [self._note(whole, time.monotonic() - start)] if len(tasks) > 1 else []
        if not _succeeded(whole):
            return Scores(self._values, self._failures, notes=[] if self._failures else notes)
        return whole.result()._replace(notes=notes)

    async def _first(self, whole: asyncio.Future[Scores], tasks: set[asyncio.Future[Any]]) -> None:
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

    async def _call(self, indexes: Sequence[int]) -> Scores:
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
                alone = await self._call([index])
        except TimeoutError:
            self._failures[index] = self._timeout()
        except CallError as error:
            self._failures[index] = Failure("error", str(error))
        else:
            self._values[index] = alone.values[0]
            if alone.failures:
                self._failures[index] = alone.failures[0]

    def _timeout(self) -> Failure:
        return Failure("timeout", f"no answer within {self._timeout_s:g} s")

    def _note(self, whole: asyncio.Future[Scores], took: float) -> str:
        if whole.done() and not whole.cancelled() and whole.exception() is not None:
            return f"the call on all {self._count} samples failed, each alone did not: {whole.exception()}"
        return (
            f"took {took:.2g} s; a call that takes more than half of timeout_s={self._timeout_s:g} is also made for "
            "each sample alone: raise timeout_s"
        )


def _succeeded(call: asyncio.Future[Scores]) -> bool:
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
