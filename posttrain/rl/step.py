"""RL training step: from prompts to updated weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int

from posttrain.batch import Batch
from posttrain.cluster.cluster import Cluster, Role
from posttrain.config.rl import OldLogps, ZeroAdvantage
from posttrain.metrics import Metrics, Timer
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.assemble import assemble
from posttrain.rl.metrics import rollout_metrics
from posttrain.rl.rewards import Rubric
from posttrain.rl.sampler import PartialGroup, Sampler, collect, collect_some
from posttrain.rl.teachers import TeacherKL, add_teachers
from posttrain.rl.types import Example, Group, Rewards
from posttrain.runtime.profiler import span
from posttrain.tracking.console import progress_bar
from posttrain.tree import replace

ROUNDING = 1e-6
"""Advantages up to this share of the largest reward count as 0: the mean of equal rewards may be rounded."""


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Group size and batch rows, enough for the worst case: one trajectory, or one pair, per row."""

    group_size: int
    row_tokens: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class StepSettings(RowSettings):
    """Settings of `rl_step`."""

    old_logps: OldLogps = "self"
    """Source of the old log-probabilities, see `RLSection`."""
    zero_advantage: ZeroAdvantage = "skip"
    """Update or skip steps whose advantages are all 0, see `RLSection`."""
    teaching: TeacherKL | None = None
    min_groups: int | None = None
    """Groups per update with partial rollouts; other groups are resumed in later steps. None: all groups of the step.
    """
    max_staleness: int = 0
    """Maximum steps between the start of a group and its update, with `min_groups`."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Outcome of an online step."""

    metrics: Metrics
    groups_P: Sequence[Group]
    rewards: Rewards
    advantages_PG: Float[np.ndarray, "P G"] | None
    """NaN for groups that the algorithm filtered out; None in preference steps."""
    batch: Batch
    roles_PG: Int[np.ndarray, "P G"] | None = None
    """Roles of samples in preference steps: 1 chosen, -1 rejected, 0 neither."""
    unfinished: Sequence[PartialGroup] = ()
    """Groups to resume in the next step."""


async def rl_step(
    cluster: Cluster,
    algorithm: Algorithm,
    rubric: Rubric,
    sampler: Sampler,
    examples_P: Sequence[Example],
    settings: StepSettings,
    timer: Timer,
    resumed: Sequence[PartialGroup] = (),
) -> StepResult:
    """Run one step: sample, score, filter, assemble, compute log-probabilities as needed, update, sync weights to the
    engine.

    `resumed`: `unfinished` groups of the previous step.
    """
    step = cluster.actor.step_number
    groups_P, unfinished = await sample_some(sampler, examples_P, settings, step, timer, resumed)
    rewards = await score(rubric, groups_P, step, timer)
    kept_P, rewards_PG = algorithm.keep(groups_P, rewards.total_PG)
    with span("assemble"):
        advantages_PG = algorithm.advantage(rewards_PG)
        batch = assemble(
            kept_P,
            advantages_PG,
            ~np.isnan(rewards_PG) & ~np.isnan(advantages_PG),
            row_tokens=settings.row_tokens,
            num_rows=settings.num_rows,
            shares=None if settings.teaching is None else settings.teaching.shares,
            version=None if settings.min_groups is None else step,
        )
    batch, teacher_metrics = add_logps(cluster, algorithm, batch, settings, timer)
    learns = settings.zero_advantage == "update" or has_signal(batch, rewards_PG)
    metrics = update(cluster, batch, timer, learns=learns)
    with span("log"):
        metrics |= teacher_metrics | rollout_metrics(groups_P, rewards, step)
    metrics["advantages/invalid"] = float((np.isnan(advantages_PG) & ~np.isnan(rewards_PG)).mean())
    return StepResult(
        metrics=metrics,
        groups_P=groups_P,
        rewards=rewards,
        advantages_PG=_of_all(groups_P, kept_P, advantages_PG),
        batch=batch,
        unfinished=unfinished,
    )


