"""Rubrics: several reward functions, summed with weights, over the groups of a step; functions in threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.errors import ConfigError, RunError
from posttrain.metrics import merge
from posttrain.reward.cache import RewardCache
from posttrain.reward.call import CallError, CallResult, call_reward, check_values
from posttrain.reward.function import Keywords, Reward
from posttrain.reward.processes import ProcessCaller, RewardServer
from posttrain.reward.scoring import Caller, Failure, RewardScores
from posttrain.reward.stream import GroupScores, RewardStream, whole
from posttrain.reward.types import RewardError, Rewards
from posttrain.rollout.trajectory import Group, Trajectory
from posttrain.runtime.user_calls import UserCalls, wait_here
from posttrain.tracking.console import cut

SHOWN_CELLS = 80
"""Maximum number of characters of a sample in an error message."""


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
        self._keywords = {reward.name: Keywords(reward) for reward in rewards}
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
    async def scoring(self, step: int = 0) -> AsyncIterator[RubricScoring]:
        """Score groups as they end: `add` each one, then await `result`. On exit running calls are cancelled. `step`:
        number that functions written for TRL find in `trainer_state`."""
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

        async def scored(reward: Reward) -> GroupScores:
            if reward.name in self._streams:
                scores = await self._streams[reward.name].result(groups_P)
            else:
                async with self._models:  # two programs at once could deadlock on each other's collectives
                    scores = whole(await _score_by_model(reward, samples))
            if advance is not None:
                advance(1)
            return scores

        found = await asyncio.gather(*(scored(reward) for reward in self._rewards))
        return _gather(self._rewards, found, (len(groups_P), len(groups_P[0])))

    async def close(self) -> None:
        """Cancel what is still running."""
        for stream in self._streams.values():
            await stream.close()


def _gather(rewards: Sequence[Reward], found: Sequence[GroupScores], shape: tuple[int, int]) -> Rewards:
    parts: dict[str, np.ndarray] = {}
    errors: list[RewardError] = []
    dropped = np.zeros(shape, bool)
    for reward, scores in zip(rewards, found, strict=True):
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
    metrics = {
        f"rewards/{reward.name}/{name}": mean
        for reward, scores in zip(rewards, found, strict=True)
        for name, mean in scores.metrics.items()
    }
    extras = {name: values for scores in found for name, values in scores.extras.items()}
    notes = [f"reward {r.name}: {note}" for r, s in zip(rewards, found, strict=True) for note in s.notes]
    return Rewards(total_PG=total, parts_PG=parts, errors=errors, metrics=metrics, extras=extras, notes=notes)


def joined(parts: Sequence[Rewards]) -> Rewards:
    """Rewards of groups that were scored in several calls, in the order of the calls. Extras that a call did not give
    are None there."""
    if len(parts) == 1:
        return parts[0]
    before = np.cumsum([0, *(len(part.total_PG) for part in parts)])
    extras = dict.fromkeys(name for part in parts for name in part.extras)
    return Rewards(
        total_PG=np.concatenate([part.total_PG for part in parts]),
        parts_PG={name: np.concatenate([part.parts_PG[name] for part in parts]) for name in parts[0].parts_PG},
        errors=[
            replace(error, prompt=error.prompt + int(first))
            for first, part in zip(before, parts, strict=False)
            for error in part.errors
        ],
        metrics=merge(*(part.metrics for part in parts)),
        extras={
            name: [value for part in parts for value in part.extras.get(name, [None] * part.total_PG.size)]
            for name in extras
        },
        notes=list(dict.fromkeys(note for part in parts for note in part.notes)),
    )


async def _score_by_model(reward: Reward, samples: Sequence[Trajectory]) -> RewardScores:
    """Score with a reward model in one call; its exceptions abort the run."""
    values, errors = check_values(await asyncio.to_thread(reward.function, samples), len(samples))
    return RewardScores(values, {index: Failure("error", message) for index, message in errors.items()})


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


class ThreadCaller:
    """Caller that runs each call in a new daemon thread, so that a call that never returns does not keep the process
    alive."""

    def __init__(self, function: Callable[..., Any], name: str):
        self._function, self._calls = function, UserCalls(f"reward {name}", timeout_s=None)

    async def prepare(self) -> None:
        """Do nothing: threads start immediately."""

    def finish(self, *, strange: bool) -> None:
        """Do nothing: threads end by themselves."""

    def close(self) -> None:
        """Do nothing: threads end by themselves."""

    async def call(self, keywords: Mapping[str, Any], loggers: Sequence[str], count: int) -> CallResult:
        """Call the function. CallError if it fails; on cancellation the thread is left behind and its coroutine
        cancelled. RunError if too many calls have hung; a function named as file.py:function is killed instead."""
        try:
            result: CallResult = await self._calls.call(
                call_reward, self._function, keywords, loggers, count, wait_here
            )
        except RunError:
            raise
        except RuntimeError as error:
            raise CallError(str(error)) from error
        return result
