"""RL training step: from prompts to updated weights, in the order in which it happens."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from posttrain.batch import Batch
from posttrain.cluster.cluster import Cluster
from posttrain.config.algorithm import OldLogps, ZeroAdvantage
from posttrain.losses.ratios import k3
from posttrain.metrics import Metrics, Timer
from posttrain.reward.types import Rewards
from posttrain.rl.agreement import sampler_disagrees
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.assemble import Shares, TurnValues, assemble, sample_rows, sampled_rows
from posttrain.rl.collector import RolloutCollector, ScoredRollouts
from posttrain.rl.metrics import rollout_metrics
from posttrain.rl.returns import rewards_at_ends, turn_advantages, with_returns
from posttrain.rl.teachers import TeacherKL, add_teachers
from posttrain.rollout.trajectory import Group
from posttrain.runtime.profiler import span
from posttrain.tracking.console import progress_bar
from posttrain.tree import Mean, Metric, added, replace


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


async def rl_step(
    cluster: Cluster, algorithm: Algorithm, collector: RolloutCollector, settings: StepSettings, timer: Timer
) -> StepResult:
    """Run one step: sample and score, then learn from it before anything else is sampled."""
    rollouts = await collector(cluster.version, f"step {cluster.actor.step_number + 1}", timer)
    rollout_memory = cluster.memory("rollout")
    cluster.release_cache()
    result = learn(cluster, algorithm, rollouts, settings, timer)
    with timer("sync"):
        synced = cluster.sync_weights(cluster.version + 1)
    return replace(result, metrics={**result.metrics, **synced, **rollout_memory, **cluster.memory("update")})


def learn(
    cluster: Cluster, algorithm: Algorithm, rollouts: ScoredRollouts, settings: StepSettings, timer: Timer
) -> StepResult:
    """Learn from scored groups: filter, advantages, batches, log-probabilities and values under the weights of now,
    updates. The hand-over of the new weights to the engine is the caller's."""
    rows = {"row_tokens": settings.row_tokens, "num_rows": settings.num_rows}
    penalties_PG, kl_metrics = None, Metrics()
    if algorithm.reward_kl is not None and algorithm.critic is None:
        with timer("logps"):
            penalties_PG, kl_metrics = reward_penalties(cluster, algorithm, rollouts.groups_P, **rows)
    with span("assemble"):
        signal = compute_advantages(algorithm, rollouts, penalties_PG)
        version = rollouts.version if settings.stale or settings.updates * settings.epochs > 1 else None
        shares = None if settings.teaching is None else settings.teaching.shares
        parts = split_minibatches(signal, rollouts, updates=settings.updates, shares=shares, version=version, **rows)
    title = f"step {cluster.actor.step_number + 1}: log-probabilities"
    with timer("logps"), progress_bar(title, closing=False):
        parts = [cluster.actor.encoded(part) for part in parts]
        teaching = settings.teaching
        parts, logp_metrics = compute_logps(cluster, algorithm, parts, old_logps=settings.old_logps, teaching=teaching)
    if settings.entropy is not None:
        parts = [settings.entropy.added_to(part) for part in parts]
    learns = [settings.zero_advantage == "update" or has_signal(part, signal.rewards_PG) for part in parts]
    metrics = update(cluster, parts, learns, settings.epochs, settings.seed, timer)
    with span("log"):
        metrics |= kl_metrics | logp_metrics | rollout_metrics(rollouts.groups_P, rollouts.rewards, rollouts.version)
        metrics |= {**signal_metrics(signal, rollouts, parts), **rollouts.metrics}
        if settings.entropy is not None:
            metrics["entropy/coef"] = settings.entropy.coef
            settings.entropy.observe(metrics)
    return StepResult(
        metrics=metrics,
        groups_P=rollouts.groups_P,
        rewards=rollouts.rewards,
        advantages_PG=advantages_of_all(rollouts.groups_P, signal),
        parts=parts,
    )


