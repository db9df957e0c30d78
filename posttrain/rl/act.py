"""Acting half of an online step: groups are begun, sampled and scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.metrics import Timer
from posttrain.rl.rewards import Rubric
from posttrain.rl.sampler import Sampler, collect, collect_some
from posttrain.rl.source import Source
from posttrain.rl.types import Group, Rewards
from posttrain.tracking.console import progress_bar


@dataclass(frozen=True, kw_only=True)
class Acted:
    """Scored groups of a step."""

    version: int
    """Version of the weights when the step began."""
    groups_P: Sequence[Group]
    rewards: Rewards


@dataclass(frozen=True, kw_only=True)
class Act:
    """Sampling and scoring of the groups of a step.

    With `in_flight` above `groups_per_step`, partial rollouts: so many groups are under way, a step takes the first
    that finish, and a later one goes on with the others, at most `max_staleness` versions after their start.
    """

    sampler: Sampler
    rubric: Rubric
    source: Source
    group_size: int
    groups_per_step: int
    in_flight: int
    max_staleness: int

    async def __call__(self, version: int, title: str, timer: Timer) -> Acted:
        with timer("rollout"):
            groups_P = await (self._all if self.in_flight == self.groups_per_step else self._some)(version, title)
        with (
            timer("rewards"),
            progress_bar(f"{title}: rewards", len(self.rubric.rewards), closing=False) as advance,
        ):
            rewards = await self.rubric.score(groups_P, advance)
        return Acted(version=version, groups_P=groups_P, rewards=rewards)

    async def _all(self, version: int, title: str) -> list[Group]:
        groups = self.source.take(self.groups_per_step, version)
        with progress_bar(f"{title}: sampling", len(groups) * self.group_size, closing=False) as advance:
            return await collect(self.sampler, groups, self.group_size, advance)

    async def _some(self, version: int, title: str) -> list[Group]:
        left = self.source.unfinished
        groups = [*left, *self.source.take(self.in_flight - len(left), version)]
        with progress_bar(f"{title}: sampling", closing=False):
            found, self.source.unfinished = await collect_some(
                self.sampler,
                groups,
                self.group_size,
                version,
                min_groups=self.groups_per_step,
                max_staleness=self.max_staleness,
            )
        return found
