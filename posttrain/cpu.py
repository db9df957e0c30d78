"""Settings of XLA for programs of a CPU, process-wide; programs for other devices are not concerned.

To be made before the first use of a device: later they change nothing.
"""

from __future__ import annotations

import os

import jax

_EXTRA = "--xla_backend_extra_options="


def run_in_caller() -> None:
    """Have programs run in the thread that calls them, where all that they read is ready, and take their memory from
    its part of the heap.

    XLA else runs each in any thread of a pool, whose parts of the heap hold at most 64 MiB in one piece.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def compile_sooner() -> None:
    """Have LLVM leave loops as they are: unrolled they compile for a sixth longer and run as fast. What the user set
    in `XLA_FLAGS` stands."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _EXTRA not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_EXTRA}xla_cpu_disable_loop_unrolling".strip()
