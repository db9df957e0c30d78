"""What flows through reinforcement learning: examples, trajectories, groups, reward outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from posttrain.data.chat import Message


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row of the prompt dataset."""

    index: int
    """Position in the dataset."""
    row: Mapping[str, Any]
    messages: Sequence[Message]
    prompt_tokens: Sequence[int]
    """`messages` as the stage's renderer tokenises them."""
    plain: bool
    """The dataset's prompt is a string; reward functions then get completions as strings, else as message lists."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One sample, tokens as sampled and never re-tokenised."""

    example: Example
    sample: int
    """Number within the group."""
    messages: Sequence[Message]
    """The whole conversation, the sampled turn included."""
    text: str
    """The sampled turn without stop token or stop string."""
    tokens: Sequence[int]
    """Prompt and completion."""
    sampled: Sequence[bool]
    logps: Sequence[float]
    """Of the sampled tokens, before truncation; 0 elsewhere."""
    kept_logps: Sequence[float]
    """logp minus the log of the probability with which the token was drawn, see `Completion`; 0 elsewhere."""
    stop: Literal["stop", "length", "abort"]
    versions: Sequence[int]
    """Version of the weights that wrote each token; -1 on tokens that were not sampled."""
    experts: Int[np.ndarray, "T M k"] | None = None
    """The experts that each token went to in each mixture, if the engine recorded them; negative where it did not."""

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled)

    @property
    def completion_tokens(self) -> list[int]:
        return [token for token, sampled in zip(self.tokens, self.sampled, strict=True) if sampled]


Group = Sequence[Trajectory]
"""The G samples of one prompt."""


@dataclass(frozen=True, kw_only=True)
class RewardError:
    """A reward function failed on a sample: no reward, not a reward of 0."""

    function: str
    prompt: int
    sample: int
    kind: Literal["error", "timeout"]
    error: str


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Weighted sums and their parts. NaN: no reward (not applicable, error or time-out)."""

    total_PG: Float[np.ndarray, "P G"]
    parts_PG: Mapping[str, Float[np.ndarray, "P G"]]
    """Unweighted, by the function's name."""
    errors: Sequence[RewardError]
    metrics: Mapping[str, float]
    """What the functions gave to `log_metric`, averaged, as `rewards/<function>/<name>`."""
    extras: Mapping[str, Sequence[Any]]
    """What the functions gave to `log_extra`: a column of the samples table, in order (p, g)."""
    notes: Sequence[str] = ()
    """Lines for the user on what made scoring slower."""


RewardFunction = Callable[..., Any]
