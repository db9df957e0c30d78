"""RL algorithms by name: a loss, a group filter, and an advantage function of the rewards of the G samples of each of P
prompts. NaN: no valid reward; such samples, and groups with fewer than two valid rewards, have advantage 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float

from posttrain.errors import ConfigError, did_you_mean
from posttrain.losses.kl import KLEstimator, k1, k2, k3
from posttrain.losses.policy import DAPO, DISTILL, GRPO, GSPO, RLOO, PolicyLoss, dr_grpo
from posttrain.losses.reduce import ConstantLength, Reduction, sequence_mean, token_mean

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


GroupT = TypeVar("GroupT")
GroupFilter = Callable[[RewardArray], Bool[np.ndarray, " P"]]


def every_group(rewards_PG: RewardArray) -> Bool[np.ndarray, " P"]:
    """Keep all groups. Groups of equal rewards have advantage 0, but count in the loss's mean, and a KL penalty acts on
    them."""
    return np.ones(len(rewards_PG), dtype=bool)


@dataclass(frozen=True)
class Algorithm:
    """RL algorithm as used by `rl_step`."""

    name: str
    loss: PolicyLoss
    advantage: Advantage
    filter: GroupFilter = every_group

    def keep(
        self, groups_P: Sequence[GroupT], rewards_PG: RewardArray
    ) -> tuple[list[GroupT], Float[np.ndarray, "Q G"]]:
        """Groups that pass `filter`, in order, with their rewards; all groups if none passes.

        A step with only equal rewards thus has advantage 0 instead of an empty batch; a short batch is not refilled.
        Raises ValueError unless there is one row of rewards per group.
        """
        if len(groups_P) != len(rewards_PG):
            raise ValueError(f"{len(groups_P)} groups but {len(rewards_PG)} rows of rewards; give one row per group")
        keep_P = self.filter(rewards_PG)
        if not keep_P.any():
            keep_P = every_group(rewards_PG)
        return [group for group, keep in zip(groups_P, keep_P, strict=True) if keep], rewards_PG[keep_P]


ALGORITHMS: dict[str, Callable[[int], Algorithm]] = {
    "grpo": lambda _: Algorithm("grpo", GRPO, standardized),
    "dr_grpo": lambda max_tokens: Algorithm("dr_grpo", dr_grpo(max_tokens), centered),
    "dapo": lambda _: Algorithm("dapo", DAPO, standardized, filter=is_mixed),
    "gspo": lambda _: Algorithm("gspo", GSPO, standardized),
    "rloo": lambda _: Algorithm("rloo", RLOO, leave_one_out),
    "distill": lambda _: Algorithm("distill", DISTILL, centered),
}
"""Algorithms by name, as functions of the maximum number of sampled tokens per trajectory."""
REDUCTIONS: dict[str, Reduction] = {"sequence_mean": sequence_mean, "token_mean": token_mean}
ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


def make_algorithm(
    name: str,
    *,
    max_tokens: int,
    advantage: Advantage | None = None,
    reduce: str | None = None,
    kl_estimator: str | None = None,
    **loss: Any,
) -> Algorithm:
    """Make the algorithm of a name; arguments that are not None override its defaults.

    `max_tokens`: maximum number of sampled tokens per trajectory. `loss`: fields of `PolicyLoss`. Raises ConfigError
    for an unknown name or incompatible values.
    """
    if name not in ALGORITHMS:
        raise ConfigError(
            f"algorithm: {name!r} is unknown{did_you_mean(name, ALGORITHMS)}; there are {', '.join(ALGORITHMS)}"
        )
    algorithm = ALGORITHMS[name](max_tokens)
    if reduce is not None:
        loss["reduce"] = ConstantLength(max_tokens) if reduce == "constant_length" else REDUCTIONS[reduce]
    if kl_estimator is not None:
        loss["kl_estimator"] = ESTIMATORS[kl_estimator]
    try:
        made = replace(algorithm.loss, **{field: value for field, value in loss.items() if value is not None})
    except ValueError as error:
        raise ConfigError(str(error).removeprefix("PolicyLoss.")) from error
    return replace(algorithm, loss=made, advantage=algorithm.advantage if advantage is None else advantage)
