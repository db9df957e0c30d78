"""Advantages and returns per token on the host: rewards with a KL penalty, discounted returns, GAE, whitening."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from posttrain.batch import Batch
from posttrain.data.packing import RowSpan
from posttrain.losses.ratios import KLEstimator, gradient_in_reward
from posttrain.reward.function import ENV_REWARD
from posttrain.rl.assemble import TurnValues
from posttrain.rollout.trajectory import Group, Trajectory
from posttrain.tree import replace

STD_EPS = 1e-4
"""Constant added to the standard deviation of a group's returns."""


def rewards_at_ends(
    groups_P: Sequence[Group], rewards_PG: Float[np.ndarray, "P G"], weights: Mapping[str, float]
) -> TurnValues:
    """Reward of each token: of a turn at its last token, what is left of the sample's at its last one."""
    weight = weights.get(ENV_REWARD, 0.0)
    return [
        [_at_ends(sample, float(reward), weight) for sample, reward in zip(group, rewards, strict=True)]
        for group, rewards in zip(groups_P, rewards_PG, strict=True)
    ]


def turn_advantages(
    groups_P: Sequence[Group], rewards_PG: Float[np.ndarray, "P G"], weights: Mapping[str, float]
) -> TurnValues:
    """Advantage of each token: the sum of rewards from its turn on, minus the mean over the group's samples that have
    this turn, divided by their standard deviation (n - 1) + 1e-4. Samples without a reward (NaN) do not count."""
    weight = weights.get(ENV_REWARD, 0.0)
    return [_advantages(group, rewards, weight) for group, rewards in zip(groups_P, rewards_PG, strict=True)]


def _at_ends(sample: Trajectory, reward: float, weight: float) -> list[np.ndarray]:
    values = [np.zeros(len(row.tokens), np.float64) for row in sample.rows]
    given = 0.0
    for number, turn in sample.turns_in_time:
        if turn.reward is not None:
            values[number][turn.end - 1] += weight * turn.reward
            given += weight * turn.reward
    for value, times in zip(values, sample.times(), strict=True):
        value[times == max(sample.num_sampled - 1, 0)] += reward - given
    return values


def _advantages(group: Group, rewards_G: Float[np.ndarray, " G"], weight: float) -> list[list[np.ndarray]]:
    returns = [_returns(sample, float(reward), weight) for sample, reward in zip(group, rewards_G, strict=True)]
    longest = max(map(len, returns))
    table = np.full((len(group), longest), np.nan)
    for number, one in enumerate(returns):
        table[number, : len(one)] = one
    for turn in table.T:
        known = turn[~np.isnan(turn)]
        if known.size:
            spread = known.std(ddof=1) if known.size > 1 else 0.0
            turn[:] = (turn - known.mean()) / (spread + STD_EPS)
    return [_spread(sample, advantages) for sample, advantages in zip(group, table, strict=True)]


def _returns(sample: Trajectory, reward: float, weight: float) -> np.ndarray:
    """Sum of rewards from each turn on; rewards beside the environment's come at the end."""
    given = [weight * (turn.reward or 0.0) for _, turn in sample.turns_in_time]
    steps = np.asarray(given or [0.0], np.float64)
    steps[-1] += reward - float(np.sum(given))
    return np.cumsum(steps[::-1])[::-1]


def _spread(sample: Trajectory, advantages: np.ndarray) -> list[np.ndarray]:
    values = [np.zeros(len(row.tokens), np.float32) for row in sample.rows]
    for (number, turn), advantage in zip(sample.turns_in_time, advantages, strict=False):
        values[number][turn.start : turn.end] = advantage
    return values


Tokens = Float[np.ndarray, "B T"]
Mask = Bool[np.ndarray, "B T"]
Segments = Int[np.ndarray, "B T"]

VARIANCE_EPS = 1e-8
"""Constant added to a variance before its root is divided by."""


@dataclass(frozen=True, kw_only=True)
class RewardKL:
    """KL penalty in the reward: -coef * estimate per sampled token, without a gradient of its own.

    k1 has the expected gradient of KL(policy || reference); those of k2 and k3 differ, see
    `posttrain.losses.ratios.gradient_in_reward`.
    """

    coef: float
    estimator: KLEstimator

    def __post_init__(self) -> None:
        if self.coef <= 0:
            raise ValueError(f"kl_coef={self.coef} must be positive for a KL in the reward")
        if gradient_in_reward(self.estimator) is None:
            raise ValueError("RewardKL.estimator must be k1, k2 or k3")

    def __call__(self, logps: Tokens, ref_logps: Tokens, mask: Mask) -> Tokens:
        """Penalty of each sampled token, to be added to its reward; 0 elsewhere."""
        return -self.coef * np.asarray(self.estimator(jnp.asarray(logps), jnp.asarray(ref_logps), jnp.asarray(mask)))

    def of_samples(
        self, batch: Batch, logps: Tokens, ref_logps: Tokens, where: Sequence[RowSpan]
    ) -> Float[np.ndarray, " N"]:
        """Penalty of each packed sample: the sum over its sampled tokens."""
        penalties = self(logps, ref_logps, np.asarray(batch.loss_weight) > 0)
        return np.asarray([penalties[span.row, span.tokens].sum() for span in where], np.float32)