ROUNDING = 1e-6
"""Advantages up to this share of the largest reward count as 0: the mean of equal rewards may be rounded."""


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Groups to learn from, with their advantages; with a critic, rewards in place of advantages."""

    kept_P: Sequence[Group]
    rewards_PG: Float[np.ndarray, "Q G"]
    advantages_PG: Float[np.ndarray, "Q G"]
    learned_PG: Bool[np.ndarray, "Q G"]
    """Samples in the loss: with a reward and an advantage, and not left out as truncated."""
    turns_PG: TurnValues | None = None
    """Advantages by token, or with a critic rewards; None: one advantage for each sample."""
    chained: bool = False
    """True if the rewards become returns over all rows of a sample."""


def compute_advantages(
    algorithm: Algorithm, rollouts: ScoredRollouts, penalties_PG: Float[np.ndarray, "P G"] | None
) -> Signal:
    """Groups that refill or the algorithm keeps, in the order of their numbers, and the advantages of their samples.
    Refill may keep none. `penalties_PG`: added to rewards."""
    if penalties_PG is None:
        penalties_PG = np.zeros_like(rollouts.rewards.total_PG)
    rewards_PG = rollouts.rewards.total_PG + penalties_PG
    useful_P = algorithm.kept(rollouts.rewards.total_PG) if rollouts.useful_P is None else rollouts.useful_P
    order = sorted(map(int, np.flatnonzero(useful_P)), key=lambda index: rollouts.groups_P[index][0].group)
    kept_P, rewards_PG = [rollouts.groups_P[index] for index in order], rewards_PG[order]
    advantages_PG = rewards_PG
    if kept_P:
        parts_PG = {name: part[order] for name, part in rollouts.rewards.parts_PG.items()}
        lengths_PG = np.asarray([[sample.num_sampled for sample in group] for group in kept_P])
        advantages_PG = algorithm.advantages(rewards_PG, parts_PG, rollouts.weights, lengths_PG, penalties_PG[order])
    learned_PG = ~np.isnan(rewards_PG) & ~np.isnan(advantages_PG)
    if algorithm.truncated == "mask" and kept_P:
        learned_PG &= not_cut(kept_P)
    turns_PG = None
    if algorithm.critic is not None:
        turns_PG = rewards_at_ends(kept_P, advantages_PG, rollouts.weights)
    elif algorithm.turn_advantages:
        turns_PG = turn_advantages(kept_P, rewards_PG, rollouts.weights)
    return Signal(
        kept_P=kept_P,
        rewards_PG=rewards_PG,
        advantages_PG=advantages_PG,
        learned_PG=learned_PG,
        turns_PG=turns_PG,
        chained=algorithm.critic is not None,
    )


def split_minibatches(
    signal: Signal,
    rollouts: ScoredRollouts,
    *,
    updates: int,
    row_tokens: int,
    num_rows: int,
    shares: Shares | None,
    version: int | None,
) -> list[Batch]:
    """One batch for each update, all of one shape, with whole groups in each. The other arguments: see `assemble`."""
    return [
        assemble(
            [signal.kept_P[index] for index in indices],
            signal.advantages_PG[indices],
            signal.learned_PG[indices],
            like=rollouts.groups_P[0][0],
            row_tokens=row_tokens,
            num_rows=num_rows,
            shares=shares,
            version=version,
            turns_PG=None if signal.turns_PG is None else [signal.turns_PG[index] for index in indices],
            chained=signal.chained,
        )
        for indices in np.array_split(np.arange(len(signal.kept_P)), updates)
    ]


def has_signal(batch: Batch, rewards_PG: Float[np.ndarray, "P G"]) -> bool:
    """Tell whether any advantage of the batch differs from 0 by more than the rounding of the rewards."""
    assert batch.advantages is not None
    scale = np.abs(rewards_PG[~np.isnan(rewards_PG)]).max(initial=0.0)
    return not np.abs(batch.advantages).max() <= ROUNDING * scale


def signal_metrics(signal: Signal, rollouts: ScoredRollouts, parts: Sequence[Batch]) -> dict[str, float]:
    """Metrics of groups and advantages. `advantages/invalid`: share of samples with a reward but no advantage."""
    invalid = np.isnan(signal.advantages_PG) & ~np.isnan(signal.rewards_PG)
    return {
        "groups/kept": float(len(signal.kept_P)),
        "groups/filtered": float(len(rollouts.groups_P) - len(signal.kept_P)),
        "advantages/invalid": float(invalid.mean()) if invalid.size else 0.0,
        "advantages/abs_max": max(float(np.abs(np.asarray(part.advantages)).max()) for part in parts),
    }


def advantages_of_all(groups_P: Sequence[Group], signal: Signal) -> Float[np.ndarray, "P G"]:
    """Advantages of all groups; NaN for those that are left out."""
    kept = zip(signal.kept_P, signal.advantages_PG, strict=True)
    by_group = {id(group): advantages for group, advantages in kept}
    left_out = np.full(len(groups_P[0]), np.nan, np.float32)
    return np.stack([by_group.get(id(group), left_out) for group in groups_P])


def compute_logps(
    cluster: Cluster,
    algorithm: Algorithm,
    parts: Sequence[Batch],
    *,
    old_logps: OldLogps,
    teaching: TeacherKL | None,
) -> tuple[list[Batch], Metrics]:
    """Batches with what the loss needs of actor, reference, teachers and critic, under the weights of now; and metrics.

    With a critic the advantages become GAE's, per token.
    """
    batches, entropies, of_teachers = [], [], list[Metrics]()
    for part in parts:
        if algorithm.loss.kl_coef > 0 or (algorithm.critic is not None and algorithm.reward_kl is not None):
            part = replace(part, ref_logps=cluster.reference.logps(part))
        if old_logps == "trainer" or algorithm.top_entropy is not None:
            stats = cluster.actor.stats(part)
            entropies.append(np.asarray(stats.entropy))
            if old_logps == "trainer":
                part = replace(part, old_logps=np.asarray(stats.logps))
        if old_logps == "sampler":
            part = replace(part, old_logps=part.sampler_logps)
        if teaching is not None:
            part, teacher_metrics = add_teachers(part, cluster.teachers.logps(part), teaching.coef)
            of_teachers.append(teacher_metrics)
        batches.append(part)
    metrics = merged(of_teachers) if of_teachers else {}
    if algorithm.critic is not None:
        values = [cluster.critic.values(part) for part in batches]
        batches, measured = with_returns(batches, values, algorithm.critic.gae, algorithm.reward_kl)
        metrics |= measured
    if algorithm.top_entropy is not None:
        batches, least = top_entropy(batches, entropies, algorithm.top_entropy)
        metrics["entropy/threshold"] = least
    return batches, metrics


def reward_penalties(
    cluster: Cluster, algorithm: Algorithm, groups_P: Sequence[Group], *, row_tokens: int, num_rows: int
) -> tuple[Float[np.ndarray, "P G"], Metrics]:
    """KL penalty of each sample, to be added to its reward, against the log-probabilities of the sampler; and `kl`, as
    a loss tells it: the mean of k3 over sampled tokens, whatever estimates the penalty."""
    assert algorithm.reward_kl is not None
    rows, owners = sampled_rows(groups_P)
    of_samples, total, count = np.zeros(sum(map(len, groups_P)), np.float32), 0.0, 0.0
    for start in range(0, len(rows), num_rows):
        batch, where = sample_rows(rows[start : start + num_rows], row_tokens=row_tokens, num_rows=num_rows)
        batch = cluster.actor.encoded(batch)
        own = np.asarray(batch.sampler_logps)
        reference = cluster.reference.logps(batch)
        penalties = algorithm.reward_kl.of_samples(batch, own, reference, where)
        np.add.at(of_samples, owners[start : start + num_rows], penalties)
        mask = np.asarray(batch.loss_weight) > 0
        total += float(k3(jnp.asarray(own), jnp.asarray(reference), jnp.asarray(mask)).sum())
        count += float(mask.sum())
    return of_samples.reshape(len(groups_P), -1), {"kl": Mean(total=total, weight=count)}


class EntropyControl:
    """Coefficient of the entropy bonus that rises by `step` after each batch of rollouts whose mean entropy is below
    `target` nats, and falls by it else, never below 0. It acts only while the latest entropy is at most the target."""

    def __init__(self, *, target: float, start: float, step: float):
        self._target, self._step = target, step
        self._coef, self._entropy = start, 0.0

    @property
    def coef(self) -> float:
        """Coefficient of the next updates."""
        return self._coef if self._entropy <= self._target else 0.0

    def added_to(self, batch: Batch) -> Batch:
        """Add the coefficient to each sampled token of the batch."""
        sampled = np.asarray(batch.loss_weight) > 0
        return replace(batch, entropy_coefs=np.where(sampled, np.float32(self.coef), np.float32(0)))

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Take note of the mean entropy of a step. Reads from the device."""
        entropy = metrics["entropy"]
        assert isinstance(entropy, Mean)
        self._entropy = entropy.value()
        if math.isnan(self._entropy):  # no token was learned from
            self._entropy = 0.0
            return
        self._coef = max(0.0, self._coef + (self._step if self._entropy < self._target else -self._step))

    def state(self) -> dict[str, float]:
        return {"coef": self._coef, "entropy": self._entropy}

    def restore(self, state: Mapping[str, float]) -> None:
        self._coef, self._entropy = state["coef"], state["entropy"]


