"""Evaluation on held-out examples, with a 95 % interval that treats prompts, not samples, as independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.config import ConfigError
from posttrain.console import progress_bar
from posttrain.rl.collect import Sampler, collect
from posttrain.rl.rewards import Rubric
from posttrain.rl.statistics import Interval, mean_interval
from posttrain.rl.types import Example, Group, Rewards

EVAL_STEP = 2**32 - 1
"""In place of the step in a sample's random key: every evaluation of a run draws the same random numbers."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    groups_P: Sequence[Group]
    rewards: Rewards
    interval: Interval
    """Of the total reward."""

    def metrics(self) -> dict[str, float]:
        samples = [s for group in self.groups_P for s in group]
        parts = {
            f"eval/rewards/{name}/mean": float(np.nanmean(part))
            for name, part in self.rewards.parts_PG.items()
            if not np.isnan(part).all()
        }
        return {
            "eval/reward": self.interval.mean,
            "eval/reward_low": self.interval.low,
            "eval/reward_high": self.interval.high,
            "eval/completions/mean_length": float(np.mean([s.num_sampled for s in samples])),
            "eval/completions/clipped_ratio": float(np.mean([s.stop == "length" for s in samples])),
            **parts,
        }


async def evaluate(sampler: Sampler, rubric: Rubric, examples: Sequence[Example], group_size: int = 1) -> Evaluation:
    """`group_size` samples of every example, scored. Samples without a valid reward are left out of the mean."""
    with progress_bar(f"evaluating {len(examples)} held-out prompts", len(examples) * group_size) as advance:
        groups_P = await collect(sampler, examples, group_size, EVAL_STEP, advance)
    with progress_bar("scoring the held-out samples", len(rubric.rewards)) as advance:
        rewards = await rubric.score(groups_P, advance)
    valid = ~np.isnan(rewards.total_PG)
    if not valid.any():
        raise ConfigError("evaluation: no sample has a valid reward; see that the rewards apply to eval_dataset")
    prompts = np.repeat(np.arange(len(groups_P))[:, None], group_size, axis=1)
    interval = mean_interval(rewards.total_PG[valid], prompts[valid])
    return Evaluation(groups_P=groups_P, rewards=rewards, interval=interval)
