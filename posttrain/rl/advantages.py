"""Advantages of the G samples of each of P prompts. NaN: no valid reward; such samples have advantage 0 and no part in
means and deviations."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from posttrain.errors import ConfigError

RewardArray = Float[np.ndarray, "P G"]
Advantage = Callable[..., RewardArray]
"""Function that takes the inputs that it names, see `INPUTS`; or with any one parameter, the rewards."""

INPUTS = ("rewards_PG", "parts_PG", "weights", "lengths_PG", "penalties_PG")
"""Inputs of advantage functions by parameter name: weighted sums of rewards, with the KL penalties of `kl_in: reward`;
unweighted rewards and weights by name of the reward, without them; numbers of sampled tokens; these penalties, 0
without."""

STD_EPS = 1e-4
"""Constant added to a standard deviation before division."""


def inputs_of(function: Advantage, name: str) -> tuple[str, ...]:
    """Names of the inputs that an advantage function takes; empty: the rewards as its one positional argument.

    Raises ConfigError for required parameters that nothing provides.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return ()
    wanted = tuple(p.name for p in parameters if p.name in INPUTS and p.kind is not p.POSITIONAL_ONLY)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    unknown = [p for p in required if p not in wanted]
    if not unknown:
        return wanted
    if len(required) == 1:
        return ()
    raise ConfigError(
        f"algorithm.advantage: {name} has the parameters {', '.join(unknown)}, which nothing provides; there are "
        f"{', '.join(INPUTS)}"
    )


def advantages_of(
    function: Advantage,
    rewards_PG: RewardArray,
    parts_PG: Mapping[str, RewardArray],
    weights: Mapping[str, float],
    lengths_PG: Int[np.ndarray, "P G"],
    penalties_PG: RewardArray,
) -> RewardArray:
    """Call an advantage function with the inputs that it names."""
    given = dict(zip(INPUTS, (rewards_PG, parts_PG, weights, lengths_PG, penalties_PG), strict=True))
    wanted = inputs_of(function, getattr(function, "__name__", "the function"))
    return function(**{name: given[name] for name in wanted}) if wanted else function(rewards_PG)


def centered(rewards_PG: RewardArray) -> RewardArray:
    """Subtract the group's mean reward. Dr. GRPO, arXiv:2503.20783.

    >>> centered(np.array([[0.0, 1.0, 1.0, 0.0]])).tolist()
    [[-0.5, 0.5, 0.5, -0.5]]
    """
    return _centered(_float64(rewards_PG)).astype(np.float32)


def standardized(rewards_PG: RewardArray) -> RewardArray:
    """Standardise within the group: (r - mean) / (std + 1e-4), std with n - 1. GRPO, arXiv:2402.03300 section 4.1.2."""
    return _standardized(_float64(rewards_PG)).astype(np.float32)


def batch_scaled(rewards_PG: RewardArray) -> RewardArray:
    """Subtract the group's mean reward and divide by the deviation of all rewards of the batch, so that easy and hard
    prompts count alike. arXiv:2508.08221."""
    rewards = _float64(rewards_PG)
    return (_centered(rewards) / (_batch_std(rewards) + STD_EPS)).astype(np.float32)


def leave_one_out(rewards_PG: RewardArray) -> RewardArray:
    """Subtract the mean reward of the group's other samples. RLOO, arXiv:2402.14740."""
    return _leave_one_out(_float64(rewards_PG)).astype(np.float32)


def leave_one_out_scaled(rewards_PG: RewardArray) -> RewardArray:
    """Leave-one-out advantages, standardised over the batch."""
    rewards = _float64(rewards_PG)
    return _batch_standardized(_leave_one_out(rewards), ~np.isnan(rewards)).astype(np.float32)


def batch_standardized(rewards_PG: RewardArray) -> RewardArray:
    """Standardise rewards over all samples of the batch, without groups. REINFORCE++, arXiv:2501.03262."""
    rewards = _float64(rewards_PG)
    valid = ~np.isnan(rewards)
    return _batch_standardized(np.where(valid, rewards, 0.0), valid).astype(np.float32)


