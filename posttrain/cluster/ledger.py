"""Memory ledger: bytes of each role on devices and hosts, at the end of each phase of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, runtime_checkable

import jax
from jax import Array

Holder = Callable[[], Iterable[Array]]
"""Gives the arrays that a role holds."""

HOST = ("pinned_host", "unpinned_host")


@runtime_checkable
class Holding(Protocol):
    """Role that tells the arrays that it holds."""

    def arrays(self) -> Iterable[Array]: ...


def ledger(phase: str, roles: Mapping[str, Holder]) -> dict[str, float]:
    """GiB of each role over the devices of this process: `memory/<phase>/<role>_gib`, in host memory
    `memory/<phase>/<role>_host_gib`, and the peak of the fullest device so far where the platform tells it.

    Arrays that several roles share count for the first one.
    """
    counted: set[int] = set()
    found: dict[str, float] = {}
    for role, arrays in roles.items():
        device = host = 0
        for array in arrays():
            if id(array) in counted or array.is_deleted():
                continue
            counted.add(id(array))
            if array.sharding.memory_kind in HOST:
                host += local_bytes(array)
            else:
                device += local_bytes(array)
        found[f"memory/{phase}/{role}_gib"] = device / 2**30
        if host:
            found[f"memory/{phase}/{role}_host_gib"] = host / 2**30
    stats = [device.memory_stats() for device in jax.local_devices()]
    if peaks := [one["peak_bytes_in_use"] for one in stats if one is not None]:
        found[f"memory/{phase}/peak_gib"] = max(peaks) / 2**30
    return found


def local_bytes(array: Array) -> int:
    """Bytes of an array on the devices of this process, every copy counted."""
    shard = math.prod(array.sharding.shard_shape(array.shape))
    return shard * array.dtype.itemsize * len(array.sharding.addressable_devices)
