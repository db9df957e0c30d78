"""Right answers of a dataset's own rows, as the reward functions of a stage score them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

NUM_ROWS = 64
"""Rows whose answers are scored: the interval of a share is then at most 0.24 wide."""
CONFIG = "config.yaml"
"""Settings in the folder of a run."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Right answers of rows and their rewards."""

    rows: Sequence[int] = ()
    """Row numbers in the dataset."""
    texts: Sequence[str] = ()
    prompts: Sequence[str] = ()
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Reward of each right answer; NaN: none applies."""
    wrong: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Reward of another row's answer in its place, where that differs; NaN elsewhere."""
    num_rows: int | None = None
    """Number of rows of the dataset; None: unknown."""
    missing: str | None = None
    """Reason why nothing was scored; None: it was."""

    @property
    def scored(self) -> bool:
        return bool(np.isfinite(self.rewards).any())

    def text_of(self, row: int) -> str | None:
        """Right answer of a row; None if it was not read."""
        return self.texts[self.rows.index(row)] if row in self.rows else None


def no_answers(rows: Sequence[int] = ()) -> Answers:
    """Answers of a stage without any."""
    return Answers(missing="the stage has no rewards")