def group_baseline(rewards_PG: RewardArray) -> RewardArray:
    """Subtract the group's mean reward, then divide by the deviation of all these differences in the batch.
    REINFORCE++-baseline, arXiv:2501.03262."""
    rewards = _float64(rewards_PG)
    return _batch_standardized(_centered(rewards), ~np.isnan(rewards)).astype(np.float32)


def decoupled(
    parts_PG: Mapping[str, RewardArray], weights: Mapping[str, float], penalties_PG: RewardArray
) -> RewardArray:
    """Standardise each reward within the group, sum with weights, standardise over the batch, so that no reward is
    drowned by a larger one. GDPO, arXiv:2601.05242. KL penalties are added to the sum, centred within the group but not
    standardised: their coefficient counts."""
    parts = {name: _float64(part) for name, part in parts_PG.items()}
    valid = np.any([~np.isnan(part) for part in parts.values()], axis=0)
    total = np.sum([weights[name] * _standardized(part) for name, part in parts.items()], axis=0)
    total += _centered(np.where(valid, penalties_PG, np.nan).astype(np.float64))
    return _batch_standardized(total, valid).astype(np.float32)


def undiminished(rewards_PG: RewardArray) -> RewardArray:
    """Rewards themselves, without a baseline: for a critic, whose values are subtracted per token."""
    rewards = _float64(rewards_PG)
    return np.where(np.isnan(rewards), 0.0, rewards).astype(np.float32)


def given_advantage(function: Advantage, name: str) -> Advantage:
    """Wrap a user's advantage function: 0 for samples without a reward, NaN where it returns no finite number for a
    reward.

    Raises ConfigError for parameters that nothing provides, and unless it returns one advantage per reward.
    """
    wanted = inputs_of(function, name)

    def advantage(
        rewards_PG: RewardArray,
        parts_PG: Mapping[str, RewardArray] | None = None,
        weights: Mapping[str, float] | None = None,
        lengths_PG: Int[np.ndarray, "P G"] | None = None,
        penalties_PG: RewardArray | None = None,
    ) -> RewardArray:
        inputs = (rewards_PG.copy(), parts_PG, weights, lengths_PG, penalties_PG)
        given: dict[str, Any] = dict(zip(INPUTS, inputs, strict=True))
        with np.errstate(all="ignore"), warnings.catch_warnings():
            # NumPy warns about the mean of a group without any valid reward.
            warnings.simplefilter("ignore", RuntimeWarning)
            found = function(**{key: given[key] for key in wanted}) if wanted else function(given["rewards_PG"])
            made = np.asarray(found, np.float32)
        if made.shape != rewards_PG.shape:
            raise ConfigError(
                f"algorithm.advantage: {name} must return an advantage for each of the rewards [P, G] = "
                f"{rewards_PG.shape}; it returned the shape {made.shape}"
            )
        return np.where(np.isnan(rewards_PG), 0.0, np.where(np.isfinite(made), made, np.nan)).astype(np.float32)

    return advantage


def is_mixed(rewards_PG: RewardArray) -> Bool[np.ndarray, " P"]:
    """Mask of groups with at least two different valid rewards; in all other groups centred rewards are 0."""
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


def _standardized(rewards: RewardArray) -> RewardArray:
    valid = ~np.isnan(rewards)
    squares = np.square(_centered(rewards)).sum(axis=1)
    std = np.sqrt(squares / np.maximum(valid.sum(axis=1) - 1, 1))
    return _centered(rewards) / (std[:, None] + STD_EPS)


def _leave_one_out(rewards: RewardArray) -> RewardArray:
    count = (~np.isnan(rewards)).sum(axis=1, keepdims=True)
    # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1).
    return _centered(rewards) * count / np.maximum(count - 1, 1)


def _batch_std(rewards: RewardArray) -> float:
    """Deviation (n - 1) of all valid rewards; 0 for fewer than two."""
    found = rewards[~np.isnan(rewards)]
    return float(found.std(ddof=1)) if found.size > 1 else 0.0


def _batch_standardized(values: RewardArray, valid: Bool[np.ndarray, "P G"]) -> RewardArray:
    found = values[valid]
    # Equal values give exactly 0, even if their mean is rounded.
    if found.size < 2 or found.min() == found.max():
        return np.zeros(values.shape)
    return np.where(valid, (values - found.mean()) / (found.std(ddof=1) + STD_EPS), 0.0)
