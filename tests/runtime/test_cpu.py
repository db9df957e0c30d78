from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest

import posttrain.kernels  # noqa: F401 - calls what is tested here, before the first use of a device
from posttrain.runtime.xla import (
    THREADS_PER_DEVICE,
    WHOLE_PRODUCTS,
    compile_options,
    fast_compile_options,
    reserve_collective_threads,
)

pytestmark = pytest.mark.fast


def test_options_are_known_to_xla() -> None:
    """jaxlib refuses an option that it does not know; tests compile with less effort still, which stands."""
    assert fast_compile_options("cpu") is None and fast_compile_options("gpu") is None
    assert compile_options("cpu") is None and compile_options("tpu") == fast_compile_options("tpu") == WHOLE_PRODUCTS
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        options = fast_compile_options("cpu")
        assert options == {"xla_backend_optimization_level": 1}
        assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.parametrize(
    ("flags", "chosen", "threads"),
    [
        ("", None, None),
        ("--xla_force_host_platform_device_count=1", None, None),
        ("--xla_force_host_platform_device_count=4 --xla_cpu_enable_fast_math=false", None, 4 * THREADS_PER_DEVICE),
        ("--xla_force_host_platform_device_count=8 --xla_force_host_platform_device_count=2", None, 16),
        ("--xla_force_host_platform_device_count=8", "9", 9),
    ],
)
def test_virtual_devices_have_threads_to_wait_in(
    flags: str, chosen: str | None, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    if chosen is not None:
        monkeypatch.setenv("PJRT_NPROC", chosen)
    reserve_collective_threads()
    assert os.environ.get("PJRT_NPROC") == (None if threads is None else str(threads))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux names them")
def test_xla_makes_these_threads() -> None:
    jax.devices()
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert sum("XLAEigen" in name for name in names) == THREADS_PER_DEVICE * jax.device_count()
