"""Roles of an online stage beside the actor: devices of their own, host memory between uses, reference and critic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.base import Flag, NonNegativeInt, PositiveInt, Section
from posttrain.config.locator import Locator
from posttrain.config.train import OptimizerSection


class RolloutPlacement(Section):
    """Devices of the rollout engine."""

    devices: PositiveInt | None = None
    """Devices of its own, the last of all; None: the actor's. `rollout.tensor` of them split each weight, the others
    hold copies."""


class ReferencePlacement(Section):
    """Devices of the reference policy."""

    devices: PositiveInt | None = None
    """Devices of its own, before those of the rollout engine, which split the weights (`fsdp`); None: the actor's."""
    offload: Flag = False
    """Keep its weights in the host's memory between uses."""


class OptimizerPlacement(Section):
    """Memory of the optimizer state."""

    offload: Flag = False
    """Keep the optimizer state in the host's memory between the updates of a step, to make room for sampling."""


class CriticPlacement(Section):
    """Devices of the critic."""

    devices: PositiveInt | None = None
    """Devices of its own, before those of the reference, which split its weights (`fsdp`); None: the actor's."""
    offload: Flag = False
    """Keep its optimizer state in the host's memory between the updates of a step."""


class PlacementSection(Section):
    """Placement of roles on the devices. Roles without devices of their own share those of the actor, which has all
    that are left; `mesh` is the actor's."""

    rollout: RolloutPlacement = RolloutPlacement()
    """Devices of the rollout engine."""
    reference: ReferencePlacement = ReferencePlacement()
    """Devices of the reference policy."""
    critic: CriticPlacement = CriticPlacement()
    """Devices of the critic."""
    optimizer: OptimizerPlacement = OptimizerPlacement()
    """Memory of the actor's optimizer state."""

    @property
    def num_own_devices(self) -> int:
        """Number of devices that roles have for themselves."""
        return sum(role.devices or 0 for role in (self.rollout, self.reference, self.critic))


class ReferenceSection(Section):
    """Reference policy of the KL penalty."""

    model: Literal["start", "base"] = "start"
    """Policy: `start`, the actor at the start of the stage; `base`, the actor's model without its LoRA adapter, which
    needs no copy."""
    path: Locator | None = None
    """Another checkpoint with the actor's tokenizer, as folder or hub id, in place of `model`."""
    refresh_every: PositiveInt | None = None
    """Versions of the actor's weights between updates of the reference from it; None: it never changes."""
    mixup: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the actor in each update of the reference, the rest is the reference before: with `refresh_every: 1` an
    exponential moving average. 1: a copy."""

    @model_validator(mode="after")
    def _consistent(self) -> ReferenceSection:
        if self.path is not None and self.model != "start":
            raise ValueError(f"path={self.path} and model={self.model} both name the reference; set one of them")
        if self.refresh_every is None and self.mixup != 1.0:
            raise ValueError(f"mixup={self.mixup} has no effect without refresh_every; set it, such as 1")
        if self.refresh_every is not None and (self.path is not None or self.model != "start"):
            raise ValueError("refresh_every copies the actor's weights over a copy of them; it needs model: start")
        return self


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
