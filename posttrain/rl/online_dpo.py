"""One step of online preference optimisation: of the samples of each prompt the best against the worst by reward.

Direct alignment from online feedback, arXiv:2402.04792, with rewards in place of an annotator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from posttrain.batch import Batch, BatchLoss, LossOutput, TokenStats
from posttrain.cluster.cluster import Cluster, Role
from posttrain.losses.policy import distance_metrics
from posttrain.metrics import Metrics, Timer
from posttrain.rl.assemble import Pair, assemble_pairs
from posttrain.rl.metrics import rollout_metrics
from posttrain.rl.rewards import Rubric
from posttrain.rl.sampler import Sampler
from posttrain.rl.step import RowSettings, StepResult, sample, score, update
from posttrain.rl.types import Example, Group
from posttrain.tracking.console import progress_bar
from posttrain.tree import replace


@dataclass(frozen=True, kw_only=True)
class OnlineLoss:
    """A loss on pairs, and beside its metrics how far the policy is from its sampler and from the reference."""

    pairs: Any
    """A `PairLoss` on pairs and a reference."""

    @property
    def needs_whole_batch(self) -> bool:
        return isinstance(self.pairs, BatchLoss) and self.pairs.needs_whole_batch

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        output: LossOutput = self.pairs(stats, batch)
        apart = distance_metrics(stats, batch, jnp.asarray(batch.loss_weight) > 0)
        return LossOutput(loss=output.loss, metrics={**apart, **output.metrics})


@dataclass(frozen=True, kw_only=True)
class PairSettings(RowSettings):
    """What `online_step` needs beside the objects."""

    share_prompts: bool
    """The prompt of a pair stands in its row once."""


def best_and_worst(rewards_PG: Float[np.ndarray, "P G"]) -> Int[np.ndarray, "P G"]:
    """1 at the first sample of the greatest reward of a group, -1 at the first of the least, else 0.

    A group without two different rewards (NaN: none) prefers nothing, and is 0 throughout.
    """
    roles = np.zeros(rewards_PG.shape, np.int32)
    for group, rewards in zip(roles, rewards_PG, strict=True):
        known = rewards[~np.isnan(rewards)]
        if known.size and known.max() > known.min():
            group[np.nanargmax(rewards)], group[np.nanargmin(rewards)] = 1, -1
    return roles


def pairs_of_groups(groups_P: Sequence[Group], roles_PG: Int[np.ndarray, "P G"]) -> list[Pair]:
    """The chosen and the rejected sample of every group that prefers one."""
    return [
        (group[int(roles.argmax())], group[int(roles.argmin())])
        for group, roles in zip(groups_P, roles_PG, strict=True)
        if roles.any()
    ]


async def online_step(
    cluster: Cluster,
    rubric: Rubric,
    sampler: Sampler,
    examples_P: Sequence[Example],
    settings: PairSettings,
    timer: Timer,
) -> StepResult:
    """Collect, score, pair, ask the reference, update, hand the weights to the engine.

    `frac_ties`: the share of groups that prefer nothing and are left out. Where all do, nothing is updated.
    """
    step = cluster.actor.step_number
    groups_P = await sample(sampler, examples_P, settings.group_size, step, timer)
    rewards = await score(rubric, groups_P, step, timer)
    roles_PG = best_and_worst(rewards.total_PG)
    pairs = pairs_of_groups(groups_P, roles_PG)
    batch = assemble_pairs(
        pairs,
        row_tokens=settings.row_tokens,
        num_rows=settings.num_rows,
        groups_P=groups_P,
        share_prompts=settings.share_prompts,
    )
    with timer("logps"), progress_bar(f"step {step + 1}: log-probabilities", closing=False):
        batch = replace(batch, ref_logps=cluster.logps(Role.REFERENCE, batch))
    metrics: Metrics = update(cluster, batch, timer, learns=bool(pairs))
    metrics |= {"frac_ties": 1 - len(pairs) / len(groups_P)}
    metrics |= rollout_metrics(groups_P, rewards, step)
    return StepResult(
        metrics=metrics, groups_P=groups_P, rewards=rewards, advantages_PG=None, roles_PG=roles_PG, batch=batch
    )
