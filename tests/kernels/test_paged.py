"""Attention to pages: twins against JAX's reference, and the kernel of joined heads against its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from posttrain.kernels.attention import joined, paged
from posttrain.kernels.attention.call import MaskInputs, Operands, Variant, single_query, visible
from posttrain.kernels.attention.fused import cudnn_arguments
from posttrain.kernels.attention.joined import HeadLanes, NewHeads, joined_attention, joined_reference
from posttrain.kernels.attention.paged import paged_attention, ragged_refusal

ROWS, HEADS, KV_HEADS, HEAD, PAGE, PAGES, WIDTH, REPEATS = 3, 4, 2, 8, 16, 7, 3, 2


def drawn(*shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


@pytest.mark.few(1)
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
    table, lengths = np.asarray([[4, 2, 0], [1, 0, 0], [6, 5, 3]], np.int32), np.asarray([17, 1, 48], np.int32)
    lanes = HeadLanes(keys=HEAD, start=HEAD, values=HEAD)
    # The same heads joined, the newest position of each row not yet stored.
    both = np.concatenate([pages[..., 0::2, :], pages[..., 1::2, :]], axis=-1).swapaxes(3, 4)

    @jax.jit
    def library(q: Array, pages: Array) -> Array:
        ends = np.arange(ROWS + 1, dtype=np.int32), np.asarray([ROWS], np.int32)
        kinds = {"sm_scale": variant.scale, "sliding_window": variant.window, "soft_cap": variant.soft_cap}
        return ref_ragged_paged_attention(q, pages, lengths, table, *ends, **kinds)

    @jax.jit
    def twins(repeat: Array, blank: Array, last: Array) -> tuple[Array, tuple[Array, Array]]:
        layer = repeat, jnp.asarray(table)[None], jnp.asarray(lengths)[None], None
        one, _ = paged_attention(q, pages, *layer, None, None, None, variant)
        new = NewHeads(last, jnp.ones(ROWS, bool))
        return one, paged_attention(q, blank, *layer, lanes, new, None, variant)

    for repeat in range(REPEATS):
        expected = library(q[:, 0], pages[repeat, 0])
        newest = (repeat, 0, table[np.arange(ROWS), (lengths - 1) // PAGE], slice(None), (lengths - 1) % PAGE)
        blank = both.copy()
        blank[newest] = np.nan
        one, (other, stored) = twins(jnp.int32(repeat), jnp.asarray(blank), jnp.asarray(both[newest]))
        np.testing.assert_allclose(one[:, 0], expected, atol=2e-6)
        np.testing.assert_allclose(other[:, 0], expected, atol=2e-6)
        np.testing.assert_array_equal(stored, both)


LANES = {"values": HeadLanes(keys=64, start=64, values=64), "latent": HeadLanes(keys=144, start=0, values=128)}


@pytest.mark.parametrize(
    ("lanes", "heads", "window", "soft_cap", "sinks", "dtype"),
    [
        ("values", (2, 3), None, None, True, jnp.float32),
        pytest.param("values", (1, 4), 20, 2.0, True, jnp.float32, marks=pytest.mark.thorough),
        pytest.param("values", (3, 1), 150, None, False, jnp.bfloat16, marks=pytest.mark.thorough),
        pytest.param("latent", (1, 5), None, None, False, jnp.float32, marks=pytest.mark.thorough),
        pytest.param("latent", (1, 16), None, None, False, jnp.bfloat16, marks=pytest.mark.thorough),
    ],
)
def test_the_kernel_of_joined_heads_against_its_twin(
    lanes: str, heads: tuple[int, int], window: int | None, soft_cap: float | None, sinks: bool, dtype: jnp.dtype
) -> None:
    """Rows of one block and several, empty ones, ends within a page and at its end; a row that may not write. What no
    row may see is no number."""
    lengths = np.asarray([17, 0, 130, 16, 128], np.int32)
    rows, width, (kv_heads, groups), lane = len(lengths), 9, heads, LANES[lanes]
    rng = np.random.default_rng(len(lanes) + groups)
    table = rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    pages = rng.standard_normal((rows * width + 1, kv_heads, PAGE, lane.width)).astype(np.float32)
    for row, length in enumerate(lengths):
        for place in range(max(0, length - 1), width * PAGE):
            pages[table[row, place // PAGE], :, place % PAGE] = np.nan
    pages[-1] = np.nan
    new = NewHeads(
        jnp.asarray(4 * rng.standard_normal((rows, kv_heads, lane.width)), dtype),  # the largest logits of some heads
        jnp.asarray([True, True, True, False, True]),
    )
    q = jnp.asarray(rng.standard_normal((rows, kv_heads * groups, lane.keys)), dtype)
    sink = jnp.asarray(rng.standard_normal(kv_heads * groups), jnp.float32) if sinks else None
    rest = jnp.asarray(table), jnp.asarray(lengths), sink, lane, Variant(window=window, scale=0.2, soft_cap=soft_cap)
    # Two blocks of a row at most.
    mock = pytest.MonkeyPatch()
    with mock.context() as patch:
        patch.setattr(joined, "BLOCK_POSITIONS", 128)
        kernel = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
        got, stored = joined_attention(q, new, jnp.asarray(pages, dtype), *rest, interpret=kernel)
    plain = jnp.asarray(np.nan_to_num(pages), dtype)
    twin = jax.jit(lambda new: joined_reference(q, new, plain, *rest))
    expected, _ = twin(new._replace(writes=jnp.ones(rows, bool)))
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    live = lengths > 0
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32)[live] for x in (got, expected)), rtol=tolerance, atol=tolerance
    )
    assert not np.asarray(got, np.float32)[~live].any()
    _, written = twin(new)
    np.testing.assert_array_equal(*(np.nan_to_num(np.asarray(x, np.float32)) for x in (stored, written)))


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
    refusal = ragged_refusal(1, 192, 4, 1)
    assert refusal is not None and "got 192 in 32" in refusal
    # KV heads, head size, bytes, shards
    taken = [(8, 128, 2, 8), (1, 256, 2, 1), (4, 256, 2, 4), (4, 64, 2, 1), (16, 128, 2, 1), (1, 128, 4, 1)]
    others = [(3, 128, 2, 1), (6, 128, 2, 2), (4, 256, 2, 1), (8, 256, 2, 2), (2, 192, 2, 1)]
    assert not any(ragged_refusal(*heads) for heads in taken) and all(ragged_refusal(*heads) for heads in others)
    pages, q = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((PAGES, PAGE, 6, 128), (ROWS, 6, 128)))
    with pytest.raises(ValueError, match="XLA fully tiled"):  # what the library says of them
        jax.eval_shape(_attend, q, pages)


def test_the_kernel_gets_as_many_page_numbers_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in parts."""
    monkeypatch.setattr(paged, "tpu_kernel", lambda *args, **kinds: asked.append(args[3].shape) or args[0])
    monkeypatch.setattr(paged, "platform_of", lambda mesh: "tpu")
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(paged, "TABLE_ENTRIES", 2 * WIDTH)
    q, pages = drawn(ROWS, 1, 2, 128), drawn(1, 1, PAGES, PAGE, 2, 128)
    lengths, table = jnp.ones((1, ROWS), jnp.int32), jnp.zeros((1, ROWS, WIDTH), jnp.int32)
    variant = Variant(window=None, scale=1.0, soft_cap=None)
    got, _ = paged_attention(q, pages, jnp.int32(0), table, lengths, None, None, None, None, variant)
    np.testing.assert_array_equal(got, q)
    assert asked == [(2, WIDTH), (1, WIDTH)]


def _attend(q: Array, pages: Array) -> Array:
    variant = Variant(window=None, scale=1.0, soft_cap=None)
    lengths, table = jnp.ones(ROWS, jnp.int32), jnp.zeros((ROWS, WIDTH), jnp.int32)
    return paged._ragged(q, pages, table, lengths, variant)


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

    @jax.jit
    def both(operands: Operands) -> tuple[Array, Array]:
        mask = visible(*operands.mask_inputs, window)[:, 0]
        expected = single_query(*operands[:3], mask, scale=0.3, soft_cap=None, sinks=None)
        return jax.nn.dot_product_attention(**cudnn_arguments(operands, variant), implementation="xla"), expected

    got, expected = both(operands)
    np.testing.assert_allclose(got, expected, atol=2e-6)
