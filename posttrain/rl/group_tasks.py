"""Groups under way: sampled and scored by tasks of one event loop, those of several steps side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.errors import RunError
from posttrain.reward.rubric import Rubric
from posttrain.reward.types import Rewards
from posttrain.rl.journal import Journal
from posttrain.rl.rounds import Rounds
from posttrain.rl.sampler import IssuedGroup, Sampler, collect
from posttrain.rollout.trajectory import Group
from posttrain.rollout.types import PausableEngine


@dataclass(frozen=True, kw_only=True)
class QueuedGroup:
    """Group between its beginning and its step."""

    issued: IssuedGroup
    group: Group | None
    """None: not all of its samples are there."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Groups that are ahead, in the order of their numbers, and the rewards of steps that are scored, by step."""

    groups: Sequence[QueuedGroup] = ()
    rewards: Mapping[int, Rewards] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Tasks of the groups of a step."""

    issued: Sequence[IssuedGroup]
    sampling: Sequence[asyncio.Future[Group]]
    scoring: asyncio.Future[Rewards]
    taken: asyncio.Event

    @property
    def tasks(self) -> list[asyncio.Future[Any]]:
        return [*self.sampling, self.scoring]


class GroupTasks:
    """Groups under way, by step. Every method but `check` is for the thread of the event loop.

    Reward functions score groups as they end, reward models those of a step when it is taken. `in_rounds`: samples take
    their turns together, see `Rounds`; otherwise a journal of their turns is kept.
    """

    def __init__(
        self, sampler: Sampler, rubric: Rubric, group_size: int, per_step: int, *, stall_s: float, in_rounds: bool
    ):
        self._engine, self._rubric, self._group_size, self._stall_s = sampler.engine, rubric, group_size, stall_s
        self._per_step = per_step
        self._waits = any(reward.timeout_s is None for reward in rubric.rewards)
        self._rounds = Rounds(sampler.engine) if in_rounds else None
        self.journal = Journal(sampler.engine)
        self._sampler = replace(sampler, engine=self.journal if self._rounds is None else self._rounds)
        self._steps: dict[int, _Step] = {}
        self._changed = asyncio.Event()
        self._sampling = 0
        self.on_sampling: Callable[[bool], None] = lambda _: None
        """Called when the first of some groups begins to be sampled, and when the last one has been."""
        self._progress = time.monotonic()

    def begin(self, queue: Queue) -> None:
        """Begin the groups of whole steps, or continue them: in their order, before any of them gets a token."""
        if self._rounds is not None:
            new = [one.issued.number for one in queue.groups if one.group is None]
            self._rounds.expect([key for number in new for key in self._keys(number)])
        for start in range(0, len(queue.groups), self._per_step):
            groups = queue.groups[start : start + self._per_step]
            step = groups[0].issued.number // self._per_step
            sampling = [self._begun(one) for one in groups]
            scored, taken = queue.rewards.get(step), asyncio.Event()
            scoring = _task(self._score(step, sampling, taken)) if scored is None else _finished(scored)
            issued = [one.issued for one in groups]
            self._steps[step] = _Step(issued=issued, sampling=sampling, scoring=scoring, taken=taken)
            for task in self._steps[step].tasks:
                task.add_done_callback(self._done)

    async def sampled(self) -> None:
        """Wait until all groups are sampled. The first failure of any group is raised."""
        await self._until([task for step in self._steps.values() for task in step.sampling])

    async def finished(self, step: int) -> None:
        """Wait until a step is sampled and, unless reward models wait for it to be taken, scored."""
        await self._until(self._steps[step].sampling if self._waits else self._steps[step].tasks)

    async def take(self, step: int) -> tuple[list[Group], Rewards]:
        """Remove a finished step; return its groups with their rewards."""
        one = self._steps.pop(step)
        one.taken.set()
        rewards = await one.scoring
        return [task.result() for task in one.sampling], rewards

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of sampled groups and of others."""
        done = [task.done() for step in self._steps.values() for task in step.sampling]
        return sum(done), len(done) - sum(done)

    def queue(self) -> Queue:
        """All groups as they are now."""
        steps = sorted(self._steps.items())
        groups = [
            QueuedGroup(issued=issued, group=task.result() if task.done() else None)
            for _, step in steps
            for issued, task in zip(step.issued, step.sampling, strict=True)
        ]
        return Queue(groups=groups, rewards={n: step.scoring.result() for n, step in steps if step.scoring.done()})

    def turns(self) -> dict[str, Any]:
        """State of the journal, with the turns that the engine is at."""
        return self.journal.state(self._engine.under_way() if isinstance(self._engine, PausableEngine) else ())

    def check(self, since: float) -> None:
        """RunError if no sample and no reward came for `stall_s` seconds, counted from `since` at the earliest."""
        if time.monotonic() - max(since, self._progress) > self._stall_s:
            raise RunError(
                f"asynchronous: nothing was sampled or scored for {self._stall_s:g} s: {self._awaited()}; look there, "
                "or raise asynchronous.stall_s"
            )

    def _awaited(self) -> str:
        """Describe what each unfinished group waits for."""
        found: dict[str, list[int]] = {}
        keys = None
        if isinstance(self._engine, PausableEngine):
            keys = {call.params.sample_key for call in self._engine.under_way()}
        for step in list(self._steps.values()):
            for issued, task in zip(step.issued, step.sampling, strict=True):
                if not task.done():
                    generating = keys is None or {*self._keys(issued.number)} & keys
                    found.setdefault("the engine" if generating else "its environment", []).append(issued.number)
                elif not step.scoring.done():
                    found.setdefault("the rewards of its step", []).append(issued.number)
        return "; ".join(
            f"group{'s' if len(numbers) > 1 else ''} {_ranges(numbers)} await{'s' if len(numbers) == 1 else ''} {what}"
            for what, numbers in found.items()
        )

    def _keys(self, number: int) -> list[tuple[int, int]]:
        """Sampling keys of a group's samples."""
        return [self._sampler.params(number, sample).key for sample in range(self._group_size)]

    def _begun(self, one: QueuedGroup) -> asyncio.Future[Group]:
        if one.group is not None:
            return _finished(one.group)
        self._count(1)
        task = _task(self._sample(one.issued))
        task.add_done_callback(lambda _: self._count(-1))
        return task

    async def _sample(self, issued: IssuedGroup) -> Group:
        (group,) = await collect(self._sampler, [issued], self._group_size, self._advance)
        self.journal.forget(self._keys(issued.number))
        return group

    async def _score(self, step: int, sampling: Sequence[asyncio.Future[Group]], taken: asyncio.Event) -> Rewards:
        async with self._rubric.scoring(step) as scoring:
            # Shielded: a failure to score must not cancel the sampling.
            for ended in asyncio.as_completed([asyncio.shield(task) for task in sampling]):
                scoring.add(await ended)
            if self._waits:
                await taken.wait()
            return await scoring.result([task.result() for task in sampling])

    async def _until(self, wanted: Sequence[asyncio.Future[Any]]) -> None:
        while True:
            self._changed.clear()
            for step in self._steps.values():
                for task in step.tasks:
                    if task.done():
                        task.result()
            if all(task.done() for task in wanted):
                return
            await self._changed.wait()

    def _advance(self, count: int) -> None:
        self._progress = time.monotonic()
        if self._rounds is not None:
            self._rounds.leave(count)

    def _count(self, change: int) -> None:
        before, self._sampling = self._sampling, self._sampling + change
        if (before > 0) != (self._sampling > 0):
            self.on_sampling(self._sampling > 0)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._progress = time.monotonic()
        self._changed.set()
        if not task.cancelled():
            task.exception()  # retrieved, also where another group's is raised


def _task(coroutine: Any) -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


def _finished(result: Any) -> asyncio.Future[Any]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in words.

    >>> _ranges([3, 4, 5, 9])
    '3-5, 9'
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
