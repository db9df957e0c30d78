"""Placement table of a stage: roles, their devices, and what they keep in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from posttrain.config import OnlineSection, TrainSection
from posttrain.stages.context import RoleDevices
from posttrain.tracking.console import console

SHARED = "the actor's"


def print_placement(section: TrainSection, mesh: Mesh, devices: RoleDevices, roles: Sequence[str]) -> None:
    """Print the table, if the stage uses more than one device or offloads a role. `roles`: those beside the actor."""
    rows = placement_rows(section, mesh, devices, roles)
    apart = {where for _, where, *_ in rows} - {SHARED}
    if mesh.size == 1 and len(apart) == 1 and not any(offload for *_, offload in rows):
        return
    from rich.table import Table

    table = Table("role", "devices", "mesh", "in host memory")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def placement_rows(
    section: TrainSection, mesh: Mesh, devices: RoleDevices, roles: Sequence[str]
) -> list[tuple[str, str, str, str]]:
    """Role, its devices, axes of its mesh, and what it offloads."""
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    actor = shown_devices(list(mesh.devices.flat))
    if not isinstance(section, OnlineSection):
        return [("trainer", actor, axes, "")]
    place = section.placement
    rows = [("actor", actor, axes, "optimizer" if place.optimizer.offload else "")]
    placed = {
        "rollout": (devices.rollout, False),
        "reference": (devices.reference, place.reference.offload),
        "critic": (devices.critic, place.critic.offload),
    }
    for role in roles:
        own, offload = placed[role]
        where = SHARED if own is None else shown_devices(own)
        rows.append((role, where, axes if own is None else "", "weights" if offload else ""))
    return rows


def shown_devices(devices: Sequence[jax.Device]) -> str:
    """Kind and numbers of devices: `4 x TPU v5e: 0-3`."""
    ids = sorted(device.id for device in devices)
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    named = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return f"{len(ids)} x {devices[0].device_kind}: {named}"
