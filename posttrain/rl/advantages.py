"""Advantages of the G samples of each of P prompts, from their rewards (NumPy, float64 inside, float32 out). NaN: no
valid reward; such samples, and groups with fewer than two valid rewards, have advantage 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

from posttrain.errors import ConfigError

RewardArray = Float[np.ndarray, "P G"]
Advantage = Callable[[RewardArray], RewardArray]

STD_EPS = 1e-4
"""Constant added to a standard deviation before division."""


def centered(rewards_PG: RewardArray) -> RewardArray:
    """Subtract the group's mean reward. Dr. GRPO, arXiv:2503.20783.

    >>> centered(np.array([[0.0, 1.0, 1.0, 0.0]])).tolist()
    [[-0.5, 0.5, 0.5, -0.5]]
    """
    return _centered(_float64(rewards_PG)).astype(np.float32)


def standardized(rewards_PG: RewardArray) -> RewardArray:
    """Standardise within the group: (r - mean) / (std + 1e-4), std with n - 1. GRPO, arXiv:2402.03300 section 4.1.2."""
    rewards = _float64(rewards_PG)
    return (_centered(rewards) / (_std(rewards)[:, None] + STD_EPS)).astype(np.float32)


def leave_one_out(rewards_PG: RewardArray) -> RewardArray:
    """Subtract the mean reward of the group's other samples. RLOO, arXiv:2402.14740."""
    rewards = _float64(rewards_PG)
    count = (~np.isnan(rewards)).sum(axis=1, keepdims=True)
    # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1).
    return (_centered(rewards) * count / np.maximum(count - 1, 1)).astype(np.float32)


def given_advantage(function: Advantage, name: str) -> Advantage:
    """Wrap a user's advantage function: 0 for samples without a reward, NaN where it returns no finite number for a
    reward.

    Raises ConfigError unless it returns one advantage per reward.
    """

    def advantage(rewards_PG: RewardArray) -> RewardArray:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            # NumPy warns about the mean of a group without any valid reward.
            warnings.simplefilter("ignore", RuntimeWarning)
            made = np.asarray(function(rewards_PG.copy()), np.float32)
        if made.shape != rewards_PG.shape:
            raise ConfigError(
                f"advantage: {name} must return an advantage for each of the rewards [P, G] = {rewards_PG.shape}; "
                f"it returned the shape {made.shape}"
            )
        return np.where(np.isnan(rewards_PG), 0.0, np.where(np.isfinite(made), made, np.nan)).astype(np.float32)

    return advantage


def is_mixed(rewards_PG: RewardArray) -> Bool[np.ndarray, " P"]:
    """Mask of groups with at least two different valid rewards; all other advantages are 0."""
    valid = ~np.isnan(rewards_PG)
    highest = np.where(valid, rewards_PG, -np.inf).max(axis=1)
    lowest = np.where(valid, rewards_PG, np.inf).min(axis=1)
    return highest > lowest


def _float64(rewards_PG: RewardArray) -> RewardArray:
    rewards = np.asarray(rewards_PG, dtype=np.float64)
    if rewards.ndim != 2 or np.isinf(rewards).any():
        raise ValueError(
            f"rewards of shape {rewards.shape} must be finite or NaN, [prompts, samples]; check the reward functions"
        )
    return rewards


def _centered(rewards: RewardArray) -> RewardArray:
    valid = ~np.isnan(rewards)
    mean = np.where(valid, rewards, 0.0).sum(axis=1, keepdims=True) / np.maximum(valid.sum(axis=1, keepdims=True), 1)
    # Equal rewards give exactly 0, even if their mean is rounded.
    return np.where(valid & is_mixed(rewards)[:, None], rewards - mean, 0.0)


def _std(rewards: RewardArray) -> Float[np.ndarray, " P"]:
    valid = ~np.isnan(rewards)
    squares = np.square(_centered(rewards)).sum(axis=1)
    return np.sqrt(squares / np.maximum(valid.sum(axis=1) - 1, 1))
