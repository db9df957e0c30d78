"""One step of reinforcement learning, from prompts to updated weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int

from posttrain.batch import Batch
from posttrain.cluster.cluster import Cluster, Role
from posttrain.errors import RunError
from posttrain.metrics import Metrics, Timer
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.assemble import assemble
from posttrain.rl.rewards import Rubric
from posttrain.rl.sampler import Sampler, Unfinished, collect, collect_some
from posttrain.rl.teachers import TeacherKL, add_teachers
from posttrain.rl.types import Example, Group, Rewards, Trajectory
from posttrain.statistics import standard_error
from posttrain.tracking.console import progress_bar
from posttrain.tree import replace

LOGP_DIFFERENCE = "sampling/logp_difference/mean"
MAX_LOGP_DIFFERENCE = 0.1
"""Nats per token. One model in float32 differs by 1e-6, in bfloat16 by 5e-3; a sampler of 260,000 parameters in int8 by
0.02, in fp8 by 0.06."""


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """How many samples there are of a prompt, and the rows for the worst case: one trajectory, or one pair, per row."""

    group_size: int
    row_tokens: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class StepSettings(RowSettings):
    """What `rl_step` needs beside the objects."""

    recompute_old_logps: bool
    teaching: TeacherKL | None = None
    enough: int | None = None
    """Groups that a step learns from, where it leaves those that take longer to later ones; None: all that it
    begins."""


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
    title = f"step {step + 1}"
    left: list[Unfinished] = []
    if settings.enough is None:
        groups_P = await sample(sampler, examples_P, settings.group_size, step, timer)
    else:
        with timer("rollout"), progress_bar(f"{title}: sampling", closing=False):
            groups_P, left = await collect_some(
                sampler, examples_P, settings.group_size, step, enough=settings.enough, carried=carried
            )
    rewards = await score(rubric, groups_P, step, timer)
    kept_P, rewards_PG = algorithm.keep(groups_P, rewards.total_PG)
    advantages_PG = algorithm.advantage(rewards_PG)
    batch = assemble(
        kept_P,
        advantages_PG,
        ~np.isnan(rewards_PG),
        row_tokens=settings.row_tokens,
        num_rows=settings.num_rows,
        shares=None if settings.teaching is None else settings.teaching.shares,
    )
    taught: Metrics = {}
    with timer("logps"), progress_bar(f"{title}: log-probabilities", closing=False):
        if algorithm.loss.kl_coef:
            batch = replace(batch, ref_logps=cluster.logps(Role.REFERENCE, batch))
        if settings.recompute_old_logps:
            batch = replace(batch, old_logps=cluster.logps(Role.ACTOR, batch))
        if settings.teaching is not None:
            batch, taught = add_teachers(batch, cluster.logps(Role.TEACHER, batch), settings.teaching.coef)
    metrics = update(cluster, batch, timer)
    metrics |= taught | rollout_metrics(groups_P, rewards, step)
    return StepResult(
        metrics=metrics,
        groups_P=groups_P,
        rewards=rewards,
        advantages_PG=_of_all(groups_P, kept_P, advantages_PG),
        batch=batch,
        left=left,
    )


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


def update(cluster: Cluster, batch: Batch, timer: Timer) -> Metrics:
    """One update, after which the engine has the new weights."""
    title = f"step {cluster.actor.step_number + 1}"
    with timer("update"), progress_bar(f"{title}: update", closing=False):
        metrics = jax.block_until_ready(cluster.actor.step(batch))
        cluster.sync_weights()
    return metrics


def _of_all(
    groups_P: Sequence[Group], kept_P: Sequence[Group], advantages_PG: Float[np.ndarray, "Q G"]
) -> Float[np.ndarray, "P G"]:
    by_group = {id(group): advantages for group, advantages in zip(kept_P, advantages_PG, strict=True)}
    left_out = np.full(len(groups_P[0]), np.nan, np.float32)
    return np.stack([by_group.get(id(group), left_out) for group in groups_P])


def check_agreement(metrics: Mapping[str, float], step: int) -> None:
    """RunError when sampler and trainer give the same tokens log-probabilities that are too far apart. A step with
    samples that began under earlier weights says nothing of that: they have a reason to be apart."""
    gap = metrics[LOGP_DIFFERENCE]
    if gap > MAX_LOGP_DIFFERENCE and not metrics["sampling/staleness/mean"]:
        raise RunError(
            f"step {step}: sampler and trainer disagree by {gap:.3f} nats per token on average, more than "
            f"{MAX_LOGP_DIFFERENCE}: stale weights, another temperature, or another precision in the engine"
        )


class RewardWatch:
    """Ends a run whose rewards say nothing: RunError after `limit` steps in a row of which no sample has a reward.

    A single such step may be chance, where functions apply to some rows only. A run without functions has no rewards to
    miss: it learns from teachers.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._steps = 0

    def see(self, step: int, rewards: Rewards) -> None:
        nothing = bool(rewards.parts_PG) and np.isnan(rewards.total_PG).all()
        self._steps = self._steps + 1 if nothing else 0
        if self._steps >= self._limit:
            why = rewards.errors[0].error if rewards.errors else "the functions return None: they do not apply"
            raise RunError(
                f"step {step}: no sample has a reward, in {self._steps} steps in a row, and so nothing is learned "
                f"({why}); see that the rewards apply to the rows of dataset"
            )


