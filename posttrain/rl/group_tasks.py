"""Groups under way: sampled and scored by tasks of one event loop, those of several steps side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from posttrain.data.prompt_images import PromptImages
from posttrain.errors import RunError
from posttrain.reward.types import Rewards
from posttrain.rl.collector import Queue, QueuedGroup, QueuedWave, RolloutCollector, Wave, new_wave
from posttrain.rl.sampler import IssuedGroup, collect
from posttrain.rollout.trajectory import Group
from posttrain.rollout.types import (
    Call,
    Completion,
    PausableEngine,
    PreparingEngine,
    RolloutEngine,
    SamplingParams,
    sampled,
)


@dataclass(kw_only=True)
class _Wave:
    """Tasks of the groups of a wave."""

    issued: Sequence[IssuedGroup]
    sampling: Sequence[asyncio.Future[Group]]
    scoring: asyncio.Future[Rewards]
    taken: asyncio.Event
    observed: bool
    scored: Wave | None = None

    @property
    def tasks(self) -> list[asyncio.Future[Any]]:
        return [*self.sampling, self.scoring]


@dataclass(kw_only=True)
class _PendingStep:
    """Waves of a step, and the task that begins further ones."""

    waves: list[_Wave]
    filling: asyncio.Future[None]

    @property
    def sampling(self) -> list[asyncio.Future[Any]]:
        """Tasks that sample, or begin what is to be sampled."""
        return [*(task for wave in self.waves for task in wave.sampling), self.filling]

    @property
    def tasks(self) -> list[asyncio.Future[Any]]:
        return [*(task for wave in self.waves for task in wave.tasks), self.filling]


class GroupTasks:
    """Groups under way, by step. Every method but `check` is for the thread of the event loop.

    Reward functions score groups as they end, reward models those of a step when it is taken. `in_rounds`: samples take
    their turns together, see `Rounds`; otherwise a journal of their turns is kept. `version`: that of the weights.

    With `refill`, useful groups that a step lacks are begun in further waves as soon as all of its groups are scored.
    `together`: steps that were begun at once begin their waves at once, so that nothing depends on time.
    """

    def __init__(
        self,
        collector: RolloutCollector,
        version: Callable[[], int],
        *,
        stall_s: float,
        in_rounds: bool,
        together: bool,
    ):
        self._engine, self._rubric, self._group_size = collector.sampler.engine, collector.rubric, collector.group_size
        self._collector, self._version, self._stall_s, self._together = collector, version, stall_s, together
        self._waits = any(reward.timeout_s is None for reward in collector.rubric.rewards)
        self._rounds = Rounds(self._engine) if in_rounds else None
        self.journal = Journal(self._engine)
        self._sampler = replace(collector.sampler, engine=self.journal if self._rounds is None else self._rounds)
        self._steps: dict[int, _PendingStep] = {}
        self._changed = asyncio.Event()
        self._sampling = 0
        self.on_sampling: Callable[[bool], None] = lambda _: None
        """Called when the first of some groups begins to be sampled, and when the last one has been."""
        self._progress = time.monotonic()

    def begin(self, queue: Queue) -> None:
        """Begin the groups of steps, or continue them: in their order, before any of them gets a token."""
        self._expect([wave for waves in queue.values() for wave in waves])
        for step, waves in queue.items():
            begun = [self._begun(step, wave) for wave in waves]
            self._steps[step] = _PendingStep(waves=begun, filling=_finished(None))
        if self._collector.refill is not None:
            for steps in [list(queue)] if self._together else [[step] for step in queue]:
                filling = _task(self._fill(steps))
                filling.add_done_callback(self._done)
                for step in steps:
                    self._steps[step].filling = filling

    async def sampled(self) -> None:
        """Wait until all groups are sampled, and none is missing. The first failure of any group is raised."""
        await self._until([task for step in self._steps.values() for task in step.sampling])

    async def finished(self, step: int) -> None:
        """Wait until a step is sampled and, unless reward models wait for it to be taken, scored."""
        await self._until(self._steps[step].sampling if self._waits else self._steps[step].tasks)

    async def take(self, step: int) -> list[Wave]:
        """Remove a finished step; return its waves."""
        waves = self._steps.pop(step).waves
        for wave in waves:
            wave.taken.set()
            await wave.scoring
        return [self._scored(wave) for wave in waves]

    @property
    def steps(self) -> Sequence[int]:
        """Steps that are begun and not taken."""
        return sorted(self._steps)

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of sampled groups and of others."""
        done = [task.done() for wave in self._waves() for task in wave.sampling]
        return sum(done), len(done) - sum(done)

    def queue(self) -> Queue:
        """All groups as they are now."""
        return {number: [_queued(wave) for wave in self._steps[number].waves] for number in self.steps}

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
        for wave in self._waves():
            for issued, task in zip(wave.issued, wave.sampling, strict=True):
                if not task.done():
                    generating = keys is None or {*self._keys(issued.number)} & keys
                    found.setdefault("the engine" if generating else "its environment", []).append(issued.number)
                elif not wave.scoring.done():
                    found.setdefault("the rewards of its step", []).append(issued.number)
        return "; ".join(
            f"group{'s' if len(numbers) > 1 else ''} {_ranges(numbers)} await{'s' if len(numbers) == 1 else ''} {what}"
            for what, numbers in found.items()
        )

    def _keys(self, number: int) -> list[tuple[int, int]]:
        """Sampling keys of a group's samples."""
        return [self._sampler.params(number, sample).key for sample in range(self._group_size)]

    def _waves(self) -> list[_Wave]:
        return [wave for step in list(self._steps.values()) for wave in list(step.waves)]

    def _expect(self, waves: Sequence[QueuedWave]) -> None:
        if self._rounds is not None:
            new = [one.issued.number for wave in waves for one in wave.groups if one.group is None]
            self._rounds.expect([key for number in new for key in self._keys(number)])

    def _begun(self, step: int, wave: QueuedWave) -> _Wave:
        sampling, taken = [self._sampling_of(one) for one in wave.groups], asyncio.Event()
        scoring = _task(self._score(step, sampling, taken)) if wave.rewards is None else _finished(wave.rewards)
        issued = [one.issued for one in wave.groups]
        begun = _Wave(issued=issued, sampling=sampling, scoring=scoring, taken=taken, observed=wave.observed)
        for task in begun.tasks:
            task.add_done_callback(self._done)
        return begun

    def _scored(self, wave: _Wave) -> Wave:
        """Outcome of a wave that is scored, of which the source takes note once."""
        groups_P, rewards = [task.result() for task in wave.sampling], wave.scoring.result()
        if not wave.observed:
            self._collector.observe(groups_P, rewards)
            wave.observed = True
        if wave.scored is None:
            wave.scored = self._collector.wave(groups_P, rewards)
        return wave.scored

    async def _fill(self, steps: Sequence[int]) -> None:
        """Begin further waves of steps, at once whenever all of their waves are scored, until no group is missing."""
        while steps:
            for step in steps:
                await self._steps[step].waves[-1].scoring
            # Nothing awaits from here on: a checkpoint holds both the rewards that are taken note of and the new waves.
            waves = {step: [self._scored(wave) for wave in self._steps[step].waves] for step in steps}
            missing = {step: count for step in steps if (count := self._collector.missing(waves[step]))}
            new = {
                step: new_wave(self._collector.source.take(count, self._version())) for step, count in missing.items()
            }
            self._expect(list(new.values()))
            for step, wave in new.items():
                self._steps[step].waves.append(self._begun(step, wave))
            steps = list(new)

    def _sampling_of(self, one: QueuedGroup) -> asyncio.Future[Group]:
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
        async with self._rubric.scoring(step * self._collector.steps_per_version) as scoring:
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