async def sample_some(
    sampler: Sampler,
    examples_P: Sequence[Example],
    settings: StepSettings,
    step: int,
    timer: Timer,
    resumed: Sequence[PartialGroup],
) -> tuple[list[Group], list[PartialGroup]]:
    """Groups to train on, and unfinished groups for later steps."""
    if settings.min_groups is None:
        return await sample(sampler, examples_P, settings.group_size, step, timer), []
    with timer("rollout"), progress_bar(f"step {step + 1}: sampling", closing=False):
        return await collect_some(
            sampler,
            examples_P,
            settings.group_size,
            step,
            min_groups=settings.min_groups,
            max_staleness=settings.max_staleness,
            resumed=resumed,
        )


def add_logps(
    cluster: Cluster, algorithm: Algorithm, batch: Batch, settings: StepSettings, timer: Timer
) -> tuple[Batch, Metrics]:
    """Add the log-probabilities of reference, old policy and teachers that the loss needs."""
    title = f"step {cluster.actor.step_number + 1}"
    with timer("logps"), progress_bar(f"{title}: log-probabilities", closing=False):
        if algorithm.loss.kl_coef:
            batch = replace(batch, ref_logps=cluster.logps(Role.REFERENCE, batch))
        if settings.old_logps == "trainer":
            batch = replace(batch, old_logps=cluster.logps(Role.ACTOR, batch))
        elif settings.old_logps == "sampler":
            batch = replace(batch, old_logps=batch.sampler_logps)
        if settings.teaching is None:
            return batch, {}
        return add_teachers(batch, cluster.logps(Role.TEACHER, batch), settings.teaching.coef)


def has_signal(batch: Batch, rewards_PG: Float[np.ndarray, "P G"]) -> bool:
    """Tell whether any advantage of the batch differs from 0 by more than the rounding of the rewards."""
    assert batch.advantages is not None
    scale = np.abs(rewards_PG[~np.isnan(rewards_PG)]).max(initial=0.0)
    return not np.abs(batch.advantages).max() <= ROUNDING * scale


async def sample(
    sampler: Sampler, examples_P: Sequence[Example], group_size: int, step: int, timer: Timer
) -> list[Group]:
    """Sample G trajectories of each example."""
    title, samples = f"step {step + 1}", len(examples_P) * group_size
    with timer("rollout"), progress_bar(f"{title}: sampling", samples, closing=False) as advance:
        return await collect(sampler, examples_P, group_size, step, advance)


async def score(rubric: Rubric, groups_P: Sequence[Group], step: int, timer: Timer) -> Rewards:
    title = f"step {step + 1}: rewards"
    with timer("rewards"), progress_bar(title, len(rubric.rewards), closing=False) as advance:
        return await rubric.score(groups_P, advance)


def update(cluster: Cluster, batch: Batch, timer: Timer, *, learns: bool) -> Metrics:
    """Run one update (skipped if not `learns`), then sync the weights to the engine."""
    title = f"step {cluster.actor.step_number + 1}"
    with timer("update"), progress_bar(f"{title}: update", closing=False):
        metrics = jax.block_until_ready(cluster.actor.step(batch, update=learns))
        cluster.sync_weights()
    if batch.advantages is not None:
        metrics["advantages/abs_max"] = float(np.abs(batch.advantages).max())
    return metrics


def _of_all(
    groups_P: Sequence[Group], kept_P: Sequence[Group], advantages_PG: Float[np.ndarray, "Q G"]
) -> Float[np.ndarray, "P G"]:
    by_group = {id(group): advantages for group, advantages in zip(kept_P, advantages_PG, strict=True)}
    left_out = np.full(len(groups_P[0]), np.nan, np.float32)
    return np.stack([by_group.get(id(group), left_out) for group in groups_P])
