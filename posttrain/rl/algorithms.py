"""RL algorithms by name: a loss, an advantage function and a group filter each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float

from posttrain.errors import ConfigError, did_you_mean
from posttrain.losses.kl import KLEstimator, k1, k2, k3
from posttrain.losses.policy import DAPO, DISTILL, GRPO, GSPO, RLOO, PolicyLoss, dr_grpo
from posttrain.losses.reduce import ConstantLength, Reduction, sequence_mean, token_mean
from posttrain.rl.advantages import Advantage, RewardArray, centered, is_mixed, leave_one_out, standardized

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