@dataclass(frozen=True, kw_only=True)
class GAE:
    """Generalised advantage estimation, arXiv:1506.02438 eq. 16, over sampled tokens or turns."""

    gamma: float
    """Discount per sampled token, or per turn."""
    lam: float
    """Weight of longer returns: 0 trusts the critic alone, 1 the rewards."""
    whiten: bool
    """Standardise advantages over all tokens of a step."""
    level: Literal["token", "turn"] = "token"
    """Step of the estimate: a sampled token, or a turn, whose tokens then share one advantage."""

    def __post_init__(self) -> None:
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= value <= 1:
                raise ValueError(f"GAE.{name}={value} must be from 0 to 1")


def gae(
    rewards: Tokens, values: Tokens, mask: Mask, segments: Segments, *, gamma: float, lam: float
) -> tuple[Tokens, Tokens]:
    """Advantages and returns (advantage + value) of sampled tokens, float64; 0 elsewhere.

    `values[b, t]`: value before token t. Tokens that were not sampled, such as answers of tools between two turns, are
    stepped over: a sequence has the advantages that it would have without them. ValueError if such a token has a
    reward.
    """
    if np.asarray(rewards)[~mask].any():
        raise ValueError("gae: a token that was not sampled has a reward; put it on the sampled token before")
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    advantages = np.zeros(rewards.shape)
    after, value_after = np.zeros(len(rewards)), np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        if t + 1 < rewards.shape[1]:
            inside = segments[:, t] == segments[:, t + 1]
            after, value_after = np.where(inside, after, 0.0), np.where(inside, value_after, 0.0)
        sampled = mask[:, t]
        delta = rewards[:, t] + gamma * value_after - values[:, t]
        after = np.where(sampled, delta + gamma * lam * after, after)
        value_after = np.where(sampled, values[:, t], value_after)
        advantages[:, t] = np.where(sampled, after, 0.0)
    return advantages, np.where(mask, advantages + values, 0.0)


def turn_gae(
    rewards: Tokens, values: Tokens, mask: Mask, segments: Segments, *, gamma: float, lam: float
) -> tuple[Tokens, Tokens]:
    """`gae` with turns, runs of sampled tokens, as steps: the value of a turn is that before its first token, its
    reward the sum over its tokens; each of its tokens gets the turn's advantage and return."""
    first = mask.copy()
    first[:, 1:] &= ~mask[:, :-1] | (segments[:, 1:] != segments[:, :-1])
    numbers = np.cumsum(first, axis=1) - 1  # of the turn that a token is in, or comes after
    summed = np.zeros(mask.shape)
    rows = np.broadcast_to(np.arange(len(mask))[:, None], mask.shape)
    starts = np.zeros(mask.shape, np.int64)
    starts[rows[first], numbers[first]] = np.nonzero(first)[1]
    begin = np.take_along_axis(starts, np.maximum(numbers, 0), axis=1)
    np.add.at(summed, (rows[mask], begin[mask]), np.asarray(rewards, np.float64)[mask])
    advantages, returns = gae(summed, values, first, segments, gamma=gamma, lam=lam)
    spread = [np.where(mask, np.take_along_axis(one, begin, axis=1), 0.0) for one in (advantages, returns)]
    return spread[0], spread[1]


def discounted(rewards: Tokens, mask: Mask, segments: Segments, *, gamma: float) -> Tokens:
    """Discounted sum of the rewards from each sampled token on: sum_i gamma^i r_(t+i), float64; 0 elsewhere."""
    return gae(rewards, np.zeros(rewards.shape), mask, segments, gamma=gamma, lam=1.0)[0]


def whitened(parts: Sequence[Tokens], masks: Sequence[Mask], *, shift: bool = True) -> list[Tokens]:
    """Standardise masked values over all parts: (x - mean) / sqrt(variance + 1e-8), variance with n - 1; 0 elsewhere.

    Without `shift` the mean stays. Fewer than two values are only centred.
    """
    found = np.concatenate([part[mask] for part, mask in zip(parts, masks, strict=True)]).astype(np.float64)
    mean = found.mean() if found.size else 0.0
    scale = 1 / np.sqrt(found.var(ddof=1) + VARIANCE_EPS) if found.size > 1 else 1.0
    back = 0.0 if shift else mean
    return [np.where(mask, (part - mean) * scale + back, 0.0) for part, mask in zip(parts, masks, strict=True)]


