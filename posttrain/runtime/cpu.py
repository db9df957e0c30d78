"""How XLA compiles and runs programs for a CPU; others are not concerned."""

from __future__ import annotations

import os
import re
from typing import Any

import jax

# For each virtual device: as many collective operations of a program can wait for other devices at one time.
THREADS_PER_DEVICE = 8


def run_in_caller() -> None:
    """Have programs run in the thread that calls them, where all that they read is ready, and take their memory from
    its part of the heap.

    XLA else runs each in any thread of a pool, whose parts of the heap hold at most 64 MiB in one piece. To be called
    before the first use of a device; later it changes nothing.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def seat_collectives() -> None:
    """Give virtual devices threads enough for all collective operations of a program that can be under way at once.

    XLA has one thread a device, and does not order a loop that reduces over devices and a gather beside it: where each
    device waits in another of the two, none is left to join them, and the program hangs (jaxlib 0.10.2, in `distill` on
    8 devices, as often as not). A number that the caller chose stands. To be called before the first use of a device.
    """
    asked = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = max([jax.config.values["jax_num_cpu_devices"], *map(int, asked[-1:])])
    if devices > 1:
        os.environ.setdefault("PJRT_NPROC", str(THREADS_PER_DEVICE * devices))


def compiled_sooner(platform: str) -> dict[str, Any] | None:
    """Options of `jax.jit` for a program whose time is in its matrix products, which are in libraries: what LLVM makes
    of the rest with less effort runs as fast. They go before `XLA_FLAGS`."""
    reduced = jax.config.read("jax_disable_most_optimizations")
    return {"xla_backend_optimization_level": 1} if platform == "cpu" and not reduced else None
