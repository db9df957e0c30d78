"""Host memory: glibc malloc settings for XLA:CPU, and Python's garbage collector."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of `mallopt`, malloc.h of glibc."""
_LARGEST = 2**31 - 1


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
