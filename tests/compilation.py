"""How JAX and XLA compile in the suite, in its processes and in children that they start."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

DEVICES = 8
CACHE_BYTES = 2 << 30
# Virtual devices that wait for each other on a busy machine: after 40 seconds XLA would end the process.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=300 --xla_cpu_collective_timeout_seconds=300"
# XLA of jaxlib 0.11 always uses them, and ends a process that names an unknown flag.
EMITTERS = () if version("jaxlib") >= "0.11" else ("xla_cpu_use_fusion_emitters",)
QUICK = " ".join(["--xla_cpu_parallel_codegen_split_count=1", *(f"--{name}=false" for name in EMITTERS)])
OPTIMIZED: dict[str, Any] = dict.fromkeys(EMITTERS, True)
"""Against `QUICK`, which XLA reads once in a process."""


def set_up(cache: Path) -> None:
    """Before the first import of JAX."""
    devices = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices} {PATIENCE}"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    # To write a smaller program takes as long as it saves.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.02"
    quick(True)


def prune(cache: Path) -> None:
    """Begin again with an empty cache where it has grown too large. JAX's own limit would look through the whole folder
    for each program that is written."""
    if cache.is_dir() and sum(file.stat().st_size for file in cache.iterdir()) > CACHE_BYTES:
        shutil.rmtree(cache)


def quick(wanted: bool) -> None:
    """Compile without costly passes, or as for a run; from now on in this process and in children to come."""
    for recent in kept_programs():
        recent.size = KEPT
    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") != str(int(wanted)):
        forget_programs()
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(wanted))
    flags = os.environ["XLA_FLAGS"].replace(f" {QUICK}", "")
    os.environ["XLA_FLAGS"] = f"{flags} {QUICK}" if wanted else flags
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_disable_most_optimizations", wanted)
        override({} if wanted else OPTIMIZED)
        share_contexts()


def override(options: dict[str, Any]) -> None:
    """Options of every compilation to come; JAX has a setting for those of one function only."""
    from jax._src import compiler

    make = getattr(compiler.get_compile_options, "__wrapped__", compiler.get_compile_options)

    def get_compile_options(*args: Any, env_options_overrides: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        return make(*args, env_options_overrides=options | (env_options_overrides or {}), **kwargs)

    get_compile_options.__wrapped__ = make
    compiler.get_compile_options = get_compile_options


KEPT = 32
"""Equal trainers and engines of a process share programs, those of so many."""


def forget_programs() -> None:
    """Give later trainers and engines programs of their own."""
    for recent in kept_programs():
        recent.clear()


def kept_programs() -> list[Any]:
    xla = sys.modules.get("posttrain.runtime.xla")
    return [] if xla is None else xla.Recent.every


def forget_at_patches(patch: type[Any]) -> None:
    """Forget programs, which hold what they were traced of, before a test changes the package and after it."""

    def forgetting(name: str, relevant: Callable[..., bool]) -> None:
        change = getattr(patch, name)

        def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
            if relevant(self, *args):
                forget_programs()
            return change(self, *args, **kwargs)

        setattr(patch, name, changed)

    forgetting("setattr", lambda *_: True)
    forgetting("setitem", lambda _, target, *rest: target is not os.environ)
    forgetting("undo", lambda self: bool(self._setattr) or any(x[0] is not os.environ for x in self._setitem))


SHARED = threading.local()
LOWERINGS = 200
"""With one context, which keeps the types and places of all of them."""


def share_contexts() -> None:
    """Lower many programs in one MLIR context: a new one loads every dialect, a fifth of what a small program costs."""
    from jax._src.interpreters import mlir

    init = getattr(mlir.ModuleContext.__init__, "__wrapped__", mlir.ModuleContext.__init__)

    def __init__(self: Any, *, context: Any = None, **kwargs: Any) -> None:
        if context is None:
            if not getattr(SHARED, "left", 0):
                SHARED.context, SHARED.left = mlir.make_ir_context(), LOWERINGS
            SHARED.left -= 1
            context = SHARED.context
        init(self, context=context, **kwargs)

    __init__.__wrapped__ = init  # type: ignore[attr-defined]
    mlir.ModuleContext.__init__ = __init__
