"""Critic of an RL stage: a value model that is trained beside the actor."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from posttrain.config.base import NonNegativeInt, Section
from posttrain.config.locator import Locator
from posttrain.config.train import OptimizerSection


class CriticOptimizer(OptimizerSection):
    """AdamW settings of the critic."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5


class CriticSection(Section):
    """Value model of `algorithm: ppo`."""

    path: Locator | None = None
    """Folder or hub id of a reward model or base model with the actor's tokenizer; None: the actor's model at the start
    of the stage, without an adapter. A model without a scalar head gets a new one."""
    warmup: NonNegativeInt = 0
    """First batches of rollouts from which the critic learns alone (value warm-up)."""
    optimizer: CriticOptimizer = CriticOptimizer()
    """AdamW settings of the critic; its schedule has the stage's steps."""
