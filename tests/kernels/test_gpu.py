"""Every kernel on a GPU, against the reference in float32: `pytest --gpu -m gpu tests/kernels/test_gpu.py`."""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from posttrain.config import AttentionKernel, GroupedKernel
from posttrain.kernels.attention.dispatch import attention
from posttrain.kernels.grouped_matmul import grouped_matmul
from tests.kernels.attention_cases import CASES, Case

pytestmark = pytest.mark.gpu

LENGTHS = ((300, 180), (512,))
"""Sequences of each row of 512; what is left is padding."""


@pytest.fixture(autouse=True)
def on_gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU, and the option --gpu")


def places() -> tuple[np.ndarray, np.ndarray]:
    positions, segments = np.zeros((2, 512), np.int32), np.zeros((2, 512), np.int32)
    for row, parts in enumerate(LENGTHS):
        start = 0
        for number, size in enumerate(parts, 1):
            positions[row, start : start + size] = np.arange(size)
            segments[row, start : start + size] = number
            start += size
    return positions, segments


def run(kernel: AttentionKernel, case: Case, dtype: Any) -> list[np.ndarray]:
    """The output at real tokens, and the gradients."""
    draw = np.random.default_rng(0)
    q = draw.normal(size=(2, 512, 8, 64))
    k, v = (draw.normal(size=(2, 2, 512, 64)) for _ in range(2))
    sinks = jnp.asarray(draw.normal(size=8), jnp.float32) if case.sinks else None
    positions, segments = map(jnp.asarray, places())
    real = (segments > 0)[:, :, None, None]

    def out(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        variant = case.variant
        found = attention(
            q,
            k,
            v,
            q_positions=positions,
            k_positions=positions,
            q_segments=segments,
            k_segments=segments,
            q_parents=None,
            window=variant.window,
            scale=0.125,
            soft_cap=variant.soft_cap,
            sinks=sinks,
            kernel=kernel,
            mesh=None,
        ).heads
        return jnp.where(real, found.astype(jnp.float32), 0.0)

    with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
        value, pull = jax.vjp(out, *(jnp.asarray(x, dtype) for x in (q, k, v)))
        gradients = pull(jnp.asarray(draw.normal(size=value.shape), jnp.float32) * real)
    return [np.asarray(x, np.float32) for x in (value, *gradients)]


@pytest.mark.parametrize("variant", CASES)
@pytest.mark.parametrize("kernel", [name for name in get_args(AttentionKernel) if name != "splash"])
def test_attention(kernel: AttentionKernel, variant: str) -> None:
    case = CASES[variant]
    expected = run("reference", case, jnp.float32)
    try:
        found = run(kernel, case, jnp.bfloat16)
    except ValueError as error:
        pytest.skip(str(error))
    for got, want in zip(found, expected, strict=True):
        # Operands and result are rounded to 8 bits.
        assert_allclose(got, want, atol=0.03 * np.abs(want).max())


def test_auto_serves_what_nothing_fused_does() -> None:
    for dtype in (jnp.float32, jnp.float16):
        for case in CASES.values():
            assert all(np.isfinite(x).all() for x in run("auto", case, dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kernel", [name for name in get_args(GroupedKernel) if name != "megablox"])
def test_grouped_matmul(kernel: GroupedKernel, dtype: Any) -> None:
    draw, sizes = np.random.default_rng(0), jnp.asarray([200, 0, 120, 150], jnp.int32)
    x, w = draw.normal(size=(500, 128)), draw.normal(size=(4, 128, 256)) * 128**-0.5

    def product(kernel: GroupedKernel, dtype: Any) -> list[np.ndarray]:
        def out(x: jax.Array, w: jax.Array) -> jax.Array:
            found = grouped_matmul(x, w, sizes, kernel=kernel, platform="gpu").astype(jnp.float32)
            return jnp.where(jnp.arange(500)[:, None] < jnp.sum(sizes), found, 0.0)

        with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
            value, pull = jax.vjp(out, jnp.asarray(x, dtype), jnp.asarray(w, dtype))
            return [np.asarray(a, np.float32) for a in (value, *pull(jnp.ones_like(value)))]

    try:
        found = product(kernel, dtype)
    except ValueError as error:
        pytest.skip(str(error))
    for got, want in zip(found, product("reference", jnp.float32), strict=True):
        assert_allclose(got, want, atol=(0.03 if dtype == jnp.bfloat16 else 1e-3) * np.abs(want).max())
