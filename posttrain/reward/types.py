"""Reward functions, and the rewards of groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from posttrain.tree import Mean


@dataclass(frozen=True, kw_only=True)
class RewardError:
    """Failure of a reward function on a sample, which then has no reward (not a reward of 0)."""

    function: str
    prompt: int
    sample: int
    kind: Literal["error", "timeout"]
    error: str


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Weighted sums of rewards and their parts. NaN: no reward (not applicable, error or timeout)."""

    total_PG: Float[np.ndarray, "P G"]
    parts_PG: Mapping[str, Float[np.ndarray, "P G"]]
    """Unweighted rewards by function name."""
    errors: Sequence[RewardError]
    metrics: Mapping[str, Mean]
    """Means of values given to `log_metric`, as `rewards/<function>/<name>`: of each call its mean, by its samples."""
    extras: Mapping[str, Sequence[Any]]
    """Values given to `log_extra`: columns of the samples table, in order (p, g)."""
    notes: Sequence[str] = ()
    """Lines for the user about causes of slow scoring."""


RewardFunction = Callable[..., Any]
