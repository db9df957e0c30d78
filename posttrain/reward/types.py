"""Reward functions, and the rewards of groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from posttrain.metrics import merge
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

    @classmethod
    def concatenated(cls, parts: Sequence[Rewards]) -> Rewards:
        """Rewards of groups that were scored in several calls, in the order of the calls. Extras that a call did not
        give are None there."""
        if len(parts) == 1:
            return parts[0]
        before = np.cumsum([0, *(len(part.total_PG) for part in parts)])
        extras = dict.fromkeys(name for part in parts for name in part.extras)
        return cls(
            total_PG=np.concatenate([part.total_PG for part in parts]),
            parts_PG={name: np.concatenate([part.parts_PG[name] for part in parts]) for name in parts[0].parts_PG},
            errors=[
                replace(error, prompt=error.prompt + int(first))
                for first, part in zip(before, parts, strict=False)
                for error in part.errors
            ],
            metrics=merge(*(part.metrics for part in parts)),
            extras={
                name: [value for part in parts for value in part.extras.get(name, [None] * part.total_PG.size)]
                for name in extras
            },
            notes=list(dict.fromkeys(note for part in parts for note in part.notes)),
        )


RewardFunction = Callable[..., Any]
