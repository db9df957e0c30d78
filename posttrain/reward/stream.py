"""Scoring of groups as they end: one reward function over the groups of a step, which arrive one by one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.metrics import merge
from posttrain.reward.cache import RewardCache
from posttrain.reward.function import Keywords, Reward
from posttrain.reward.scoring import Caller, Failure, RewardScores, Scoring
from posttrain.rollout.trajectory import Group, Trajectory
from posttrain.tree import Mean


@dataclass(frozen=True, kw_only=True)
class GroupScores:
    """Values and failures of one reward function over some groups, sample by sample."""

    values: Sequence[float]
    """Value per sample. NaN: not applicable or failed."""
    failures: Mapping[int, Failure]
    metrics: Mapping[str, Mean]
    extras: Mapping[str, Sequence[Any]]
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Samples of a group within a call."""

    call: asyncio.Task[RewardScores]
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
        self._calls: set[asyncio.Task[RewardScores]] = set()
        self._came, self._urgent = asyncio.Event(), asyncio.Event()
        self._awaited_at = math.inf
        self._starting = asyncio.ensure_future(self._start_calls())

    def add(self, group: Group, step: int) -> None:
        """Hand over a finished group of a step."""
        place = self._places[id(group)] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, step, place))
        self._came.set()

    async def result(self, groups_P: Sequence[Group]) -> GroupScores:
        """Wait for the scores of these groups, which have been added; in this order, and once."""
        if any(id(group) in (id(one) for one, _, _ in self._waiting) for group in groups_P):
            self._awaited_at = min(self._awaited_at, time.monotonic())
            self._urgent.set()
        places = [await self._places.pop(id(group)) for group in groups_P]
        scores = {place.call: await asyncio.shield(place.call) for place in places}
        return _joined([(scores[place.call], place.first, place.count) for place in places])

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

    def _start(self) -> asyncio.Task[RewardScores]:
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

    async def _scored(self, samples: Sequence[Trajectory], step: int, spent_s: float) -> RewardScores:
        if self._cache is None:
            return await self._call(samples, step, spent_s)
        keys = [self._cache.key(sample) for sample in samples]
        known = {key: value for key in dict.fromkeys(keys) if (value := self._cache.get(key)) is not None}
        first: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            if key not in known:
                first.setdefault(key, index)
        new = list(first)
        found = (
            await self._call([samples[index] for index in first.values()], step, spent_s)
            if first
            else RewardScores([], {})
        )
        failed = {new[index]: failure for index, failure in found.failures.items()}
        for key, value in zip(new, found.values, strict=True):
            if key not in failed:
                self._cache.put(key, value)
        values = known | dict(zip(new, found.values, strict=True))
        failures = {index: failed[key] for index, key in enumerate(keys) if key in failed}
        hits = [float(index != first.get(key)) for index, key in enumerate(keys)]
        return RewardScores([values[key] for key in keys], failures, {"cache_hits": [sum(hits) / len(hits)]})

    async def _call(self, samples: Sequence[Trajectory], step: int, spent_s: float) -> RewardScores:
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


def whole(scores: RewardScores) -> GroupScores:
    """Scores of a single call over all groups."""
    return _joined([(scores, 0, len(scores.values))])


def _joined(places: Sequence[tuple[RewardScores, int, int]]) -> GroupScores:
    """Scores at `places`: call, first sample and number of samples. Metrics are means over all samples."""
    values: list[float] = []
    failures: dict[int, Failure] = {}
    names = dict.fromkeys(name for call, _, _ in places for name in call.extras)
    extras: dict[str, list[Any]] = {name: [] for name in names}
    metrics: dict[str, Mean] = {}
    for call, first, count in places:
        for index in range(first, first + count):
            if index in call.failures:
                failures[len(values)] = call.failures[index]
            values.append(call.values[index])
            for name in names:
                extras[name].append(call.extras[name][index] if name in call.extras else None)
        given = call.metrics.items()
        means = {name: Mean(total=float(sum(of)) / len(of) * count, weight=float(count)) for name, of in given}
        metrics = merge(metrics, means)
    notes = list(dict.fromkeys(call.note for call, _, _ in places if call.note is not None))
    return GroupScores(values=values, failures=failures, metrics=metrics, extras=extras, notes=notes)
