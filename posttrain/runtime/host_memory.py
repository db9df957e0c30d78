"""Memory of the host: what the C library keeps for later, where XLA's programs for a CPU have theirs, and Python's."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Of `mallopt`, malloc.h of glibc."""
_LARGEST = 2**31 - 1


def settle(platform: str) -> None:
    """After a compilation: give back what was freed, hundreds of MiB that the allocator would keep beside what the
    program wants. For a program of the `cpu`, keep what is freed from now on, at the heap's end up to 2 GiB: large
    pieces else come from the system for every run, page by page and zeroed, a seventh of a training step's time.

    Only glibc can be told; nothing happens with another C library.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return
    library.malloc_trim(0)
    if platform == "cpu":
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGEST)


@contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for garbage in cycles only afterwards: tracing makes so many objects, and keeps them, that it would
    look through all that live again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
