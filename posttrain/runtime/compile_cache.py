"""Persistent cache of compiled programs below `~/.cache/posttrain`, so that a second run starts without compiling."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import jax

from posttrain.runtime.files import cache_folder, digest

MAX_BYTES = 20 << 30
"""Size at which the oldest programs are deleted, until half of it is left."""


def enable_compile_cache() -> Path | None:
    """Use the cache, unless JAX has one already or is told to use none; return its folder, None if there is none.

    JAX's own variables select it: `JAX_COMPILATION_CACHE_DIR` another folder, `JAX_ENABLE_COMPILATION_CACHE=false`
    none.
    """
    config: Any = jax.config  # whose flags are not typed
    if not config.jax_enable_compilation_cache:
        return None
    given = config.jax_compilation_cache_dir
    if given is not None:
        return Path(given)
    folder = cache_folder("compiled") / _machine()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home folder that cannot be written is no reason to refuse a run
        return None
    prune(folder, MAX_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def prune(folder: Path, max_bytes: int) -> None:
    """Delete the oldest files of a cache larger than `max_bytes`, until half of that is left."""
    files = [(file.stat().st_mtime, file.stat().st_size, file) for file in folder.iterdir() if file.is_file()]
    size = sum(number for _, number, _ in files)
    if size <= max_bytes:
        return
    for _, number, file in sorted(files, key=lambda entry: entry[0]):
        file.unlink(missing_ok=True)
        size -= number
        if size <= max_bytes // 2:
            return


def _machine() -> str:
    """Digest of the processor: programs for a CPU use its instructions, which another one may lack."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    own = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return digest("\n".join([platform.machine(), platform.processor(), *own]), 12)