def rollout_metrics(groups_P: Sequence[Group], rewards: Rewards, step: int) -> dict[str, float]:
    """What the samples of a step and their rewards say."""
    return sample_metrics(groups_P, step) | (_reward_metrics(rewards) if rewards.parts_PG else {})


def sample_metrics(groups_P: Sequence[Group], step: int) -> dict[str, float]:
    """What the samples of a step say, under the names that practitioners search for. `staleness`: updates since a token
    was sampled."""
    samples = [trajectory for group in groups_P for trajectory in group]
    lengths = np.asarray([sample.num_sampled for sample in samples])
    clipped = np.asarray([sample.stop == "length" for sample in samples])
    ended = lengths[~clipped]
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(clipped.mean()),
        "completions/mean_terminated_length": float(ended.mean()) if ended.size else float("nan"),
        "completions/num_tokens": float(lengths.sum()),
        "sampling/kept_mass/mean": _kept_mass(samples),
        "sampling/staleness/mean": _staleness(samples, step),
    }


def _reward_metrics(rewards: Rewards) -> dict[str, float]:
    total_PG = rewards.total_PG
    std_P = _std_of_groups(total_PG)
    failed = {kind: sum(e.kind == kind for e in rewards.errors) for kind in ("error", "timeout")}
    metrics = {
        "reward": _nanmean(total_PG),
        "reward_stderr": standard_error(total_PG),
        "reward_std": _nanmean(std_P),
        "frac_reward_zero_std": _nanmean(np.where(np.isnan(std_P), np.nan, std_P == 0.0)),
        "rewards/invalid": float(np.isnan(total_PG).mean()),
        "rewards/errors": failed["error"] / total_PG.size,
        "rewards/timeouts": failed["timeout"] / total_PG.size,
    }
    for name, part in rewards.parts_PG.items():
        metrics[f"rewards/{name}/mean"] = _nanmean(part)
        metrics[f"rewards/{name}/std"] = float(np.nanstd(part)) if not np.isnan(part).all() else float("nan")
    return metrics | dict(rewards.metrics)


def _nanmean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if not np.isnan(values).all() else float("nan")


def _std_of_groups(total_PG: np.ndarray) -> np.ndarray:
    """Standard deviation (n - 1) within each group; NaN where fewer than two rewards are valid."""
    std = np.full(len(total_PG), np.nan)
    for index, row in enumerate(total_PG):
        valid = row[~np.isnan(row)]
        if valid.size > 1:
            # Equal rewards must give exactly 0, which the rounding of a mean would not.
            std[index] = 0.0 if valid.min() == valid.max() else valid.std(ddof=1)
    return std


def _staleness(samples: Sequence[Trajectory], step: int) -> float:
    versions = np.concatenate([np.asarray(s.versions)[np.asarray(s.sampled)] for s in samples])
    return float((step - versions).mean()) if versions.size else 0.0


def _kept_mass(samples: Sequence[Trajectory]) -> float:
    kept = np.concatenate([np.asarray(s.kept_logps)[np.asarray(s.sampled)] for s in samples])
    return float(np.exp(kept).mean()) if kept.size else float("nan")
