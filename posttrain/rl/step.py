"""RL training step: from prompts to updated weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from posttrain.batch import Batch
from posttrain.cluster.cluster import Cluster
from posttrain.config.rl import OldLogps, ZeroAdvantage
from posttrain.metrics import Metrics, Timer
from posttrain.reward.types import Rewards
from posttrain.rl.act import Act, Acted
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.annotate import annotated, reward_penalties
from posttrain.rl.entropy import EntropyControl
from posttrain.rl.metrics import rollout_metrics
from posttrain.rl.signal import advantages_of_all, has_signal, parts_of, signal_metrics, signal_of
from posttrain.rl.teachers import TeacherKL
from posttrain.rl.update import update
from posttrain.rollout.trajectory import Group
from posttrain.runtime.profiler import span
from posttrain.tracking.console import progress_bar
from posttrain.tree import replace


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
    entropy: EntropyControl | None = None
    """Adaptive coefficient of the entropy bonus; None: that of the loss."""

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


async def rl_step(cluster: Cluster, algorithm: Algorithm, act: Act, settings: StepSettings, timer: Timer) -> StepResult:
    """Run one step: sample and score, then learn from it before anything else is sampled."""
    acted = await act(cluster.version, f"step {cluster.actor.step_number + 1}", timer)
    held = cluster.memory("rollout")
    result = learn(cluster, algorithm, acted, settings, timer)
    with timer("sync"):
        synced = cluster.sync_weights(cluster.version + 1)
    return replace(result, metrics={**result.metrics, **synced, **held, **cluster.memory("update")})


def learn(cluster: Cluster, algorithm: Algorithm, acted: Acted, settings: StepSettings, timer: Timer) -> StepResult:
    """Learn from scored groups: filter, advantages, batches, log-probabilities and values under the weights of now,
    updates. The hand-over of the new weights to the engine is the caller's."""
    rows = {"row_tokens": settings.row_tokens, "num_rows": settings.num_rows}
    penalties_PG, told = None, Metrics()
    if algorithm.reward_kl is not None and algorithm.critic is None:
        with timer("logps"):
            penalties_PG, told = reward_penalties(cluster, algorithm, acted.groups_P, **rows)
    with span("assemble"):
        signal = signal_of(algorithm, acted, penalties_PG)
        version = acted.version if settings.stale or settings.updates * settings.epochs > 1 else None
        shares = None if settings.teaching is None else settings.teaching.shares
        parts = parts_of(signal, acted, updates=settings.updates, shares=shares, version=version, **rows)
    title = f"step {cluster.actor.step_number + 1}: log-probabilities"
    with timer("logps"), progress_bar(title, closing=False):
        teaching = settings.teaching
        parts, found = annotated(cluster, algorithm, parts, old_logps=settings.old_logps, teaching=teaching)
    if settings.entropy is not None:
        parts = [settings.entropy.added_to(part) for part in parts]
    learns = [settings.zero_advantage == "update" or has_signal(part, signal.rewards_PG) for part in parts]
    metrics = update(cluster, parts, learns, settings.epochs, settings.seed, timer)
    with span("log"):
        metrics |= told | found | rollout_metrics(acted.groups_P, acted.rewards, acted.version)
        metrics |= {**signal_metrics(signal, acted, parts), **acted.metrics}
        if settings.entropy is not None:
            metrics["entropy/coef"] = settings.entropy.coef
            settings.entropy.observe(metrics)
    return StepResult(
        metrics=metrics,
        groups_P=acted.groups_P,
        rewards=acted.rewards,
        advantages_PG=advantages_of_all(acted.groups_P, signal),
        parts=parts,
    )
