"""Evaluation on held-out examples, with a 95 % interval that treats prompts, not samples, as independent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from posttrain.errors import ConfigError
from posttrain.rl.rewards import Rubric
from posttrain.rl.sampler import EVALUATION, IssuedGroup, Sampler, collect
from posttrain.rl.teachers import interval_of
from posttrain.rl.types import Example, Group, Rewards
from posttrain.statistics import Interval, mean_interval
from posttrain.tracking.console import progress_bar


@dataclass(frozen=True, kw_only=True)
class RolloutEvaluation:
    groups_P: Sequence[Group]
    rewards: Rewards
    interval: Interval | None
    """Confidence interval of the mean total reward; None without rewards."""
    distances_PG: Float[np.ndarray, "P G"] | None = None
    """Mean of log(student / teacher) over the tokens of each sample; None without teachers."""

    def metrics(self) -> dict[str, float]:
        samples = [s for group in self.groups_P for s in group]
        parts = {
            f"eval/rewards/{name}/mean": float(np.nanmean(part))
            for name, part in self.rewards.parts_PG.items()
            if not np.isnan(part).all()
        }
        named = {"eval/reward": self.interval, "eval/distill/kl": self.distance}
        intervals = {
            f"{name}{end}": value
            for name, found in named.items()
            if found is not None
            for end, value in (("", found.mean), ("_low", found.low), ("_high", found.high))
        }
        return {
            **intervals,
            "eval/completions/mean_length": float(np.mean([s.num_sampled for s in samples])),
            "eval/completions/clipped_ratio": float(np.mean([s.stop == "length" for s in samples])),
            **parts,
        }

    @property
    def distance(self) -> Interval | None:
        """The reverse KL from the teachers per token, on the student's own samples."""
        return None if self.distances_PG is None else interval_of(self.distances_PG)


async def evaluate(
    sampler: Sampler,
    rubric: Rubric,
    examples: Sequence[Example],
    group_size: int = 1,
    distances: Callable[[Sequence[Group]], Float[np.ndarray, "P G"]] | None = None,
) -> RolloutEvaluation:
    """`group_size` samples of every example, scored. Samples without a valid reward are left out of the mean.

    `distances`: of the samples from the teachers.
    """
    with progress_bar(f"evaluating {len(examples)} held-out prompts", len(examples) * group_size) as advance:
        # The same numbers in every evaluation of a run: it draws the same random numbers.
        groups = [IssuedGroup(number=n, example=example, version=0) for n, example in enumerate(examples)]
        groups_P = await collect(replace(sampler, stream=EVALUATION), groups, group_size, advance)
        found = None if distances is None else distances(groups_P)
    with progress_bar("scoring the held-out samples", len(rubric.rewards)) as advance:
        rewards = await rubric.score(groups_P, advance)
    if not rubric.rewards:
        return RolloutEvaluation(groups_P=groups_P, rewards=rewards, interval=None, distances_PG=found)
    valid = ~np.isnan(rewards.total_PG)
    if not valid.any():
        raise ConfigError("evaluation: no sample has a valid reward; see that the rewards apply to eval_dataset")
    prompts = np.repeat(np.arange(len(groups_P))[:, None], group_size, axis=1)
    interval = mean_interval(rewards.total_PG[valid], prompts[valid])
    return RolloutEvaluation(groups_P=groups_P, rewards=rewards, interval=interval, distances_PG=found)
