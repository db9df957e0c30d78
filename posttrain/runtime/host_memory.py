"""Host memory: glibc malloc settings for XLA:CPU, and Python's garbage collector."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of `mallopt`, malloc.h of glibc."""
_LARGEST = 2**31 - 1
WATCH_S = 0.005
"""Seconds between two looks at the memory of this process."""


def trim_host_memory(platform: str) -> None:
    """Return freed memory to the system after a compilation, hundreds of MiB that the allocator would keep.

    For programs on `cpu`, also keep memory freed later, up to 2 GiB at the heap's end: otherwise large blocks are
    mapped and zeroed by the system in every run, a seventh of a training step's time. Requires glibc; has no effect
    with another C library.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return
    library.malloc_trim(0)
    if platform == "cpu":
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGEST)


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.exists() else 0


class Growth:
    """Growth of this process's resident memory in a block, without what was free before: a context manager."""

    highest = 0
    """Bytes at the fullest moment beyond those before."""
    kept = 0
    """Bytes at the end, without what is free again, beyond those before."""

    def __enter__(self) -> Growth:
        trim_host_memory("")
        self._before = self._peak = resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="resident memory")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        trim_host_memory("")
        self.highest = max(0, self._peak - self._before)
        self.kept = max(0, resident_bytes() - self._before)

    def _watch(self) -> None:
        while not self._done.wait(WATCH_S):
            self._peak = max(self._peak, resident_bytes())


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable cyclic garbage collection in the block: tracing allocates so many long-lived objects that the collector
    would scan all live objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
