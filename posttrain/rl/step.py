"""RL training step: from prompts to updated weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from posttrain.batch import Batch
from posttrain.cluster.cluster import Cluster, Role
from posttrain.config.rl import OldLogps, ZeroAdvantage
from posttrain.metrics import Metrics, Timer
from posttrain.rl.act import Act, Acted
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.assemble import assemble
from posttrain.rl.metrics import rollout_metrics
from posttrain.rl.teachers import TeacherKL, add_teachers
from posttrain.rl.types import Group, Rewards
from posttrain.rl.update import merged, update
from posttrain.runtime.profiler import span
from posttrain.tracking.console import progress_bar
from posttrain.tree import replace

ROUNDING = 1e-6
"""Advantages up to this share of the largest reward count as 0: the mean of equal rewards may be rounded."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings of the learning half of `rl_step`."""

    row_tokens: int
    num_rows: int
    """Rows of an update's batch, enough for the worst case: one trajectory per row."""
    updates: int
    """Updates per batch of rollouts, each on its own part of the groups."""
    epochs: int
    """Passes over these parts."""
    seed: int
    """Seed of the order of the parts after the first epoch."""
    old_logps: OldLogps
    """Source of the old log-probabilities, see `RLSection`; `self` with a single update only."""
    zero_advantage: ZeroAdvantage
    """Update or skip batches whose advantages are all 0, see `RLSection`."""
    stale: bool
    """True if tokens may be older than the present weights: batches then carry their staleness."""
    teaching: TeacherKL | None = None

    def __post_init__(self) -> None:
        if self.old_logps == "self" and self.updates * self.epochs > 1:
            raise ValueError(
                f"old_logps=self with updates={self.updates} and epochs={self.epochs}: after the first update the "
                "policy is not the one that sampled; use old_logps=trainer"
            )


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Outcome of an online step."""

    metrics: Metrics
    groups_P: Sequence[Group]
    rewards: Rewards
    advantages_PG: Float[np.ndarray, "P G"] | None
    """NaN for groups that the algorithm filtered out; None in preference steps."""
    parts: Sequence[Batch]
    """Batch of each update of the first epoch."""
    roles_PG: Int[np.ndarray, "P G"] | None = None
    """Roles of samples in preference steps: 1 chosen, -1 rejected, 0 neither."""

    @property
    def batch(self) -> Batch:
        """Batch of the step's single update."""
        (batch,) = self.parts
        return batch


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Groups to learn from, with their advantages."""

    kept_P: Sequence[Group]
    rewards_PG: Float[np.ndarray, "Q G"]
    advantages_PG: Float[np.ndarray, "Q G"]


async def rl_step(cluster: Cluster, algorithm: Algorithm, act: Act, settings: StepSettings, timer: Timer) -> StepResult:
    """Run one step: sample and score, then learn from it before anything else is sampled."""
    acted = await act(cluster.version, f"step {cluster.actor.step_number + 1}", timer)
    held = cluster.memory("rollout")
    result = learn(cluster, algorithm, acted, settings, timer)
    return replace(result, metrics={**result.metrics, **held, **cluster.memory("update")})


def learn(cluster: Cluster, algorithm: Algorithm, acted: Acted, settings: StepSettings, timer: Timer) -> StepResult:
    """Learn from scored groups: filter, advantages, batches, log-probabilities under the weights of now, updates, sync
    of the weights to the engine."""
    with span("assemble"):
        signal = signal_of(algorithm, acted)
        parts = parts_of(signal, acted, settings)
    title = f"step {cluster.actor.step_number + 1}: log-probabilities"
    with timer("logps"), progress_bar(title, closing=False):
        scored = [add_logps(cluster, algorithm, part, settings) for part in parts]
    parts = [part for part, _ in scored]
    learns = [settings.zero_advantage == "update" or has_signal(part, signal.rewards_PG) for part in parts]
    metrics = update(cluster, parts, learns, settings.epochs, settings.seed, timer)
    with span("log"):
        metrics |= merged([found for _, found in scored])
        metrics |= rollout_metrics(acted.groups_P, acted.rewards, acted.version)
        metrics |= signal_metrics(signal, parts)
        metrics |= {**acted.metrics, "groups/kept": float(len(signal.kept_P))}
        metrics["groups/left_out"] = float(len(acted.groups_P) - len(signal.kept_P))
    return StepResult(
        metrics=metrics,
        groups_P=acted.groups_P,
        rewards=acted.rewards,
        advantages_PG=_of_all(acted.groups_P, signal),
        parts=parts,
    )


def signal_of(algorithm: Algorithm, acted: Acted) -> Signal:
    """Groups that refill or the algorithm keeps, in the order of their numbers, and the advantages of their samples.
    Refill may keep none."""
    if acted.useful_P is None:
        kept_P, rewards_PG = algorithm.keep(acted.groups_P, acted.rewards.total_PG)
    else:
        order = sorted(map(int, np.flatnonzero(acted.useful_P)), key=lambda index: acted.groups_P[index][0].group)
        kept_P, rewards_PG = [acted.groups_P[index] for index in order], acted.rewards.total_PG[order]
    advantages_PG = algorithm.advantage(rewards_PG) if kept_P else rewards_PG
    return Signal(kept_P=kept_P, rewards_PG=rewards_PG, advantages_PG=advantages_PG)


def parts_of(signal: Signal, acted: Acted, settings: StepSettings) -> list[Batch]:
    """One batch for each update, all of one shape, with whole groups in each."""
    valid_PG = ~np.isnan(signal.rewards_PG) & ~np.isnan(signal.advantages_PG)
    return [
        assemble(
            [signal.kept_P[index] for index in indices],
            signal.advantages_PG[indices],
            valid_PG[indices],
            like=acted.groups_P[0][0],
            row_tokens=settings.row_tokens,
            num_rows=settings.num_rows,
            shares=None if settings.teaching is None else settings.teaching.shares,
            version=acted.version if settings.stale or settings.updates * settings.epochs > 1 else None,
        )
        for indices in np.array_split(np.arange(len(signal.kept_P)), settings.updates)
    ]


def add_logps(cluster: Cluster, algorithm: Algorithm, batch: Batch, settings: StepSettings) -> tuple[Batch, Metrics]:
    """Add the log-probabilities of reference, old policy and teachers that the loss needs."""
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


def signal_metrics(signal: Signal, parts: Sequence[Batch]) -> dict[str, float]:
    """Metrics of the advantages. `advantages/invalid`: share of samples with a reward but without an advantage."""
    invalid = np.isnan(signal.advantages_PG) & ~np.isnan(signal.rewards_PG)
    return {
        "advantages/invalid": float(invalid.mean()) if invalid.size else 0.0,
        "advantages/abs_max": max(float(np.abs(np.asarray(part.advantages)).max()) for part in parts),
    }


def _of_all(groups_P: Sequence[Group], signal: Signal) -> Float[np.ndarray, "P G"]:
    kept = zip(signal.kept_P, signal.advantages_PG, strict=True)
    by_group = {id(group): advantages for group, advantages in kept}
    left_out = np.full(len(groups_P[0]), np.nan, np.float32)
    return np.stack([by_group.get(id(group), left_out) for group in groups_P])
