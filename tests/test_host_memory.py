"""What was freed goes back to the system."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import pytest

from posttrain.host_memory import release

BLOCK, BLOCKS = 4096, 20_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_freed_blocks_below_one_in_use_go_back() -> None:
    """The allocator gives back the end of its memory by itself, and nothing that lies before a block in use."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("needs glibc")
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [libc.malloc(BLOCK) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[:-1]:
        libc.free(block)
    before = resident_bytes()
    release()
    assert before - resident_bytes() > BLOCK * BLOCKS // 2
    libc.free(blocks[-1])


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    release()