def with_returns(
    parts: Sequence[Batch], values: Sequence[Tokens], settings: GAE, kl: RewardKL | None
) -> tuple[list[Batch], dict[str, float]]:
    """Batches with GAE's advantages, `returns` and `old_values`, and metrics of the critic.

    `parts`: `advantages` hold the reward of each token. Returns go over all rows of a sample in order of time.
    `values[b, t]`: value before token t. `kl` needs `ref_logps`, and `old_logps` or else `sampler_logps`. Raises
    ValueError where they are missing.
    """
    masks = [np.asarray(part.loss_weight) > 0 for part in parts]
    found = []
    for part, mask, value in zip(parts, masks, values, strict=True):
        rewards = np.asarray(part.advantages, np.float64)
        if kl is not None:
            rewards = rewards + _penalty(kl, part, mask)
        found.append(_in_time(settings, part, rewards, np.asarray(value, np.float64), mask))
    advantages, returns = [one for one, _ in found], [one for _, one in found]
    if settings.whiten:
        advantages = whitened(advantages, masks)
    made = [
        replace(
            part,
            advantages=advantage.astype(np.float32),
            returns=target.astype(np.float32),
            old_values=np.where(mask, value, 0.0).astype(np.float32),
            samples=None,
            times=None,
        )
        for part, advantage, target, mask, value in zip(parts, advantages, returns, masks, values, strict=True)
    ]
    return made, critic_metrics(values, returns, masks)


def _in_time(settings: GAE, part: Batch, rewards: Tokens, values: Tokens, mask: Mask) -> tuple[Tokens, Tokens]:
    """Advantages and returns of a batch: each sample's sampled tokens in one line in order of time, with an empty place
    between two turns."""
    segments, places = np.asarray(part.segments), np.flatnonzero(mask)
    of_sequences = np.arange(len(mask))[:, None] * (mask.shape[1] + 1) + segments
    samples = (of_sequences if part.samples is None else np.asarray(part.samples)).ravel()
    times = np.arange(mask.size) if part.times is None else np.asarray(part.times).ravel()
    places = places[np.lexsort((times[places], samples[places]))]
    begins = np.diff(samples[places], prepend=-1) != 0
    turns = begins | (np.diff(places, prepend=-1) != 1) | (np.diff(of_sequences.ravel()[places], prepend=-1) != 0)
    column = np.arange(len(places)) + np.cumsum(turns)
    line, first = np.cumsum(begins) - 1, column[begins]
    column -= first[line]
    sampled = np.zeros((len(first), int(column.max(initial=-1)) + 1), bool)
    sampled[line, column] = True
    given, value = np.zeros(sampled.shape), np.zeros(sampled.shape)
    given[line, column], value[line, column] = rewards.ravel()[places], values.ravel()[places]
    estimate = turn_gae if settings.level == "turn" else gae
    made = estimate(given, value, sampled, np.ones(sampled.shape, int), gamma=settings.gamma, lam=settings.lam)
    found = np.zeros((2, mask.size))
    found[:, places] = [one[line, column] for one in made]
    return found[0].reshape(mask.shape), found[1].reshape(mask.shape)


def critic_metrics(values: Sequence[Tokens], returns: Sequence[Tokens], masks: Sequence[Mask]) -> dict[str, float]:
    """Metrics of the critic before the update. `critic/explained_var`: 1 - variance(returns - values) /
    variance(returns) over sampled tokens; NaN where all returns are equal."""
    v, r = (np.concatenate([one[mask] for one, mask in zip(x, masks, strict=True)]) for x in (values, returns))
    spread = r.var() if r.size else 0.0
    return {
        "critic/values/mean": float(v.mean()) if v.size else float("nan"),
        "critic/returns/mean": float(r.mean()) if r.size else float("nan"),
        "critic/explained_var": float(1 - (r - v).var() / spread) if spread > 0 else float("nan"),
    }


def _penalty(kl: RewardKL, part: Batch, mask: Mask) -> Tokens:
    logps = part.old_logps if part.old_logps is not None else part.sampler_logps
    if logps is None or part.ref_logps is None:
        missing = "ref_logps" if part.ref_logps is None else "old_logps"
        raise ValueError(f"with_returns: batch.{missing} is None, but a KL in the reward needs it")
    return kl(np.asarray(logps), np.asarray(part.ref_logps), mask)