def _queued(wave: _Wave) -> QueuedWave:
    groups = [
        QueuedGroup(issued=issued, group=task.result() if task.done() else None)
        for issued, task in zip(wave.issued, wave.sampling, strict=True)
    ]
    rewards = wave.scoring.result() if wave.scoring.done() else None
    return QueuedWave(groups=groups, rewards=rewards, observed=wave.observed)


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


Key = tuple[int, int]


class Rounds:
    """Rollout engine whose samples take their turns together: those of a round are submitted, in a fixed order, when
    every sample waits for its next turn or has ended.

    An engine's log-probabilities change by rounding with the samples that it computes at the same time; so they depend
    on no clock. Samples of one turn are all submitted at once. Samples that are not expected pass.
    """

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        self._order: dict[Key, int] = {}
        self._waiting: dict[Key, list[asyncio.Future[None]]] = {}
        self._live = 0

    def expect(self, keys: Sequence[Key]) -> None:
        """Wait for samples with these sampling keys, which take their turns in this order."""
        if not self._live:
            self._order.clear()
        for key in keys:
            self._order[key] = len(self._order)
        self._live += len(keys)

    def leave(self, count: int) -> None:
        """Wait for so many samples less: they have ended."""
        self._live -= count
        self._release()

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, images: PromptImages | None = None
    ) -> Completion:
        if params.sample_key in self._order:
            if isinstance(self._engine, PreparingEngine):
                await self._engine.prepare(prompt, params, images=images)
            loop = asyncio.get_running_loop()
            turn = loop.create_future()
            self._waiting.setdefault(params.sample_key, []).append(turn)
            # Later: who is last must not go on before the others.
            loop.call_soon(self._release)
            try:
                await turn
            finally:
                if turn.cancelled():
                    self._forget(params.sample_key, turn)
        return await sampled(self._engine, prompt, params, images)

    def update_weights(self, model: Any, version: int) -> None:
        self._engine.update_weights(model, version)

    def close(self) -> None:
        self._engine.close()

    def _release(self) -> None:
        """Begin a round, if all are there."""
        if not self._waiting or len(self._waiting) < self._live:
            return
        waiting, self._waiting = self._waiting, {}
        for key in sorted(waiting, key=self._order.__getitem__):
            for turn in waiting[key]:
                if not turn.done():
                    turn.set_result(None)

    def _forget(self, key: Key, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(key, [])
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._waiting.pop(key, None)


COLUMNS = {
    "tokens": np.int32,
    "logps": np.float32,
    "kept_logps": np.float32,
    "truncation_logps": np.float32,
    "weights_versions": np.int32,
}
"""Fields of a completion with a value for each token."""


class TurnRequest(NamedTuple):
    """Request of a sample."""

    sample: Key
    key: Key
    prompt: tuple[int, ...]
    """Tokens, those of pictures as `PromptImages.keys`."""

    @classmethod
    def of(cls, prompt: Sequence[int], params: SamplingParams, images: PromptImages | None) -> TurnRequest:
        return cls(params.sample_key, params.key, tuple(prompt if images is None else images.keys(prompt)))


class Journal:
    """Rollout engine that keeps the completions of its samples until they are forgotten.

    A sample that begins again after a restart asks for the same turns: it gets those that it had, and the engine goes
    on with one that was under way. Where an environment answers otherwise than before, the turns after it are new.
    """

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        self._known: dict[TurnRequest, Completion] = {}

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, images: PromptImages | None = None
    ) -> Completion:
        turn = TurnRequest.of(prompt, params, images)
        known = self._known.get(turn)
        if known is None:
            known = await sampled(self._engine, prompt, params, images)
        elif known.stop == "abort":
            assert isinstance(self._engine, PausableEngine), "others have no partial completions"
            known = await self._engine.generate(prompt, params, partial=known, images=images)
        self._known[turn] = known
        return known

    def update_weights(self, model: Any, version: int) -> None:
        self._engine.update_weights(model, version)

    def close(self) -> None:
        self._engine.close()

    def forget(self, keys: Collection[Key]) -> None:
        """Forget the samples with these sampling keys."""
        wanted = {*keys}
        self._known = {turn: completion for turn, completion in self._known.items() if turn.sample not in wanted}

    def state(self, under_way: Sequence[Call]) -> dict[str, Any]:
        """Completions, and those of `under_way` so far, as JSON and numpy arrays."""
        partial = {
            TurnRequest.of(call.prompt, call.params, call.images): call.partial
            for call in under_way
            if call.partial is not None
        }
        turns = {**self._known, **partial}
        columns = {
            name: np.concatenate([np.asarray(getattr(one, name), dtype) for one in turns.values()])
            for name, dtype in COLUMNS.items()
            if turns
        }
        return {
            "turns": [
                {
                    **{name: list(ids) for name, ids in turn._asdict().items()},
                    "length": len(one.tokens),
                    "stop": one.stop,
                }
                for turn, one in turns.items()
            ],
            "tokens": columns,
        }

    def restore(self, state: dict[str, Any]) -> None:
        start = 0
        for turn in state["turns"]:
            end = start + turn["length"]
            own: dict[str, Any] = {name: tuple(values[start:end].tolist()) for name, values in state["tokens"].items()}
            known = TurnRequest(*(tuple(turn[name]) for name in TurnRequest._fields))
            self._known[known] = Completion(stop=turn["stop"], **own)
            start = end
