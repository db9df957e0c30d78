"""Attention to pages: the twin against JAX's own reference, and TPU's kernel lowered on a machine without one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from posttrain.kernels.attention import paged
from posttrain.kernels.attention.call import MaskInputs, Operands, Variant, single_query, visible
from posttrain.kernels.attention.gpu import cudnn_arguments
from posttrain.kernels.attention.paged import heads_apart, ragged_paged_attention, ragged_refusal

ROWS, HEADS, KV_HEADS, HEAD, PAGE, PAGES, WIDTH, REPEATS = 3, 4, 2, 8, 16, 7, 3, 2


def drawn(*shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
    "variant",
    [
        Variant(window=None, scale=0.3, soft_cap=None),
        Variant(window=5, scale=1.0, soft_cap=None),
        Variant(window=20, scale=0.5, soft_cap=2.0),
    ],
)
def test_the_twin_against_the_librarys_reference(variant: Variant) -> None:
    q, pages = drawn(ROWS, 1, HEADS, HEAD), drawn(REPEATS, 1, PAGES, PAGE, 2 * KV_HEADS, HEAD)
    table = jnp.asarray([[4, 2, 0], [1, 0, 0], [6, 5, 3]], jnp.int32)
    lengths = jnp.asarray([17, 1, 48], jnp.int32)
    for repeat in range(REPEATS):
        layer = jnp.int32(repeat), table[None], lengths[None], None, variant
        expected = ref_ragged_paged_attention(
            q[:, 0],
            pages[repeat, 0],
            lengths,
            table,
            jnp.arange(ROWS + 1, dtype=jnp.int32),
            jnp.asarray([ROWS], jnp.int32),
            sm_scale=variant.scale,
            sliding_window=variant.window,
            soft_cap=variant.soft_cap,
        )
        apart = pages.reshape(*pages.shape[:4], KV_HEADS, 2, HEAD).swapaxes(3, 4)
        for stored in (pages, apart):
            got = ragged_paged_attention(q, stored, *layer)
            np.testing.assert_allclose(got[:, 0], expected, atol=2e-6)


def test_a_window_reads_its_pages_only() -> None:
    table = jnp.arange(40, dtype=jnp.int32).reshape(4, 10)
    lengths = jnp.asarray([1, 33, 37, 160], jnp.int32)
    for window, pages in ((1, 1), (2, 2), (17, 2), (18, 3), (33, 3)):
        found, starts = paged.recent_pages(table, lengths, PAGE, window)
        assert found.shape == (4, pages)
        for row, length, start, read in zip(table, lengths.tolist(), starts.tolist(), found, strict=True):
            first = max(0, length - window)  # the oldest position that is seen
            assert start <= first < start + PAGE and length <= start + pages * PAGE
            assert read.tolist() == [row[min(start // PAGE + n, 9)] for n in range(pages)]
    for window in (None, 146):
        found, starts = paged.recent_pages(table, lengths, PAGE, window)
        assert found is table and not starts.any()


def test_pages_that_the_kernel_does_not_take() -> None:
    assert ragged_refusal(256, 2) is None is ragged_refusal(128, 4)
    refusal = ragged_refusal(192, 4)
    assert refusal is not None and "got 192 in 32" in refusal
    # KV heads, head size, bytes, shards
    together = [(8, 128, 2, 8), (1, 256, 2, 1), (4, 256, 2, 4), (4, 64, 2, 1), (16, 128, 2, 1)]
    apart = [(3, 128, 2, 1), (6, 128, 2, 2), (4, 256, 2, 1), (8, 256, 2, 2), (2, 192, 2, 1)]
    assert not any(heads_apart(*heads) for heads in together) and all(heads_apart(*heads) for heads in apart)
    pages, q = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((PAGES, PAGE, 6, 128), (ROWS, 6, 128)))
    with pytest.raises(ValueError, match="XLA fully tiled"):  # what the library says of them
        jax.eval_shape(_attend, q, pages)


def test_the_kernel_gets_as_many_page_numbers_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in parts."""
    monkeypatch.setattr(paged, "tpu_kernel", lambda *args, **kinds: asked.append(args[3].shape) or args[0])
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(paged, "TABLE_ENTRIES", 2 * WIDTH)
    q = drawn(ROWS, 2, 128)
    np.testing.assert_array_equal(_attend(q, drawn(PAGES, PAGE, 2, 128)), q)
    assert asked == [(2, WIDTH), (1, WIDTH)]


def _attend(q: Array, pages: Array) -> Array:
    variant = Variant(window=None, scale=1.0, soft_cap=None)
    lengths, table = jnp.ones(ROWS, jnp.int32), jnp.zeros((ROWS, WIDTH), jnp.int32)
    return paged._on_tpu(q, pages, lengths, table, variant)


@pytest.mark.parametrize("window", [None, 5])
def test_cudnns_call_for_one_query(window: int | None) -> None:
    """The same arguments, served by XLA, against the reference."""
    length = 12
    k, v = drawn(ROWS, KV_HEADS, length, HEAD), drawn(ROWS, KV_HEADS, length, HEAD)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (ROWS, length))
    ones = jnp.ones_like(positions)
    places = MaskInputs(jnp.asarray([[3], [0], [11]], jnp.int32), positions, ones[:, :1], ones, None)
    operands = Operands(drawn(ROWS, 1, HEADS, HEAD), k, v, places, None)
    variant = Variant(window=window, scale=0.3, soft_cap=None)
    expected = single_query(*operands[:3], visible(*places, window)[:, 0], scale=0.3, soft_cap=None, sinks=None)
    got = jax.nn.dot_product_attention(**cudnn_arguments(operands, variant), implementation="xla")
    np.testing.assert_allclose(got, expected, atol=2e-6)
