"""XLA:CPU runtime settings: dispatch, threads for collectives, compile options."""

from __future__ import annotations

import os
import re
from typing import Any

import jax

from posttrain.runtime import processes

# Collective operations of a program that may wait for other devices at the same time, per virtual device.
THREADS_PER_DEVICE = 8


def disable_async_dispatch() -> None:
    """Disable asynchronous CPU dispatch: programs run in the calling thread and allocate from its malloc arena.

    Otherwise XLA runs programs in pool threads, whose arenas hold at most 64 MiB contiguously. Call it before the first
    use of a device; later calls have no effect.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def reserve_collective_threads() -> None:
    """Give virtual CPU devices, or several processes, enough threads for all concurrent collectives of a program.

    XLA uses one thread per device and does not order a loop that reduces over devices and a gather beside it: if
    devices wait in different ones, no thread is left to join them, and the program hangs (jaxlib 0.10.2, in `distill`
    on 8 devices, about half of the time). An existing PJRT_NPROC is kept. Call it before the first use of a device.
    """
    asked = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = max([1, jax.config.values["jax_num_cpu_devices"], *map(int, asked[-1:])])
    if devices * processes.count() > 1:
        os.environ.setdefault("PJRT_NPROC", str(THREADS_PER_DEVICE * devices))


def fast_compile_options(platform: str) -> dict[str, Any] | None:
    """Options of `jax.jit` that compile faster, for programs dominated by library matrix products: less LLVM effort on
    the rest runs as fast. They have lower precedence than `XLA_FLAGS`."""
    reduced = jax.config.read("jax_disable_most_optimizations")
    return {"xla_backend_optimization_level": 1} if platform == "cpu" and not reduced else None
