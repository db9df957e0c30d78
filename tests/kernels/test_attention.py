"""`attention` itself: the reference against loops, decoding, the choice of a kernel, meshes, memory."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.config import AttentionKernel
from posttrain.errors import ConfigError
from posttrain.kernels.attention import fused
from posttrain.kernels.attention.blockwise import block_size, even_block
from posttrain.kernels.attention.call import (
    AttentionCall,
    MaskInputs,
    Operands,
    Variant,
    full_attention,
    visible,
)
from posttrain.kernels.attention.dispatch import attention, choose_attention, select_attention
from posttrain.kernels.attention.fused import make_splash
from posttrain.kernels.platform import log_choice, warn_once
from tests.kernels.attention_cases import CASES, HEADS, Case, Rows, rows
from tests.often import often

SMALL = rows(lengths=((5, 4), (12,)), length=12)


def loop(data: Rows, case: Case) -> np.ndarray:
    """One query, one head and one key at a time, float64."""
    q, k, v, sinks, positions, segments = data
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, t, n in np.ndindex(*q.shape[:3]):
        head = n // (q.shape[2] // k.shape[1])
        seen = [
            s
            for s in range(k.shape[2])
            if segments[b, s] == segments[b, t] and 0 <= positions[b, t] - positions[b, s] < (case.window or 99)
        ]
        logits = np.asarray([case.variant.scale * np.dot(q[b, t, n].astype(float), k[b, head, s]) for s in seen])
        if case.soft_cap is not None:
            logits = case.soft_cap * np.tanh(logits / case.soft_cap)
        weights = np.exp(logits)
        out[b, t, n] = weights @ v[b, head, seen] / (weights.sum() + (np.exp(sinks[n]) if case.sinks else 0))
    return out


def call(
    data: Rows,
    case: Case,
    *,
    kernel: AttentionKernel = "auto",
    queries: slice = slice(None),
    mesh: Mesh | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """`attention` on whole rows, or on some of their queries with all keys, as one program."""

    def attend(data: Rows) -> jax.Array:
        positions, segments = jnp.asarray(data.positions), jnp.asarray(data.segments)
        whole = queries == slice(None)
        return attention(
            jnp.asarray(data.q[:, queries], dtype),
            jnp.asarray(data.k, dtype),
            jnp.asarray(data.v, dtype),
            q_positions=positions if whole else positions[:, queries],
            k_positions=positions,
            q_segments=segments if whole else segments[:, queries],
            k_segments=segments,
            q_parents=None,
            window=case.window,
            scale=case.variant.scale,
            soft_cap=case.soft_cap,
            sinks=jnp.asarray(data.sinks) if case.sinks else None,
            kernel=kernel,
            mesh=mesh,
        ).heads

    return jax.jit(attend)(data)


def small(name: str) -> Case:
    case = CASES[name]
    return case if case.window is None else case._replace(window=3)


@pytest.mark.parametrize("name", CASES)
def test_against_loops(name: str) -> None:
    expected = loop(SMALL, small(name))
    real = SMALL.segments > 0
    assert_allclose(np.asarray(call(SMALL, small(name)))[real], expected[real], atol=2e-6)
    low = call(SMALL, small(name), dtype=jnp.bfloat16)
    assert low.dtype == jnp.bfloat16
    assert_allclose(np.asarray(low, np.float32)[real], expected[real], atol=3e-2)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_a_decoded_token_and_a_prefilled_chunk(name: str) -> None:
    expected = np.asarray(call(SMALL, small(name)))
    for kernel in ("auto", "blockwise"):
        one = call(SMALL, small(name), kernel=kernel, queries=slice(8, 9))
        assert_allclose(one, expected[:, 8:9], atol=2e-6)
        some = call(SMALL, small(name), kernel=kernel, queries=slice(3, 9))
        assert_allclose(some, expected[:, 3:9], atol=2e-6)


@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_masked_is_removed(kernel: AttentionKernel) -> None:
    expected = np.asarray(call(SMALL, CASES["full"], kernel=kernel))
    k, v = SMALL.k.copy(), SMALL.v.copy()
    # What no query of a segment sees may hold anything at all.
    k[0, :, 9:], v[0, :, 9:] = 1e6, 1e6
    got = np.asarray(call(SMALL._replace(k=k, v=v), CASES["full"], kernel=kernel))
    assert_array_equal(got[0, :9], expected[0, :9])
    assert np.isfinite(got).all()


@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_large_logits_do_not_overflow(kernel: AttentionKernel) -> None:
    large = SMALL._replace(q=1e4 * SMALL.q)
    assert_allclose(
        call(large, CASES["full"], kernel=kernel)[1, 0], call(SMALL, CASES["full"], kernel=kernel)[1, 0], atol=1e-6
    )
    assert np.isfinite(np.asarray(call(large, CASES["sinks"], kernel=kernel))).all()


@pytest.mark.parametrize(
    ("name", "length"), often([(name, length) for name in CASES for length in (384, 300)], ("all", 300))
)
def test_short_rows_without_a_loop(name: str, length: int) -> None:
    """On a CPU, in the gradient neither."""
    data = rows(lengths=((170, 90), (length,)), length=length)

    def run(q: jax.Array, kernel: AttentionKernel) -> tuple[jax.Array, jax.Array]:
        out, pull = jax.vjp(lambda q: call(data._replace(q=q), CASES[name], kernel=kernel), q)
        return out, pull(out)[0]

    assert "while" not in str(jax.make_jaxpr(lambda q: run(q, "blockwise"))(data.q))
    one, other = (jax.jit(run, static_argnums=1)(data.q, kernel) for kernel in ("blockwise", "reference"))
    # Of padding, finite numbers are all that is promised.
    real = data.segments > 0
    assert_allclose(one[0][real], other[0][real], atol=1e-5)
    assert_allclose(one[1][real], other[1][real], atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("kernel", ["blockwise", "splash"])
def test_low_precision_as_the_reference(kernel: AttentionKernel) -> None:
    data = rows(lengths=((200, 50), (256,)), length=256)
    real = data.segments > 0
    got, expected = (
        call(data, CASES["all"], kernel=name, dtype=jnp.bfloat16)  # type: ignore[arg-type]
        for name in (kernel, "reference")
    )
    assert got.dtype == jnp.bfloat16
    assert_allclose(np.asarray(got, np.float32)[real], np.asarray(expected, np.float32)[real], atol=3e-2)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kernel", "kv_heads", "context", "tensor"),
    often(
        [
            ("reference", 2, 1, 2),
            ("blockwise", 2, 1, 2),
            ("blockwise", 1, 1, 2),
            ("splash", 2, 1, 2),
            ("splash", 1, 1, 2),
            ("splash", 2, 1, 4),
            ("reference", 2, 2, 2),
            ("blockwise", 2, 4, 1),
            ("splash", 1, 2, 2),
            ("splash", 2, 2, 1),
        ],
        ("reference", 2, 2, 2),
        ("blockwise", 1, 1, 2),
        ("blockwise", 2, 4, 1),
        ("splash", 1, 2, 2),
    ),
)
def test_eight_devices_as_one(kernel: AttentionKernel, kv_heads: int, context: int, tensor: int) -> None:
    length = 256 if kernel == "splash" and context > 1 else 128
    data = rows(lengths=((70, 40), (length,), (20, 30), (length,)), length=length, kv_heads=kv_heads)
    grid = np.asarray(jax.devices()[:8]).reshape(2, 4 // tensor // context, context, tensor)
    mesh = Mesh(grid, ("data", "fsdp", "context", "tensor"), axis_types=(AxisType.Auto,) * 4)
    real = jnp.asarray(data.segments > 0)[:, :, None, None]

    def loss(arrays: tuple[Any, ...], mesh: Mesh | None) -> jax.Array:
        out = call(Rows(*arrays, data.positions, data.segments), CASES["all"], kernel=kernel, mesh=mesh)
        return jnp.sum(jnp.where(real, jnp.sin(3 * out), 0.0))

    spread = tuple(
        jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
        for x, spec in zip(data[:4], ((("data", "fsdp"), None, "tensor"), (("data", "fsdp"),), (), ()), strict=True)
    )
    expected = jax.jit(jax.value_and_grad(lambda arrays: loss(arrays, None)))(data[:4])
    got = jax.jit(jax.value_and_grad(lambda arrays: loss(arrays, mesh)))(spread)
    for value, want in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_allclose(value, want, atol=1e-4, rtol=1e-5)


def test_devices_of_a_row_have_equal_work() -> None:
    """And the result of one device, packed rows too, with their queries in another order than their keys."""
    length, shards = 512, 2
    data = rows(lengths=((300, 150), (length,)), length=length)
    real = jnp.asarray(data.segments > 0)[:, :, None, None]
    grid = np.asarray(jax.devices()[:4]).reshape(2, 1, shards, 1)
    mesh = Mesh(grid, ("data", "fsdp", "context", "tensor"), axis_types=(AxisType.Auto,) * 4)

    def loss(arrays: tuple[Any, ...], kernel: AttentionKernel, mesh: Mesh | None) -> jax.Array:
        out = call(Rows(*arrays, data.positions, data.segments), CASES["sinks"], kernel=kernel, mesh=mesh)
        return jnp.sum(jnp.where(real, jnp.sin(3 * out), 0.0))

    got, expected = (
        jax.jit(jax.value_and_grad(lambda arrays, kernel=kernel, mesh=mesh: loss(arrays, kernel, mesh)))(data[:4])
        for kernel, mesh in (("splash", mesh), ("blockwise", None))
    )
    for value, want in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_allclose(value, want, atol=1e-4, rtol=1e-5)

    def work(shards: int, *, folded: bool) -> list[int]:
        """Blocks of logits that each device computes."""
        tables = make_splash(4096, 1, 64, CASES["full"].variant, shards=shards, interpret=True, folded=folded)
        blocks = np.split(np.asarray(tables.fwd_mask_info.block_mask), shards, axis=1)
        return [int((part > 0).sum()) for part in blocks]

    assert work(4, folded=False) == [3, 7, 11, 15] and work(4, folded=True) == [9, 9, 9, 9]


@pytest.mark.thorough
@pytest.mark.optimized
def test_blocks_are_all_that_long_rows_hold() -> None:
    length = 2048
    data = rows(lengths=((length,),), length=length)

    def program(kernel: AttentionKernel) -> Any:
        def loss(arrays: tuple[Any, ...]) -> jax.Array:
            return jnp.sum(call(Rows(*arrays, data.positions, data.segments), CASES["all"], kernel=kernel))

        return jax.jit(jax.grad(loss)).lower(data[:4]).compile()

    blocks, whole = program("blockwise"), program("reference")
    every = 4 * HEADS * length * length
    assert f"{length},{length}" not in blocks.as_text()
    assert blocks.memory_analysis().temp_size_in_bytes < every / 16
    assert whole.memory_analysis().temp_size_in_bytes > every


# --- choice ----------------------------------------------------------------------------------------------------------

ROWS_2048 = AttentionCall(
    platform="tpu",
    rows=4,
    num_queries=2048,
    num_keys=2048,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    value_dim=64,
    dtype="bfloat16",
    soft_cap=None,
    sinks=False,
    parents=False,
    same_tokens=True,
    row_shards=1,
    head_shards=1,
    token_shards=1,
    tokamax=False,
    compute_capability=9.0,
)


@pytest.mark.parametrize(
    ("changes", "block"),
    [
        ({}, 512),
        ({"platform": "cpu"}, 128),
        ({"platform": "cpu", "rows": 5}, 64),
        ({"platform": "cpu", "rows": 4, "num_heads": 9}, 64),
        ({"platform": "cpu", "rows": 8, "row_shards": 2}, 128),
        ({"platform": "cpu", "rows": 8, "head_shards": 2}, 128),
        ({"platform": "cpu", "rows": 8, "same_tokens": False}, 128),
    ],
)
def test_blocks_that_fit_the_cache(changes: dict[str, Any], block: int) -> None:
    assert block_size(replace(ROWS_2048, **changes)) == block


@pytest.mark.parametrize(
    ("length", "rows", "even"),
    [
        # Three blocks of 176 would have more logits than four of 128.
        *((512, 1, 128), (384, 1, 128), (449, 1, 232), (300, 1, 152), (130, 1, 72), (128, 1, 128), (100, 1, 128)),
        # Of eight rows a block of 128 does not fit the cache: what is short is shorter.
        *((256, 8, 128), (200, 8, 104), (100, 8, 128), (257, 8, None)),
        *((513, 1, None), (2048, 1, None)),
    ],
)
def test_short_rows_are_cut_into_few_equal_blocks(length: int, rows: int, even: int | None) -> None:
    row = replace(ROWS_2048, platform="cpu", rows=rows, num_queries=length, num_keys=length)
    assert even_block(row) == even
    assert even_block(replace(row, platform="tpu")) is None
    assert even_block(replace(row, same_tokens=False)) is None


DECODE: dict[str, Any] = {"num_queries": 1, "same_tokens": False}
PREFILL: dict[str, Any] = {"num_queries": 512, "same_tokens": False}
OLD_GPU: dict[str, Any] = {"platform": "gpu", "compute_capability": 8.0}
LONG_ON_OLD_GPU: dict[str, Any] = OLD_GPU | {"num_queries": 16384, "num_keys": 16384}


@pytest.fixture(autouse=True)
def tokamax_serves_this_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "TOKAMAX_TOO_NEW", (99,))


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "splash"),
        ({"soft_cap": 5.0, "sinks": True, "value_dim": 32}, "splash"),
        ({"num_queries": 128, "num_keys": 128}, "splash"),
        ({"num_queries": 2000, "num_keys": 2000}, "splash"),
        ({"num_queries": 100, "num_keys": 100}, "reference"),
        ({"row_shards": 8}, "blockwise"),
        ({"row_shards": 4, "head_shards": 4}, "splash"),
        ({"head_shards": 3}, "blockwise"),
        (DECODE, "reference"),
        (PREFILL, "blockwise"),
        (PREFILL | {"rows": 1}, "reference"),
        ({"platform": "gpu"}, "cudnn"),
        ({"platform": "gpu", "tokamax": True}, "cudnn"),
        ({"platform": "gpu", "tokamax": True, "soft_cap": 5.0}, "tokamax"),
        ({"platform": "gpu", "tokamax": True, "dtype": "float32"}, "blockwise"),
        ({"platform": "gpu", "tokamax": True, "compute_capability": 7.5}, "cudnn"),
        ({"platform": "gpu", "tokamax": True, "head_dim": 512}, "blockwise"),
        ({"platform": "gpu", "tokamax": True, "num_queries": 2000, "num_keys": 2000}, "cudnn"),
        ({"platform": "gpu", "num_queries": 16384, "num_keys": 16384}, "cudnn"),
        (LONG_ON_OLD_GPU | {"tokamax": True}, "blockwise"),
        (LONG_ON_OLD_GPU | {"rows": 1}, "cudnn"),
        ({"platform": "gpu", "tokamax": True, "sinks": True}, "blockwise"),
        ({"platform": "gpu", "sinks": True}, "blockwise"),
        ({"platform": "gpu", "soft_cap": 5.0}, "blockwise"),
        ({"platform": "gpu", "tokamax": True, "largest": True}, "blockwise"),
        ({"largest": True}, "splash"),
        ({"platform": "gpu", "dtype": "float32"}, "blockwise"),
        ({"platform": "gpu", "head_dim": 192, "value_dim": 128}, "blockwise"),
        ({"platform": "gpu", "num_queries": 2047, "num_keys": 2047}, "cudnn"),
        ({"platform": "gpu", "num_queries": 2047, "num_keys": 2047, "parents": True}, "blockwise"),
        ({"platform": "gpu"} | DECODE, "cudnn"),
        ({"platform": "gpu", "dtype": "float32"} | DECODE, "reference"),
        ({"platform": "gpu", "row_shards": 3} | DECODE, "reference"),
        ({"platform": "gpu"} | PREFILL, "blockwise"),
        ({"platform": "cpu"}, "blockwise"),
        ({"platform": "cpu", "num_queries": 128, "num_keys": 128}, "reference"),
        ({"platform": "cpu", "num_queries": 129, "num_keys": 129}, "blockwise"),
        ({"platform": "cpu", "num_queries": 128, "num_keys": 128, "rows": 256}, "blockwise"),
        ({"platform": "another"}, "blockwise"),
    ],
)
def test_choice(changes: dict[str, Any], kernel: str) -> None:
    request = replace(ROWS_2048, **changes)
    assert choose_attention(request) == select_attention("auto", request) == kernel
    assert select_attention(kernel, request) == kernel  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernel", "changes", "message"),
    [
        ("splash", {"platform": "gpu"}, "'splash' runs on TPU.*got gpu; use auto, reference, blockwise, cudnn$"),
        ("splash", DECODE, "without a KV cache, got 1 queries on 2048 cached keys"),
        ("splash", {"row_shards": 3}, "the mesh's 3 row shards do not divide 4 rows"),
        ("splash", {"head_shards": 3}, "mesh.tensor=3 does not divide 8 heads in 2 groups"),
        ("cudnn", {}, "'cudnn' runs on GPU, got tpu; use auto, reference, blockwise, splash$"),
        ("cudnn", {"platform": "gpu", "soft_cap": 1.0}, "neither soft_cap nor sinks"),
        ("cudnn", {"platform": "gpu", "largest": True}, "does not return the largest logits, which optimizer.qk_clip"),
        ("cudnn", {"platform": "gpu", "dtype": "float32"}, "bfloat16 and float16, got float32"),
        ("cudnn", {"platform": "gpu", "head_dim": 160}, "at most 128, got 160"),
        ("cudnn", OLD_GPU | {"num_queries": 11, "num_keys": 11}, "even row length, got 11"),
        ("tokamax", {"platform": "gpu"}, "not installed: pip install"),
        ("tokamax", {"tokamax": True}, "runs on GPU, got tpu"),
        ("tokamax", {"platform": "gpu", "tokamax": True, "sinks": True}, "does not support sinks"),
        ("tokamax", {"platform": "gpu", "tokamax": True, "dtype": "float32"}, "bfloat16 and float16, got float32"),
        ("tokamax", {"platform": "gpu", "tokamax": True, "compute_capability": 7.5}, "8.0 or more, got 7.5"),
        ("tokamax", {"platform": "gpu", "tokamax": True, "head_dim": 260}, "at most 256, got 260"),
        ("cudnn", LONG_ON_OLD_GPU, "here of 1,024 MiB, maximum 256 MiB"),
        ("flash", {}, "unknown kernel 'flash'; use one of auto, reference"),
    ],
)
def test_a_kernel_that_cannot_serve(kernel: AttentionKernel, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_attention(kernel, replace(ROWS_2048, **changes))


def test_a_named_kernel_is_refused_where_it_is_called() -> None:
    with pytest.raises(ValueError, match="'cudnn' runs on GPU, got cpu"):
        call(SMALL, CASES["full"], kernel="cudnn")


def test_slow_attention_on_tpu_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    for changes in ({}, {"num_queries": 100, "num_keys": 100}, DECODE, {"platform": "cpu"}):
        choose_attention(replace(ROWS_2048, **changes))
    assert caplog.messages == []
    for _ in range(2):
        choose_attention(replace(ROWS_2048, head_shards=3))
    (message,) = caplog.messages
    assert "blockwise XLA code, which is slow on TPU: splash splits heads over devices: mesh.tensor=3" in message


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="posttrain.kernels"):
        for _ in range(2):
            call(SMALL, CASES["full"])
            call(SMALL, CASES["full"], queries=slice(8, 9))
            call(SMALL, CASES["full"], kernel="blockwise")
    assert [record.message for record in caplog.records if record.name == "posttrain.kernels"] == [
        "attention: kernel 'reference' for rows on cpu",
        "attention: kernel 'reference' for decode on cpu",
        "attention: kernel 'blockwise' for rows on cpu",
    ]


def test_tokamax_on_a_newer_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    call = replace(ROWS_2048, platform="gpu", tokamax=True, soft_cap=5.0)
    monkeypatch.setattr(fused, "TOKAMAX_TOO_NEW", (0, 1))
    assert choose_attention(call) == "blockwise"
    with pytest.raises(ConfigError, match="needs functions that jax no longer has"):
        select_attention("tokamax", call)


def test_places_of_segments_against_loops() -> None:
    rng = np.random.default_rng(0)
    rows = [[3, 1, 4, 0], [8], [2, 2, 2, 2], [1, 7]]  # a 0 at the end: no padding
    segments = np.asarray([np.repeat(rng.permutation(9)[: len(row)], row) for row in rows], np.int32)
    places_of = jax.jit(fused.segment_places, static_argnums=1)
    found = places_of(jnp.asarray(segments), 4)
    for row, starts, lengths in zip(rows, np.asarray(found.starts), np.asarray(found.lengths), strict=True):
        sizes = [size for size in row if size]
        assert starts.tolist() == [sum(sizes[:n]) if n < len(sizes) else -1 for n in range(5)]
        assert lengths.tolist() == sizes + [-1] * (4 - len(sizes))
    assert found.fit and not places_of(jnp.asarray(segments), 3).fit


def test_cudnn_gets_each_sequence_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention within the given places in cuDNN's stead; rows of too many sequences go by blocks."""

    def within(q: jax.Array, k: jax.Array, v: jax.Array, **given: Any) -> jax.Array:
        assert given["mask_type"] == fused.fused_attention_stablehlo.MaskType.PADDING_CAUSAL
        index = jnp.arange(q.shape[1])[None]
        starts = jnp.where(given["q_offsets"] < 0, q.shape[1], given["q_offsets"])
        number = jnp.sum(index[:, :, None] >= starts[:, None], axis=2)
        distance = index[:, :, None] - index[:, None]
        mask = (number[:, :, None] == number[:, None]) & (distance >= 0) & (distance < given["sliding_window_length"])
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=given["scale"], implementation="xla")

    monkeypatch.setattr(fused.fused_attention_stablehlo, "dot_product_attention", within)
    draw, length = np.random.default_rng(0), 512
    q = jnp.asarray(draw.normal(size=(2, length, 4, 8)), jnp.float32)
    k, v = (jnp.asarray(draw.normal(size=(2, 2, length, size)), jnp.float32) for size in (8, 4))
    variant = Variant(window=100, scale=0.3, soft_cap=None)

    @jax.jit
    def reference(q: jax.Array, k: jax.Array, v: jax.Array, places: MaskInputs) -> jax.Array:
        mask = visible(*places, variant.window)
        return full_attention(q, k, v, mask, scale=variant.scale, soft_cap=None, sinks=None).heads

    for sizes in ((200, 112, 200), (100, 100, 100, 100, 100, 12)):
        positions = np.tile(np.concatenate([np.arange(n, dtype=np.int32) for n in sizes]), (2, 1))
        segments = np.tile(np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes), (2, 1))
        places = MaskInputs(*map(jnp.asarray, (positions, positions, segments, segments)), None)
        operands = Operands(q, k, v, places, None)
        found = jax.jit(lambda of: fused.cudnn(of, variant, packed=True, block=128))(operands)
        expected = reference(q, k, v, places)
        assert_allclose(found, expected, atol=2e-6)
