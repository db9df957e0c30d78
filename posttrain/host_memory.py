"""Memory of the host that the C library keeps for later."""

from __future__ import annotations

import ctypes


def release() -> None:
    """Give back to the system what was freed. Nothing where the C library has no `malloc_trim`, as only glibc has it.

    For after a compilation: it frees hundreds of MiB, which the allocator would keep beside what the program wants.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
