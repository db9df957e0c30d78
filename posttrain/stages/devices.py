"""Allotment of devices: training first, then roles with devices of their own, then teachers, for a whole run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from posttrain.config import DistillSection, OnlineSection, PlacementSection, RLSection, RunConfig
from posttrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RoleDevices:
    """Devices that roles of a stage have for themselves; None: the actor's."""

    rollout: Sequence[jax.Device] | None = None
    reference: Sequence[jax.Device] | None = None
    critic: Sequence[jax.Device] | None = None


def devices_of_teachers(config: RunConfig, num_devices: int) -> int:
    """Number of devices reserved by teachers of any stage. ConfigError if none is left for training."""
    stages = [stage for stage in config.stages if isinstance(stage, DistillSection | RLSection)]
    taken = max((sum(one.num_own_devices for one in stage.teachers) for stage in stages), default=0)
    if taken >= num_devices:
        raise ConfigError(f"teachers: their meshes take {taken} devices, and there are {num_devices}; leave some")
    return taken


def num_training_devices(config: RunConfig, num_devices: int) -> int:
    """Number of devices that no teacher and no role of any stage reserves. ConfigError if none is left."""
    left = num_devices - devices_of_teachers(config, num_devices)
    stages = [stage for stage in config.stages if isinstance(stage, OnlineSection)]
    taken = max((stage.placement.num_own_devices for stage in stages), default=0)
    if taken >= left:
        raise ConfigError(
            f"placement: roles take {taken} devices for themselves, and {left} of {num_devices} are there for them and "
            "the actor; leave some"
        )
    return left - taken


def training_devices(config: RunConfig) -> list[jax.Device]:
    """Devices that no teacher and no role of any stage reserves. ConfigError if none is left."""
    devices = jax.devices()
    return devices[: num_training_devices(config, len(devices))]


def role_devices(config: RunConfig, placement: PlacementSection) -> RoleDevices:
    """Devices of the roles of a stage: those before the teachers', the rollout engine's last."""
    devices = jax.devices()
    left = devices[: len(devices) - devices_of_teachers(config, len(devices))]
    found: dict[str, Sequence[jax.Device] | None] = {}
    for role in ("rollout", "reference", "critic"):
        count = getattr(placement, role).devices
        found[role] = None if count is None else left[-count:]
        left = left[: len(left) - (count or 0)]
    return RoleDevices(**found)
