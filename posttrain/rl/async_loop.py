"""Asynchronous RL: the acting half samples ahead in a thread of its own while the learning half trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from posttrain.cluster.cluster import Cluster
from posttrain.metrics import Timer
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.collector import Queue, RolloutCollector, new_wave, packed, unpacked
from posttrain.rl.group_tasks import GroupTasks
from posttrain.rl.step import StepResult, StepSettings, learn
from posttrain.rollout.types import PausableEngine
from posttrain.runtime.event_loop import LoopThread
from posttrain.tracking.console import progress_bar
from posttrain.tree import replace

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """Settings of the asynchronous loop."""

    max_staleness: int
    """Maximum versions of the weights between a token and its update."""
    in_flight: bool
    """Hand new weights over while samples are under way."""
    in_turns: bool
    """True if engine and trainer may not compute at the same time: they share arrays that an update replaces, or
    devices on which programs with collectives must be launched in one order."""
    in_rounds: bool
    """True if samples take their turns in rounds, see `Rounds`."""
    stall_s: float
    num_versions: int
    """Number of steps of the stage, each with one hand-over: groups beyond are not begun."""


class AsyncLoop:
    """Steps of asynchronous RL. Group n is learned from in step n // per_step, in the order of the numbers: nothing is
    dropped, and no long sample is overtaken.

    A group begins when n < (version + 1 + max_staleness) per_step: no token is more than `max_staleness` versions old.
    Without `in_flight`, weights are handed over when every group that was begun is sampled: group n is sampled whole by
    version max(0, n // per_step - max_staleness), and between two steps no sample is under way. All groups of a version
    begin at once, on an engine without earlier ones, and take their turns in rounds: a run does not depend on time.
    """

    def __init__(
        self,
        cluster: Cluster,
        algorithm: Algorithm,
        collector: RolloutCollector,
        settings: StepSettings,
        asynchronous: AsyncSettings,
    ):
        self._cluster, self._algorithm, self._collector, self._settings = cluster, algorithm, collector, settings
        self._async = asynchronous
        self._thread = LoopThread("rollouts")
        self._tasks = GroupTasks(
            collector,
            lambda: cluster.version,
            stall_s=asynchronous.stall_s,
            in_rounds=asynchronous.in_rounds,
            together=not asynchronous.in_flight,
        )
        self._restored: Queue = {}
        self._clock = IdleClock()
        self._tasks.on_sampling = lambda sampling: self._clock.set(sampling=sampling)
        self._engine = collector.sampler.engine
        self._ended = time.perf_counter()
        self._running = False

    def __enter__(self) -> AsyncLoop:
        self._thread.__enter__()
        self._clock.take(0.0)
        self._running, self._ended = True, time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running = False
        self._thread.__exit__(kind, error, trace)

    def step(self, timer: Timer) -> StepResult:
        """Begin the groups that the version allows, wait for those of the step, learn from them, hand the weights over.

        An exception of a sample or a reward is raised here; RunError if nothing finishes for `stall_s`.
        """
        cluster, way, waited = self._cluster, self._async, Stopwatch()
        version = cluster.version
        self._call(self._begin())
        finished, unfinished = self.on_loop(lambda: self._tasks.counts)
        with waited, timer("wait_for_rollouts"):
            self._wait(self._tasks.finished(version), "waiting for rollouts")
        rollout_memory, learned = cluster.memory("rollout"), Stopwatch()
        with learned:
            if way.in_turns:
                self._call(self._pause())
            with timer("rewards"):
                waves = self._wait(self._tasks.take(version), "rewards")
            rollouts = self._collector.rollouts(version, waves)
            result = learn(cluster, self._algorithm, rollouts, self._settings, timer)
        with waited, timer("wait_for_rollouts"):
            if way.in_flight:
                self._call(self._pause())
            else:
                self._call(self._resume())
                self.settle()
        # Of every wave that has begun under this version.
        drawn = self.on_loop(self._collector.source.metrics)
        with learned, timer("sync"):
            synced = self.on_loop(lambda: cluster.sync_weights(cluster.version + 1))
            self._call(self._resume())
        measured = {"async/queue": float(finished), "async/in_flight": float(unfinished)}
        measured |= self._times(waited.seconds, learned.seconds)
        metrics = {**result.metrics, **drawn, **synced, **rollout_memory, **cluster.memory("update"), **measured}
        return replace(result, metrics=metrics)

    def settle(self) -> None:
        """Wait until every group that was begun is sampled, and the engine has come to rest: it may then be used from
        any thread until the next step."""
        if self._running:
            self._wait(self._tasks.sampled(), "waiting for rollouts")
            self._call(self._rest())

    def on_loop(self, function: Callable[[], T]) -> T:
        """Call a function between two events of the acting half, which may use the engine."""
        return self._call(_result_of(function)) if self._running else function()

    def state(self) -> dict[str, Any]:
        """Groups that are begun and not learned from, and turns of their samples, as JSON and numpy arrays."""
        if not self._running:
            return {"queue": packed(self._restored), "turns": self._tasks.turns()}
        self._call(self._pause())
        queue, turns = self.on_loop(lambda: (self._tasks.queue(), self._tasks.turns()))
        self._call(self._resume())
        return {"queue": packed(queue or self._restored), "turns": turns}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with the groups of a state, before the first step."""
        self._restored = unpacked(
            state["queue"], self._collector.source.example, self._collector.sampler.renderer.tokenizer
        )
        self._tasks.journal.restore(state["turns"])

    async def _begin(self) -> None:
        """Begin all groups that the version of the weights allows."""
        version, collector = self._cluster.version, self._collector
        queue, self._restored = dict(self._restored), {}
        first = max([version, *(step + 1 for step in (*queue, *self._tasks.steps))])
        for step in range(first, min(version + 1 + self._async.max_staleness, self._async.num_versions)):
            queue[step] = [new_wave(collector.source.take(collector.groups_per_step, version))]
        self._tasks.begin(queue)

    async def _pause(self) -> None:
        """Let no dispatch run until `_resume`; environments and rewards go on."""
        self._clock.set(paused=True)
        if isinstance(self._engine, PausableEngine):
            await self._engine.pause()

    async def _resume(self) -> None:
        self._clock.set(paused=False)
        if isinstance(self._engine, PausableEngine):
            self._engine.resume()

    async def _rest(self) -> None:
        # The last sample ends before the driver of the engine does.
        await self._pause()
        await self._resume()

    def _times(self, waited: float, learned: float) -> dict[str, float]:
        """Seconds since the step before ended: the trainer waited, learned or did something else (between steps), the
        sampler worked or waited."""
        now = time.perf_counter()
        whole, self._ended = now - self._ended, now
        idle = self.on_loop(lambda: self._clock.take(whole))
        return {
            "async/wait_for_rollouts_s": waited,
            "async/learn_s": learned,
            "async/between_steps_s": whole - waited - learned,
            "async/wait_for_trainer_s": idle,
            "async/sample_s": whole - idle,
            "async/idle_ratio/trainer": waited / whole,
            "async/idle_ratio/sampler": idle / whole,
        }

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.call(coroutine)

    def _wait(self, coroutine: Coroutine[Any, Any, T], title: str) -> T:
        """Wait for samples or rewards, watched."""
        since, step = time.monotonic(), self._cluster.actor.step_number + 1
        with progress_bar(f"step {step}: {title}", closing=False):
            return self._thread.call(coroutine, lambda: self._tasks.check(since))


class Stopwatch:
    """Seconds spent inside of it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


class IdleClock:
    """Seconds in which the sampler did nothing: no group was being sampled, or the engine was paused."""

    def __init__(self) -> None:
        self._sampling, self._paused = False, False
        self._idle, self._since = 0.0, time.perf_counter()

    def set(self, *, sampling: bool | None = None, paused: bool | None = None) -> None:
        self._add()
        self._sampling = self._sampling if sampling is None else sampling
        self._paused = self._paused if paused is None else paused

    def take(self, whole: float) -> float:
        """Idle seconds since the last call, of `whole` seconds."""
        self._add()
        idle, self._idle = min(self._idle, whole), 0.0
        return idle

    def _add(self) -> None:
        now = time.perf_counter()
        if self._paused or not self._sampling:
            self._idle += now - self._since
        self._since = now


async def _result_of(function: Callable[[], T]) -> T:
    return function()
