"""Adaptive entropy bonus: its coefficient keeps the policy's entropy at a target. arXiv:2505.22312 section 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from posttrain.batch import Batch
from posttrain.tree import Mean, replace


class EntropyControl:
    """Coefficient of the entropy bonus that rises by `step` after each batch of rollouts whose mean entropy is below
    `target` nats, and falls by it else, never below 0. It acts only while the latest entropy is at most the target."""

    def __init__(self, *, target: float, start: float, step: float):
        self._target, self._step = target, step
        self._coef, self._entropy = start, 0.0

    @property
    def coef(self) -> float:
        """Coefficient of the next updates."""
        return self._coef if self._entropy <= self._target else 0.0

    def added_to(self, batch: Batch) -> Batch:
        """Add the coefficient to each sampled token of the batch."""
        sampled = np.asarray(batch.loss_weight) > 0
        return replace(batch, entropy_coefs=np.where(sampled, np.float32(self.coef), np.float32(0)))

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Take note of the mean entropy of a step. Reads from the device."""
        entropy = metrics["entropy"]
        assert isinstance(entropy, Mean)
        self._entropy = entropy.value()
        if math.isnan(self._entropy):  # no token was learned from
            self._entropy = 0.0
            return
        self._coef = max(0.0, self._coef + (self._step if self._entropy < self._target else -self._step))

    def state(self) -> dict[str, float]:
        return {"coef": self._coef, "entropy": self._entropy}

    def restore(self, state: Mapping[str, float]) -> None:
        self._coef, self._entropy = state["coef"], state["entropy"]
