"""One step of reinforcement learning, from prompts to updated weights."""

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
from posttrain.rl.sampler import Sampler, Unfinished, collect, collect_some
from posttrain.rl.teachers import TeacherKL, add_teachers
from posttrain.rl.types import Example, Group, Rewards
from posttrain.tracking.console import progress_bar
from posttrain.tree import replace

ROUNDING = 1e-6
"""Advantages up to this share of the largest reward are 0: a mean of equal rewards may be rounded."""


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """How many samples there are of a prompt, and the rows for the worst case: one trajectory, or one pair, per row."""

    group_size: int
    row_tokens: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class StepSettings(RowSettings):
    """What `rl_step` needs beside the objects."""

    old_logps: OldLogps = "self"
    """Source of the proximal log-probabilities, see `RLSection`."""
    zero_advantage: ZeroAdvantage = "skip"
    """Do without an update in a step whose advantages are all 0, see `RLSection`."""
    teaching: TeacherKL | None = None
    enough: int | None = None
    """Groups that a step learns from, where it leaves those that take longer to later ones; None: all that it
    begins."""
    max_staleness: int = 0
    """With `enough`: the most steps between the begin of a group and the step that learns from it."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    metrics: Metrics
    groups_P: Sequence[Group]
    rewards: Rewards
    advantages_PG: Float[np.ndarray, "P G"] | None
    """NaN for groups that the algorithm left out; None where samples are compared in pairs."""
    batch: Batch
    roles_PG: Int[np.ndarray, "P G"] | None = None
    """Where samples are compared in pairs: 1 chosen, -1 rejected, 0 neither."""
    left: Sequence[Unfinished] = ()
    """Groups to go on with in the next step."""


async def rl_step(
    cluster: Cluster,
    algorithm: Algorithm,
    rubric: Rubric,
    sampler: Sampler,
    examples_P: Sequence[Example],
    settings: StepSettings,
    timer: Timer,
    carried: Sequence[Unfinished] = (),
) -> StepResult:
    """Collect, score, keep, assemble, score again where needed, update, hand the weights to the engine.

    `carried`: what the step before has `left`.
    """
    step = cluster.actor.step_number
    groups_P, left = await sample_some(sampler, examples_P, settings, step, timer, carried)
    rewards = await score(rubric, groups_P, step, timer)
    kept_P, rewards_PG = algorithm.keep(groups_P, rewards.total_PG)
    advantages_PG = algorithm.advantage(rewards_PG)
    batch = assemble(
        kept_P,
        advantages_PG,
        ~np.isnan(rewards_PG) & ~np.isnan(advantages_PG),
        row_tokens=settings.row_tokens,
        num_rows=settings.num_rows,
        shares=None if settings.teaching is None else settings.teaching.shares,
        version=None if settings.enough is None else step,
    )
    batch, taught = add_logps(cluster, algorithm, batch, settings, timer)
    learns = settings.zero_advantage == "update" or has_signal(batch, rewards_PG)
    metrics = update(cluster, batch, timer, learns=learns)
    metrics |= taught | rollout_metrics(groups_P, rewards, step)
    metrics["advantages/invalid"] = float((np.isnan(advantages_PG) & ~np.isnan(rewards_PG)).mean())
    return StepResult(
        metrics=metrics,
        groups_P=groups_P,
        rewards=rewards,
        advantages_PG=_of_all(groups_P, kept_P, advantages_PG),
        batch=batch,
        left=left,
    )


async def sample_some(
    sampler: Sampler,
    examples_P: Sequence[Example],
    settings: StepSettings,
    step: int,
    timer: Timer,
    carried: Sequence[Unfinished],
) -> tuple[list[Group], list[Unfinished]]:
    """The groups that a step learns from, and those that it leaves to a later one."""
    if settings.enough is None:
        return await sample(sampler, examples_P, settings.group_size, step, timer), []
    with timer("rollout"), progress_bar(f"step {step + 1}: sampling", closing=False):
        return await collect_some(
            sampler,
            examples_P,
            settings.group_size,
            step,
            enough=settings.enough,
            max_staleness=settings.max_staleness,
            carried=carried,
        )


def add_logps(
    cluster: Cluster, algorithm: Algorithm, batch: Batch, settings: StepSettings, timer: Timer
) -> tuple[Batch, Metrics]:
    """The batch with the log-probabilities of reference and proximal policy that its loss needs, and with teachers."""
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
    """Tell whether any advantage of the batch differs from 0 by more than rounding of the rewards."""
    assert batch.advantages is not None
    scale = np.abs(rewards_PG[~np.isnan(rewards_PG)]).max(initial=0.0)
    return not np.abs(batch.advantages).max() <= ROUNDING * scale


async def sample(
    sampler: Sampler, examples_P: Sequence[Example], group_size: int, step: int, timer: Timer
) -> list[Group]:
    """G samples of each example."""
    title, samples = f"step {step + 1}", len(examples_P) * group_size
    with timer("rollout"), progress_bar(f"{title}: sampling", samples, closing=False) as advance:
        return await collect(sampler, examples_P, group_size, step, advance)


async def score(rubric: Rubric, groups_P: Sequence[Group], step: int, timer: Timer) -> Rewards:
    title = f"step {step + 1}: rewards"
    with timer("rewards"), progress_bar(title, len(rubric.rewards), closing=False) as advance:
        return await rubric.score(groups_P, advance)


def update(cluster: Cluster, batch: Batch, timer: Timer, *, learns: bool) -> Metrics:
    """One update, unless the batch teaches nothing, after which the engine has the new weights."""
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
