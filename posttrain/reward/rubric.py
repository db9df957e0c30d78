"""Rubrics: reward functions made from the configuration, summed with weights. Groups are scored as they end, by calls
within a single timeout, with retries of single samples."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from posttrain.config import OnlineSection, RLSection
from posttrain.data.chat import Renderer
from posttrain.errors import ConfigError, did_you_mean
from posttrain.metrics import merge
from posttrain.reward.call import CallError, Failure, Scores, check_values
from posttrain.reward.caller import Caller, ProcessCaller, RewardServer, ThreadCaller
from posttrain.reward.function import ENV_REWARD, Reward, RewardCache, env_rewards, rewards_of
from posttrain.reward.keywords import Keywords
from posttrain.reward.model import ModelReward
from posttrain.reward.types import RewardError, Rewards
from posttrain.rollout.trajectory import Group, Trajectory
from posttrain.tracking.console import cut
from posttrain.tree import Mean

SHOWN_CELLS = 80
"""Maximum number of characters of a sample in an error message."""
MAX_ALONE = 64
"""Maximum number of samples that are scored individually at the same time."""
PATIENCE_S = 0.02
"""Seconds to wait for an individual call before another one is started beside it."""


class Rubric:
    """Scores groups with all reward functions. Without any, as in pure on-policy distillation, every total is 0."""

    def __init__(self, rewards: Sequence[Reward]):
        names = [reward.name for reward in rewards]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(
                f"rewards: the name {repeated[0]!r} is used twice; metrics need distinct names: "
                "set `name` of one of them"
            )
        self.rewards = tuple(rewards)
        self._keywords = {reward.name: Keywords(reward.function, reward.args, text=reward.text) for reward in rewards}
        self._caches = {
            reward.name: RewardCache(self._keywords[reward.name], reward.name) for reward in rewards if reward.cache
        }
        self._shared: RubricScoring | None = None
        isolated = list(dict.fromkeys(reward.isolated for reward in rewards if reward.isolated is not None))
        self._server = RewardServer(isolated)
        self._callers: dict[str, Caller] = {
            reward.name: ThreadCaller(reward.function, reward.name)
            if reward.isolated is None
            else ProcessCaller(self._server, isolated.index(reward.isolated), reward.name, reward.limits)
            for reward in rewards
        }

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward by name."""
        return {reward.name: reward.weight for reward in self.rewards}

    @classmethod
    def of(cls, section: OnlineSection) -> Rubric:
        """Make the rubric of a stage, with the reward `env` of its environment or agent. Functions given by name run in
        child processes, which are not started yet. ConfigError for one that cannot be imported, a model that is no
        reward model, equal names, and an unknown `evaluate.reward`."""
        rewards = rewards_of(section.rewards)
        if isinstance(section, RLSection) and (turns := section.env or section.agent) is not None:
            env = Reward(
                function=env_rewards, weight=turns.weight, timeout_s=None, name=ENV_REWARD, on_error=turns.on_error
            )
            rewards.append(env)
        name, names = None if section.evaluate is None else section.evaluate.reward, [one.name for one in rewards]
        if name is not None and name not in names:
            near = did_you_mean(name, names)
            raise ConfigError(f"evaluate.reward: no reward is called {name!r}{near}; there are {', '.join(names)}")
        return cls(rewards)

    def load_models(self, mesh: Mesh, policy: Renderer, rows: int) -> None:
        """Load the reward models onto the mesh. `rows`: sequences per forward pass."""
        for reward in self.rewards:
            if isinstance(reward.function, ModelReward):
                reward.function.load(mesh, policy, rows)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep the child process alive, importing its functions in the background; on exit all child processes have
        ended."""
        if self._server.functions:
            self._server.start()
        try:
            yield
        finally:
            for caller in self._callers.values():
                caller.close()
            self._server.close()

    @contextlib.asynccontextmanager
    async def scoring(self, step: int) -> AsyncIterator[RubricScoring]:
        """Score groups as they end: `add` each one, then await `result`. On exit running calls are cancelled. `step`:
        steps that the trainer has done, which functions written for TRL find in `trainer_state`."""
        scoring = self._new_scoring(step)
        try:
            yield scoring
        finally:
            await scoring.close()

    async def score(
        self, groups_P: Sequence[Group], advance: Callable[[int], None] | None = None, step: int = 0
    ) -> Rewards:
        """Score all samples. `advance(1)` is called per finished function; `step` as in `scoring`. Concurrent scorings
        of an event loop share calls of the functions.

        ConfigError for arguments that cannot be pickled.
        """
        if self._shared is None or self._shared.loop is not asyncio.get_running_loop():
            self._shared = self._new_scoring(step)
        shared = self._shared
        shared.users += 1
        try:
            for group in groups_P:
                shared.add(group, step)
            return await shared.result(groups_P, advance)
        finally:
            shared.users -= 1
            if not shared.users:
                self._shared = None if self._shared is shared else self._shared
                await shared.close()

    def _new_scoring(self, step: int) -> RubricScoring:
        streams = {
            reward.name: RewardStream(
                reward, self._keywords[reward.name], self._callers[reward.name], self._caches.get(reward.name)
            )
            for reward in self.rewards
            if reward.timeout_s is not None
        }
        return RubricScoring(self.rewards, streams, step)


class RubricScoring:
    """Scoring of groups by all functions, each from the moment at which it is added."""

    def __init__(self, rewards: Sequence[Reward], streams: Mapping[str, RewardStream], step: int):
        self._rewards, self._streams, self._step = rewards, streams, step
        self._added: set[int] = set()
        self._models = asyncio.Lock()
        self.loop = asyncio.get_running_loop()
        self.users = 0

    def add(self, group: Group, step: int | None = None) -> None:
        """Start scoring a finished group, by default of this scoring's step. Reward models score all groups in
        `result`."""
        self._added.add(id(group))
        for stream in self._streams.values():
            stream.add(group, self._step if step is None else step)

    async def result(self, groups_P: Sequence[Group], advance: Callable[[int], None] | None = None) -> Rewards:
        """Rewards of these groups in this order; groups that have not been added are now. At most one `timeout_s`."""
        for group in groups_P:
            if id(group) not in self._added:
                self.add(group)
        self._added.difference_update(map(id, groups_P))
        samples = [trajectory for group in groups_P for trajectory in group]

        async def scored(reward: Reward) -> Scores:
            if reward.name in self._streams:
                scores = await self._streams[reward.name].result(groups_P)
            else:
                # Two programs at once could deadlock on each other's collectives. Exceptions abort the run.
                async with self._models:
                    scores = check_values(await asyncio.to_thread(reward.function, samples), len(samples))
            if advance is not None:
                advance(1)
            return scores

        by_reward = await asyncio.gather(*(scored(reward) for reward in self._rewards))
        return _gather(self._rewards, by_reward, (len(groups_P), len(groups_P[0])))

    async def close(self) -> None:
        """Cancel what is still running."""
        for stream in self._streams.values():
            await stream.close()


def _gather(rewards: Sequence[Reward], by_reward: Sequence[Scores], shape: tuple[int, int]) -> Rewards:
    """Weighted sums [P, G] of the scores of each function."""
    parts: dict[str, np.ndarray] = {}
    errors: list[RewardError] = []
    dropped = np.zeros(shape, bool)
    for reward, scores in zip(rewards, by_reward, strict=True):
        values = parts[reward.name] = np.asarray(scores.values, np.float32).reshape(shape)
        for index, (kind, message) in sorted(scores.failures.items()):
            prompt, sample = divmod(index, shape[1])
            errors.append(RewardError(function=reward.name, prompt=prompt, sample=sample, kind=kind, error=message))
            if reward.on_error == "drop":
                dropped[prompt, sample] = True
            else:
                values[prompt, sample] = reward.on_error
    total = _weighted_sum(rewards, parts, shape)
    total[dropped] = np.nan
    metrics = [
        {f"rewards/{reward.name}/{name}": Mean(total=mean * count, weight=float(count))}
        for reward, scores in zip(rewards, by_reward, strict=True)
        for name, means in scores.metrics.items()
        for mean, count in means
    ]
    extras = {name: values for scores in by_reward for name, values in scores.extras.items()}
    notes = [f"reward {r.name}: {note}" for r, s in zip(rewards, by_reward, strict=True) for note in s.notes]
    return Rewards(total_PG=total, parts_PG=parts, errors=errors, metrics=merge(*metrics), extras=extras, notes=notes)


def _weighted_sum(rewards: Sequence[Reward], parts: Mapping[str, np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Sum over the functions that apply; NaN if none does."""
    if not rewards:
        return np.zeros(shape, np.float32)
    stacked = np.stack([parts[r.name] * np.float32(r.weight) for r in rewards])
    return np.where(np.isnan(stacked).all(axis=0), np.nan, np.nansum(stacked, axis=0)).astype(np.float32)


def error_lines(rewards: Rewards, groups_P: Sequence[Group]) -> list[str]:
    """Report one line per failed function (number of samples and the first error with its sample), then the notes."""
    count = sum(map(len, groups_P))
    lines = list(rewards.notes)
    for name in dict.fromkeys(error.function for error in rewards.errors):
        errors = [error for error in rewards.errors if error.function == name]
        first = min(errors, key=lambda error: (error.prompt, error.sample))
        text = groups_P[first.prompt][first.sample].answer.text
        lines.append(
            f"reward {name}: no value for {len(errors)} of {count} samples; the first, {first.kind}: {first.error}; "
            f"sample {first.sample} of prompt {first.prompt}: {cut(repr(text), SHOWN_CELLS)}"
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class _GroupPlace:
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
        self._waiting: list[tuple[Group, int, asyncio.Future[_GroupPlace]]] = []
        self._places: dict[int, asyncio.Future[_GroupPlace]] = {}
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
                place.set_result(_GroupPlace(call=call, first=first, count=len(group)))
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
