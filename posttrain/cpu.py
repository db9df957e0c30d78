"""How XLA compiles and runs programs for a CPU; others are not concerned."""

from __future__ import annotations

from typing import Any

import jax


def run_in_caller() -> None:
    """Have programs run in the thread that calls them, where all that they read is ready, and take their memory from
    its part of the heap.

    XLA else runs each in any thread of a pool, whose parts of the heap hold at most 64 MiB in one piece. To be called
    before the first use of a device; later it changes nothing.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def compiled_sooner(platform: str) -> dict[str, Any] | None:
    """Options of `jax.jit` for a program whose time is in its matrix products, which are in libraries: what LLVM makes
    of the rest with less effort runs as fast. They go before `XLA_FLAGS`."""
    reduced = jax.config.read("jax_disable_most_optimizations")
    return {"xla_backend_optimization_level": 1} if platform == "cpu" and not reduced else None
