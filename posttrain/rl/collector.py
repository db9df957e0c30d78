"""Acting half of an online step: groups are begun, sampled and scored, in waves where useful ones are missing
(dynamic sampling; DAPO, arXiv:2503.14476 section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool

from posttrain.config import RLSection
from posttrain.metrics import Timer
from posttrain.reward.rubric import Rubric
from posttrain.reward.types import Rewards
from posttrain.rl.algorithms import GroupFilter, filter_of
from posttrain.rl.exchange import exchanged, own_share
from posttrain.rl.metrics import group_metrics, refill_metrics
from posttrain.rl.sampler import IssuedGroup, Sampler, collect
from posttrain.rl.source import Source
from posttrain.rollout.trajectory import Group
from posttrain.tracking.console import progress_bar


@dataclass(frozen=True, kw_only=True)
class Refill:
    """Settings of dynamic sampling."""

    limit: int
    """Maximum number of waves per step."""
    keep: GroupFilter
    """Mask of the useful groups of a wave."""

    @classmethod
    def of(cls, section: RLSection) -> Refill | None:
        """Build dynamic sampling of a stage; None without. ConfigError for a filter that cannot be used."""
        given = section.refill
        if given is None:
            return None
        return cls(limit=given.limit, keep=filter_of(given.keep, "refill.keep", section.group_size))


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Groups of a step that were begun together, with their rewards."""

    groups_P: Sequence[Group]
    rewards: Rewards
    useful_P: Bool[np.ndarray, " P"] | None
    """Groups to learn from; None: as the algorithm's filter decides."""


@dataclass(frozen=True, kw_only=True)
class ScoredRollouts:
    """Scored groups of a step."""

    version: int
    """Version of the weights when the step began."""
    groups_P: Sequence[Group]
    rewards: Rewards
    weights: Mapping[str, float]
    """Weight of each reward by name."""
    useful_P: Bool[np.ndarray, " P"] | None = None
    """Groups to learn from; None: as the algorithm's filter decides."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the groups, of refill and of the curriculum."""


@dataclass(frozen=True, kw_only=True)
class RolloutCollector:
    """Sampling and scoring of the groups of a step.

    With `refill`, a step begins as many further groups as useful ones are missing, and so on in waves: what is sampled
    depends on rewards and not on time.
    """

    sampler: Sampler
    rubric: Rubric
    source: Source
    group_size: int
    groups_per_step: int
    refill: Refill | None = None
    pass_above: float | None = None
    """Reward above which a sample passes; None: no metrics of passing groups."""

    async def __call__(self, version: int, title: str, timer: Timer) -> ScoredRollouts:
        waves = [await self._wave(self.groups_per_step, version, title, timer)]
        while missing := self.missing(waves):
            waves.append(await self._wave(missing, version, f"{title}, wave {len(waves)}", timer))
        rollouts = self.rollouts(version, waves)
        return replace(rollouts, metrics={**rollouts.metrics, **self.source.metrics()})

    def observe(self, groups_P: Sequence[Group], rewards: Rewards) -> None:
        """Let the source take note of scored groups, before others are begun."""
        for group, rewards_G in zip(groups_P, rewards.total_PG, strict=True):
            self.source.seen(group, rewards_G)

    def wave(self, groups_P: Sequence[Group], rewards: Rewards) -> Wave:
        """Tell which of the groups of a wave are useful."""
        useful_P = None if self.refill is None else self.refill.keep(rewards.total_PG)
        return Wave(groups_P=groups_P, rewards=rewards, useful_P=useful_P)

    def missing(self, waves: Sequence[Wave]) -> int:
        """Number of groups of a step's next wave: as many as useful ones are missing; 0 after the last wave."""
        if self.refill is None or len(waves) > self.refill.limit:
            return 0
        return self.groups_per_step - sum(int(np.sum(wave.useful_P)) for wave in waves)

    def rollouts(self, version: int, waves: Sequence[Wave]) -> ScoredRollouts:
        """Outcome of a step, with metrics of its groups and waves."""
        rewards, metrics = Rewards.concatenated([wave.rewards for wave in waves]), dict[str, float]()
        useful = [wave.useful_P for wave in waves if wave.useful_P is not None]
        if useful:
            metrics |= refill_metrics(useful, self.groups_per_step)
        if self.pass_above is not None and rewards.parts_PG:
            metrics |= group_metrics(rewards.total_PG, self.pass_above)
        return ScoredRollouts(
            version=version,
            groups_P=[group for wave in waves for group in wave.groups_P],
            rewards=rewards,
            weights=self.rubric.weights,
            useful_P=np.concatenate(useful) if useful else None,
            metrics=metrics,
        )

    async def _wave(self, count: int, version: int, title: str, timer: Timer) -> Wave:
        """Sample and score `count` groups, each process its share; groups are scored as they end."""
        begun = self.source.take(count, version)
        async with self.rubric.scoring(version) as scoring:
            with timer("rollout"):
                own_P = await self._sample(own_share(begun), title, scoring.add)
            with (
                timer("rewards"),
                progress_bar(f"{title}: rewards", len(self.rubric.rewards), closing=False) as advance,
            ):
                own = await scoring.result(own_P, advance) if own_P else None
                groups, rewards = exchanged(own_P, own, begun)
        self.observe(groups, rewards)
        return self.wave(groups, rewards)

    async def _sample(self, groups: Sequence[IssuedGroup], title: str, ended: Callable[[Group], None]) -> list[Group]:
        with progress_bar(f"{title}: sampling", len(groups) * self.group_size, closing=False) as advance:
            return await collect(self.sampler, groups, self.group_size, advance, ended)
