"""Token record of a conversation: sampled turns exactly as sampled, and what was written between them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from posttrain.rollout.trajectory import Turn
from posttrain.rollout.types import Completion


class Transcript:
    """Tokens of prompt, sampled turns and replies, with the records of the sampled ones."""

    def __init__(self, prompt: Sequence[int]):
        # Arrays: a list of numbers takes up to ten times their memory.
        self.tokens = array("i")
        self.sampled: list[bool] = []
        self.logps, self.kept_logps, self.versions = array("f"), array("f"), array("i")
        self.turns: list[Turn] = []
        self.experts: Int[np.ndarray, "T M k"] | None = None
        self.add(prompt)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens that were not sampled."""
        count = len(tokens)
        self._append(tokens, False, [0.0] * count, [0.0] * count, [-1] * count)

    def add_turn(self, completion: Completion, time: int) -> None:
        """Append a completion of all tokens so far. `time`: number of its request in the sample."""
        start = len(self)
        self._append(completion.tokens, True, completion.logps, completion.kept_logps, completion.weights_versions)
        self.turns.append(Turn(start, len(self), None, time))
        if completion.experts is not None:
            self._record(completion.experts)

    def reward(self, value: float | None) -> None:
        """Set the reward of the last turn."""
        self.turns[-1] = self.turns[-1]._replace(reward=value)

    def columns(self) -> dict[str, Any]:
        """Fields of a `Trajectory`."""
        names = ("tokens", "sampled", "logps", "kept_logps", "versions", "experts", "turns")
        return {name: getattr(self, name) for name in names}

    def _append(
        self,
        tokens: Sequence[int],
        sampled: bool,
        logps: Sequence[float],
        kept_logps: Sequence[float],
        versions: Sequence[int],
    ) -> None:
        self.tokens.extend(tokens)
        self.sampled += [sampled] * len(tokens)
        self.logps.extend(logps)
        self.kept_logps.extend(kept_logps)
        self.versions.extend(versions)

    def _record(self, experts: Int[np.ndarray, "T M k"]) -> None:
        """Add the experts of new positions; earlier records stay."""
        if self.experts is not None:
            before = self.experts
            experts = experts.copy()
            experts[: len(before)] = np.where(before < 0, experts[: len(before)], before)
        self.experts = experts