def not_cut(groups_P: Sequence[Group]) -> Bool[np.ndarray, "P G"]:
    """Mask of samples that were not cut for want of tokens (overlong filter, arXiv:2503.14476 section 3.4). The others
    have no loss but count in the baseline of their group."""
    return np.asarray([[not trajectory.is_cut for trajectory in group] for group in groups_P], bool)


def top_entropy(
    parts: Sequence[Batch], entropies: Sequence[Float[np.ndarray, "B T"]], share: float
) -> tuple[list[Batch], float]:
    """Advantage 0 on all but the `share` of sampled tokens with the highest entropy; also returns the least entropy
    kept. arXiv:2506.01939.

    The quantile is over all parts of a step, so that micro-batches and rows do not change it. KL and entropy bonus act
    on all tokens, and the loss's denominator counts them.
    """
    if not 0 < share < 1:
        raise ValueError(f"top_entropy={share} must be above 0 and below 1, the share of tokens to learn from")
    counted = [np.asarray(part.loss_weight) > 0 for part in parts]
    sampled = np.concatenate([values[mask] for values, mask in zip(entropies, counted, strict=True)]).astype(np.float32)
    least = float(np.quantile(sampled, 1 - share)) if sampled.size else 0.0
    kept = []
    for part, values in zip(parts, entropies, strict=True):
        advantages = np.asarray(part.advantages)
        kept.append(replace(part, advantages=np.where(values >= least, advantages, np.zeros_like(advantages))))
    return kept, least


