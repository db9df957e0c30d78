"""What was freed goes back to the system after a compilation, and stays with a program that runs again and again."""

from __future__ import annotations

import ctypes
import gc
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.runtime.xla import gc_disabled, trim_host_memory

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
    trim_host_memory("tpu")
    assert before - resident_bytes() > BLOCK * BLOCKS // 2
    libc.free(blocks[-1])


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    trim_host_memory("cpu")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled: bool) -> None:
    assert gc.isenabled()
    try:
        if not enabled:
            gc.disable()
        with gc_disabled():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(ZeroDivisionError), gc_disabled():
            1 / 0  # noqa: B018
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


REPEATED = """
import resource

import jax
import jax.numpy as jnp

import posttrain.models.decoder
from posttrain.runtime.xla import trim_host_memory


@jax.jit
def program(x):
    rows = jnp.sin(x)[:, None] + x[None]  # 64 MiB
    return rows @ x[:, None]


def fewest_faults():
    found = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        program(x).block_until_ready()
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found)


x = jnp.arange(4096.0)
before = fewest_faults()
trim_host_memory("cpu")
print(before, fewest_faults())
"""


@pytest.mark.thorough
def test_a_program_on_a_cpu_gets_the_memory_that_it_had() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("needs glibc")
    done = subprocess.run([sys.executable, "-c", REPEATED], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    # The fewest: on a busy machine some runs find what they wait for not ready, and go to another thread after all.
    pages = 2**26 / resource.getpagesize()
    assert before > pages / 2, done.stdout
    assert after < pages / 20, done.stdout
