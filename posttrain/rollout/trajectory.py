"""Samples of prompts: Example, Trajectory, Group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from posttrain.data.chat import Message


@dataclass(frozen=True, kw_only=True)
class Example:
    """Row of the prompt dataset."""

    index: int
    """Row number in the dataset."""
    row: Mapping[str, Any]
    messages: Sequence[Message]
    prompt_tokens: Sequence[int]
    """Tokens of `messages` with the stage's renderer."""
    plain: bool
    """True if the dataset's prompt is a string: reward functions then get completions as strings, else as message
    lists."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One sample: tokens as sampled, never tokenised again."""

    group: int
    """Number of the group among all that the run has begun."""
    example: Example
    sample: int
    """Sample number within the group."""
    messages: Sequence[Message]
    """Messages of the conversation, including the sampled turn."""
    text: str
    """Text of the sampled turn without stop token or stop string."""
    tokens: Sequence[int]
    """Tokens of prompt and completion."""
    sampled: Sequence[bool]
    logps: Sequence[float]
    """Log-probabilities of the sampled tokens before truncation (top-k, top-p, min-p); 0 elsewhere."""
    kept_logps: Sequence[float]
    """Log-probability minus the log of the probability of drawing the token, see `Completion`; 0 elsewhere."""
    stop: Literal["stop", "length", "abort"]
    versions: Sequence[int]
    """Version of the weights that sampled each token; -1 on tokens that were not sampled."""
    experts: Int[np.ndarray, "T M k"] | None = None
    """Experts of each token in each MoE layer, if recorded by the engine; negative where unknown."""

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled)

    @property
    def completion_tokens(self) -> list[int]:
        return [token for token, sampled in zip(self.tokens, self.sampled, strict=True) if sampled]


Group = Sequence[Trajectory]
"""All G samples of a prompt."""