SUMMED = ("num_tokens", "perf/tflops", "perf/ideal_s")
"""Metrics of an update that add up over several."""


def update(
    cluster: Cluster, parts: Sequence[Batch], learns: Sequence[bool], epochs: int, seed: int, timer: Timer
) -> Metrics:
    """One update for each part and epoch, skipped where not `learns`.

    If sampler and trainer disagree in the first update, there are no others: it changed no weights.
    """
    title, done, several = f"step {cluster.actor.step_number + 1}", list[Metrics](), len(parts) * epochs > 1
    with timer("update"), cluster.updating(), progress_bar(f"{title}: update", closing=False):
        for number in _order(len(parts), epochs, [seed, cluster.version]):
            part = _aged(parts[number], len(done)) if several else parts[number]
            of_actor = cluster.update_actor(part, update=learns[number] and not cluster.warming_up)
            done.append({**of_actor, **cluster.update_critic(part), **cluster.update_drafter(part)})
            # One read of the device, where other updates would follow.
            if several and len(done) == 1 and bool(sampler_disagrees(of_actor)):
                break
        jax.block_until_ready(done)
    # Tokens of the batch, which every epoch passes over again: the first epoch has each of them once.
    tokens_of_updates: list[Any] = [one["num_tokens"] for one in done[: len(parts)]]
    return {**merged(done), "num_tokens": sum(tokens_of_updates)}


def _order(num_parts: int, epochs: int, seed: Sequence[int]) -> Iterator[int]:
    """Numbers of the parts: in order in the first epoch, then in a random one."""
    yield from range(num_parts)
    draw = np.random.default_rng(seed)
    for _ in range(epochs - 1):
        yield from map(int, draw.permutation(num_parts))


def _aged(batch: Batch, updates: int) -> Batch:
    """Batch before which there were updates on other parts: its tokens are so much older."""
    assert batch.staleness is not None, "batches of several updates carry their staleness"
    sampled = np.asarray(batch.loss_weight) > 0
    return replace(batch, staleness=np.where(sampled, np.asarray(batch.staleness) + updates, 0).astype(np.int32))


def merged(updates: Sequence[Mapping[str, Any]]) -> Metrics:
    """Metrics over several updates: means, maxima and quantiles over all tokens, the sum of `SUMMED`, the mean of other
    numbers over the updates that have them."""
    if len(updates) == 1:
        return dict(updates[0])
    metrics: Metrics = {}
    for name in dict.fromkeys(name for one in updates for name in one):
        values = [one[name] for one in updates if name in one]
        if isinstance(values[0], Metric):
            metrics[name] = functools.reduce(added, values)
        else:
            stacked = jnp.stack([jnp.asarray(value) for value in values])
            metrics[name] = stacked.sum(axis=0) if name in SUMMED else stacked.mean(axis=0)
    return metrics
