from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from posttrain.config import GroupedKernel
from posttrain.kernels import grouped_matmul as module
from posttrain.kernels.grouped_matmul import GroupedMatmulCall, choose, grouped_matmul, select, stacked_matmul
from posttrain.kernels.platform import log_choice

ROWS, EMBED, MLP = 300, 24, 40
KERNELS: tuple[GroupedKernel, ...] = ("reference", "ragged_dot", "buckets", "megablox")
SIZES = {
    "even": (75, 75, 75, 75),
    "one holds all": (0, 300, 0, 0),
    "some empty": (0, 131, 0, 129),
    "first and last": (1, 0, 0, 299),
    "nothing": (0, 0, 0, 0),
}


def arrays(dtype: type = np.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows, weights, gradient of the output."""
    rng = np.random.default_rng(0)
    shapes = [(ROWS, EMBED), (4, EMBED, MLP), (ROWS, MLP)]
    x, w, d_out = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return x, w, d_out


def loop(x: np.ndarray, w: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    out, start = np.zeros((x.shape[0], w.shape[2])), 0
    for matrix, size in zip(w.astype(np.float64), sizes, strict=True):
        out[start : start + size] = x[start : start + size] @ matrix
        start += size
    return out


@functools.cache
def program(kernel: GroupedKernel) -> Callable[..., tuple[jax.Array, tuple[jax.Array, jax.Array]]]:
    def run(
        x: jax.Array, w: jax.Array, d_out: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, kernel=kernel, platform="cpu"), x, w)
        return out, pull(d_out)

    return jax.jit(run)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_against_a_loop(kernel: GroupedKernel, sizes: tuple[int, ...]) -> None:
    x, w, d_out = arrays()
    # What stands after the groups may be anything.
    x, d_out = (jnp.where((jnp.arange(ROWS) < sum(sizes))[:, None], y, 1e6) for y in (x, d_out))
    out, (dx, dw) = program(kernel)(x, w, d_out, jnp.asarray(sizes, jnp.int32))
    expected, used = loop(np.asarray(x), np.asarray(w), sizes), slice(sum(sizes))
    assert_allclose(out[used], expected[used], atol=1e-4)
    assert_allclose(dx[used], loop(np.asarray(d_out), np.asarray(w).swapaxes(1, 2), sizes)[used], atol=1e-4)
    starts = np.cumsum((0, *sizes))
    for group, size in enumerate(sizes):
        rows = slice(starts[group], starts[group] + size)
        assert_allclose(dw[group], np.asarray(x)[rows].T @ np.asarray(d_out)[rows], atol=1e-4, rtol=1e-4)


@given(st.lists(st.integers(0, ROWS), min_size=3, max_size=3))
def test_buckets_drop_nothing(cuts: list[int]) -> None:
    x, w, d_out = arrays()
    sizes = jnp.asarray(np.diff(sorted([0, *cuts, ROWS])), jnp.int32)
    got, expected = (jax.tree.leaves(program(kernel)(x, w, d_out, sizes)) for kernel in ("buckets", "reference"))
    for value, want in zip(got, expected, strict=True):
        assert_allclose(value, want, atol=2e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_low_precision_accumulates_in_float32(kernel: GroupedKernel) -> None:
    x, w, d_out = (y.astype(jnp.bfloat16) for y in arrays())
    sizes = (100, 0, 90, 60)
    out, (dx, dw) = program(kernel)(x, w, d_out, jnp.asarray(sizes, jnp.int32))
    assert out.dtype == dx.dtype == dw.dtype == jnp.bfloat16
    expected = loop(np.asarray(x, np.float32), np.asarray(w, np.float32), sizes)
    # One rounding of the result.
    assert_allclose(np.asarray(out, np.float32)[: sum(sizes)], expected[: sum(sizes)], rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("kernel", ["ragged_dot", "buckets", "megablox"])
def test_few_rows(kernel: GroupedKernel) -> None:
    x, w, _ = arrays()
    sizes = (1, 0, 3, 1)
    got = grouped_matmul(x[:5], w, jnp.asarray(sizes, jnp.int32), kernel=kernel, platform="cpu")
    assert_allclose(got, loop(np.asarray(x[:5]), np.asarray(w), sizes), atol=1e-5)


@pytest.mark.parametrize("outputs", [MLP, 256], ids=["transposed", "as it is"])
def test_the_matrices_of_a_layer_are_read_from_the_stack(outputs: int) -> None:
    """Slow twin: a slice of it."""
    draw, rows, width = np.random.default_rng(0), 40, 128
    x = jnp.asarray(draw.normal(size=(rows, width)), jnp.float32)
    stack = jnp.asarray(draw.normal(size=(3, 4, width, outputs)), jnp.float32)

    @jax.jit
    def run(layer: jax.Array, sizes: jax.Array) -> list[jax.Array]:
        sliced = grouped_matmul(x, stack[layer], sizes, kernel="megablox", platform="cpu")
        return [stacked_matmul(x, stack, layer, sizes, platform="cpu"), sliced]

    for layer, sizes in enumerate([(7, 0, 30, 3), (0, 0, 0, 9), (0, 31, 0, 2)]):
        found, twin = run(jnp.int32(layer), jnp.asarray(sizes, jnp.int32))
        assert_allclose(found[: sum(sizes)], twin[: sum(sizes)], atol=1e-5)


@pytest.mark.optimized
def test_buckets_hold_little_more_than_operands_and_result() -> None:
    rows, groups, embed, mlp = 1024, 16, 64, 64
    shapes = [(rows, embed), (groups, embed, mlp), (rows, mlp)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    whole = 4 * groups * rows * mlp

    def temporary(kernel: GroupedKernel) -> int:
        return program(kernel).lower(*arguments, sizes).compile().memory_analysis().temp_size_in_bytes  # type: ignore[attr-defined]

    assert temporary("buckets") < whole / 2 < whole < temporary("reference")


CPU = GroupedMatmulCall(platform="cpu", dtype="float32", tokamax=False)


@pytest.mark.parametrize(
    ("request_", "kernel"),
    [
        (CPU, "buckets"),
        (GroupedMatmulCall(platform="tpu", dtype="bfloat16", tokamax=True), "megablox"),
        (GroupedMatmulCall(platform="tpu", dtype="float16", tokamax=True), "ragged_dot"),
        (GroupedMatmulCall(platform="gpu", dtype="bfloat16", tokamax=True), "tokamax"),
        (GroupedMatmulCall(platform="gpu", dtype="bfloat16", tokamax=False), "ragged_dot"),
        (GroupedMatmulCall(platform="another", dtype="float32", tokamax=True), "ragged_dot"),
    ],
)
def test_choice(request_: GroupedMatmulCall, kernel: str) -> None:
    assert choose(request_) == select("auto", request_) == select(kernel, request_) == kernel


@pytest.mark.parametrize(
    ("kernel", "request_", "message"),
    [
        (
            "tokamax",
            CPU,
            "'tokamax' is not installed: pip install.*; use auto, reference, ragged_dot, buckets, megablox$",
        ),
        ("tokamax", GroupedMatmulCall(platform="tpu", dtype="float32", tokamax=True), "runs on GPU, got tpu"),
        ("megablox", GroupedMatmulCall(platform="gpu", dtype="float32", tokamax=False), "runs on TPU.*got gpu"),
        (
            "megablox",
            GroupedMatmulCall(platform="tpu", dtype="float16", tokamax=False),
            "float32 and bfloat16, got float16",
        ),
        ("gmm", CPU, "unknown kernel 'gmm'; use one of auto, reference"),
    ],
)
def test_a_kernel_that_cannot_serve(kernel: str, request_: GroupedMatmulCall, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(kernel, request_)


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_choice.cache_clear()
    x, w, _ = arrays()
    with caplog.at_level(logging.INFO, logger="posttrain.kernels"):
        for _ in range(2):
            grouped_matmul(x, w, jnp.full(4, 75, jnp.int32), kernel="auto", platform="cpu")
    assert [record.message for record in caplog.records] == ["grouped matmul: kernel 'buckets' for 4 groups on cpu"]


def test_tokamax() -> None:
    pytest.importorskip("tokamax", reason="needs the extra [kernels]")
    x, w, _ = arrays()
    sizes = (100, 0, 90, 60)
    got = module.tokamax_ragged_dot(x, w, jnp.asarray(sizes, jnp.int32), implementation="xla")
    assert_allclose(got, loop(np.asarray(x), np.asarray(w), sizes), atol=1e-4)
