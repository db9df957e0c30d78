"""Online preference optimisation step (online DPO): pairs the best and worst sample of each prompt by reward. Direct
alignment from online feedback, arXiv:2402.04792, with reward functions as the annotator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from posttrain.batch import Batch, BatchLoss, LossOutput, TokenStats
from posttrain.cluster.cluster import Cluster
from posttrain.losses.policy import distance_metrics
from posttrain.metrics import Timer
from posttrain.rl.assemble import Pair, assemble_pairs
from posttrain.rl.collector import RolloutCollector
from posttrain.rl.metrics import rollout_metrics
from posttrain.rl.step import StepResult, update
from posttrain.rollout.trajectory import Group
from posttrain.runtime.profiler import span
from posttrain.tracking.console import progress_bar
from posttrain.tree import replace


@dataclass(frozen=True, kw_only=True)
class OnlineLoss:
    """Pair loss that also reports the policy's distance from its sampler and from the reference."""

    pairs: Any
    """`PairLoss` on pairs and a reference."""

    @property
    def needs_whole_batch(self) -> bool:
        return isinstance(self.pairs, BatchLoss) and self.pairs.needs_whole_batch

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        output: LossOutput = self.pairs(stats, batch)
        apart = distance_metrics(stats, batch, jnp.asarray(batch.loss_weight) > 0)
        return LossOutput(loss=output.loss, metrics={**apart, **output.metrics})


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """Settings of `online_step`."""

    row_tokens: int
    num_rows: int
    """Batch rows, enough for the worst case: one pair per row."""
    share_prompts: bool
    """Store the common prompt of a pair once per row."""


def best_and_worst(rewards_PG: Float[np.ndarray, "P G"]) -> Int[np.ndarray, "P G"]:
    """Roles of samples: 1 for the first sample with the greatest reward of its group, -1 for the first with the least,
    else 0.

    Groups without two different valid rewards have no pair: all 0.
    """
    roles = np.zeros(rewards_PG.shape, np.int32)
    for group, rewards in zip(roles, rewards_PG, strict=True):
        known = rewards[~np.isnan(rewards)]
        if known.size and known.max() > known.min():
            group[np.nanargmax(rewards)], group[np.nanargmin(rewards)] = 1, -1
    return roles


def without_equal(groups_P: Sequence[Group], roles_PG: Int[np.ndarray, "P G"]) -> Int[np.ndarray, "P G"]:
    """Roles without pairs of equal samples, which a noisy reward told apart."""
    pairs = [
        (group[int(roles.argmax())], group[int(roles.argmin())])
        for group, roles in zip(groups_P, roles_PG, strict=True)
    ]
    different = [list(chosen.tokens) != list(rejected.tokens) for chosen, rejected in pairs]
    return roles_PG * np.asarray(different, np.int32)[:, None]


def pairs_of_groups(groups_P: Sequence[Group], roles_PG: Int[np.ndarray, "P G"]) -> list[Pair]:
    """Chosen and rejected sample of each group that has a pair."""
    return [
        (group[int(roles.argmax())], group[int(roles.argmin())])
        for group, roles in zip(groups_P, roles_PG, strict=True)
        if roles.any()
    ]


async def online_step(
    cluster: Cluster, collector: RolloutCollector, settings: PairSettings, timer: Timer
) -> StepResult:
    """Run one step: sample, score, pair, compute reference log-probabilities, update, sync weights to the engine.

    `frac_ties`: share of groups without a pair, which are dropped: with equal rewards, or with equal
    best and worst samples. If all are, there is no update.
    """
    title = f"step {cluster.actor.step_number + 1}"
    rollouts = await collector(cluster.version, title, timer)
    cluster.release_cache()
    groups_P, roles_PG = rollouts.groups_P, without_equal(rollouts.groups_P, best_and_worst(rollouts.rewards.total_PG))
    with span("assemble"):
        pairs = pairs_of_groups(groups_P, roles_PG)
        batch = assemble_pairs(
            pairs,
            row_tokens=settings.row_tokens,
            num_rows=settings.num_rows,
            groups_P=groups_P,
            share_prompts=settings.share_prompts,
        )
    with timer("logps"), progress_bar(f"{title}: log-probabilities", closing=False):
        batch = cluster.actor.encoded(batch)
        batch = replace(batch, ref_logps=cluster.reference.logps(batch))
    metrics = update(cluster, [batch], [bool(pairs)], 1, 0, timer)
    with timer("sync"):
        metrics |= cluster.sync_weights(cluster.version + 1)
    metrics |= {"frac_ties": 1 - len(pairs) / len(groups_P)}
    metrics |= rollout_metrics(groups_P, rollouts.rewards, rollouts.version)
    return StepResult(
        metrics=metrics,
        groups_P=groups_P,
        rewards=rollouts.rewards,
        advantages_PG=None,
        roles_PG=roles_PG,
        parts=[batch],
    )
