"""Rubrics: several reward functions, made from the configuration and summed with weights over the groups of a step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from posttrain.config import Locator, OnlineSection, RewardSection, RLSection
from posttrain.config.locator import callable_of
from posttrain.data.chat import Renderer
from posttrain.errors import ConfigError, did_you_mean
from posttrain.metrics import merge
from posttrain.reward.call import Scores, check_values
from posttrain.reward.caller import Caller, ProcessCaller, RewardServer, ThreadCaller
from posttrain.reward.function import ENV_REWARD, Keywords, Reward, RewardCache, env_rewards
from posttrain.reward.model import ModelReward, classifier_path
from posttrain.reward.stream import RewardStream
from posttrain.reward.types import RewardError, Rewards
from posttrain.reward.worker import Limits
from posttrain.rollout.trajectory import Group
from posttrain.tracking.console import cut
from posttrain.tree import Mean

SHOWN_CELLS = 80
"""Maximum number of characters of a sample in an error message."""
MODEL_REWARD = "reward_model"
"""Name in metrics; further reward models get a number."""


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


def rewards_of(sections: Sequence[RewardSection]) -> list[Reward]:
    """Import the functions of reward sections, and find their reward models."""
    rewards: list[Reward] = []
    for item in sections:
        if item.model is not None:
            number = sum(reward.name.startswith(MODEL_REWARD) for reward in rewards)
            name = item.name or (f"{MODEL_REWARD}_{number + 1}" if number else MODEL_REWARD)
            function: Any = ModelReward(classifier_path(item.model), item.reduce, name)
        else:
            function = callable_of(item.fn, "rewards.fn")
        isolated = isinstance(item.fn, Locator) and item.isolate != "thread"
        rewards.append(
            Reward(
                function=function,
                weight=item.weight,
                args=item.args,
                name=item.name or "",
                timeout_s=None if item.fn is None else item.timeout_s,
                on_error=item.on_error,
                isolated=(item.fn.object, str(item.fn.folder.resolve())) if isolated else None,
                text=item.text,
                cache=item.cache,
                limits=Limits(item.memory_mib, item.file_mib, item.cpu_s or 0),
            )
        )
    return rewards


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
