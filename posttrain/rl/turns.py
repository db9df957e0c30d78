"""Turns of conversations in order of time: rewards at the end of each turn, and advantages per turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from posttrain.reward.function import ENV_REWARD
from posttrain.rl.assemble import TurnValues
from posttrain.rollout.trajectory import Group, Trajectory

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
