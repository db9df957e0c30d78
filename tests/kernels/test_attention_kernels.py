"""Every implementation of attention for whole rows: equal to the reference, and blind to what it must not see."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from numpy.testing import assert_allclose

from posttrain.kernels.attention import dispatch, fused
from posttrain.kernels.attention.blockwise import blockwise
from posttrain.kernels.attention.call import MaskInputs, Operands, Variant
from tests.kernels.attention_cases import (
    CASES,
    HEADS,
    IMPLEMENTATIONS,
    KV_HEADS,
    LENGTH,
    VALUE_DIM,
    Rows,
    compiled,
    rows,
    run,
)
from tests.often import often

SERVED = {
    "reference": tuple(CASES),
    "blockwise": tuple(CASES),
    "short_rows": tuple(CASES),
    "splash": tuple(CASES),
    "cudnn": ("full", "window"),
    "tokamax": ("full", "window", "soft_cap"),
}
tokamax = pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="needs the extra [kernels]")
EVERY = pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param(
            name,
            variant,
            # "all" has what the others are parts of; a library's kernel has no such case.
            marks=[tokamax] * (name == "tokamax")
            + [pytest.mark.thorough] * (variant != ("all" if "all" in variants else "window")),
        )
        for name, variants in SERVED.items()
        for variant in variants
    ],
)
DATA = rows()
REAL = DATA.segments > 0


def gradient(mask: np.ndarray) -> np.ndarray:
    """Of the output: random at the tokens of `mask`, 0 elsewhere."""
    values = np.random.default_rng(1).normal(size=(*mask.shape, HEADS, VALUE_DIM)).astype(np.float32)
    return values * mask[:, :, None, None]


def assert_same(name: str, variant: str, data: Rows) -> None:
    d_out = gradient(data.segments > 0)
    expected, expected_gradients, _ = run("reference", CASES[variant], data, d_out)
    out, gradients, largest = run(name, CASES[variant], data, d_out)
    assert largest is None
    real = data.segments > 0
    assert_allclose(out[real], expected[real], atol=1e-5)
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert_allclose(got, want, atol=1e-4)


@pytest.mark.few(6)
@EVERY
def test_equals_the_reference(name: str, variant: str) -> None:
    assert_same(name, variant, DATA)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "variant"),
    often(
        [(name, variant) for name in ("reference", "blockwise", "short_rows", "splash") for variant in CASES],
        *((name, "all") for name in ("reference", "blockwise", "short_rows", "splash")),
    ),
)
def test_the_largest_logits(name: str, variant: str) -> None:
    """Before the soft cap, without sinks and padding, in the pass that gives the same output and gradients."""
    case, d_out = CASES[variant], gradient(REAL)
    expected, expected_gradients, _ = run("reference", case, DATA, d_out)
    out, gradients, largest = run(name, case._replace(largest=True), DATA, d_out)
    assert_allclose(out[REAL], expected[REAL], atol=1e-5)
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert_allclose(got, want, atol=1e-4)
    places = np.arange(LENGTH)
    behind = places[:, None] - places
    seen = (behind >= 0) & (behind < (case.window or LENGTH))
    seen = seen & (DATA.segments[:, :, None] == DATA.segments[:, None]) & REAL[:, :, None]
    logits = case.variant.scale * np.einsum("btnh,bnsh->bnts", DATA.q, DATA.k.repeat(HEADS // KV_HEADS, axis=1))
    assert_allclose(largest, np.where(seen[:, None], logits, -np.inf).max(axis=(2, 3)), rtol=1e-5)


@pytest.mark.parametrize("name", ["reference", "blockwise", "short_rows", "splash"])
def test_the_largest_logits_need_no_second_pass(name: str) -> None:
    """As many products and kernels as without them."""

    def count(*, largest: bool) -> Counter[str]:
        case = CASES["all"]._replace(largest=largest)
        text = str(jax.make_jaxpr(compiled.__wrapped__(name, case))(DATA, gradient(REAL)))
        return Counter(re.findall(r"\b(dot_general|pallas_call|exp)\b", text))

    assert count(largest=True) == count(largest=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", ["full", "all"])
def test_blocks_that_do_not_divide_the_row(variant: str) -> None:
    assert_same("blockwise_uneven", variant, DATA)
    assert_same("short_rows_uneven", variant, DATA)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "kv_heads"),
    [("blockwise", 1), ("blockwise", HEADS), ("short_rows", 1), ("short_rows", HEADS), ("splash", 1)],
)
def test_one_group_and_no_groups(name: str, kv_heads: int) -> None:
    assert_same(name, "all", rows(kv_heads=kv_heads))


def test_two_kernels_in_the_backward_pass_of_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MAX_GRADIENTS", 1)
    assert_same("splash_split", "all", DATA)


@pytest.mark.few(1)
@pytest.mark.parametrize("length", [200, 260])
def test_splash_pads_rows_to_whole_blocks(length: int) -> None:
    assert_same("splash", "all", rows(lengths=((120, length - 120), (length - 30,)), length=length))


def test_a_key_block_of_the_backward_pass_may_have_several_of_the_forward_pass() -> None:
    sizes = fused.splash_blocks(1024, 128, None)
    assert (sizes.block_q_dkv, sizes.block_kv_dkv_compute, sizes.block_kv_dkv) == (512, 512, 1024)
    assert_same("splash", "full", rows(lengths=((700, 324), (1000,)), length=1024))


@pytest.mark.parametrize(
    ("length", "padded", "block"),
    [(4096, 4096, 512), (4000, 4096, 512), (1000, 1024, 512), (4224, 4224, 384), (640, 640, 128), (130, 256, 256)],
)
def test_padding_and_blocks_of_a_length(length: int, padded: int, block: int) -> None:
    assert fused.splash_length(length) == padded
    assert fused.splash_blocks(padded, 128, None).block_q == block


@pytest.mark.parametrize(
    ("length", "head_dim", "window", "keys", "one_kernel"),
    [
        (4096, 128, None, 1024, True),
        (4096, 128, 512, 512, True),
        (4096, 256, None, 512, True),
        (4096, 512, None, 256, False),
        (8192, 128, None, 512, False),
        (2304, 64, None, 768, True),
    ],
)
def test_key_blocks_of_the_backward_pass(
    length: int, head_dim: int, window: int | None, keys: int, one_kernel: bool
) -> None:
    sizes = fused.splash_blocks(length, head_dim, window)
    assert (sizes.block_kv_dkv, sizes.use_fused_bwd_kernel) == (keys, one_kernel)
    assert keys % (sizes.block_kv_dkv_compute or 0) == 0


@EVERY
def test_packed_equals_apart(name: str, variant: str) -> None:
    (first, second), apart = (200, 150), rows(lengths=((200,), (150,)))
    packed = [np.zeros_like(x) for x in DATA[:3]]
    time = (1, 2, 2)
    for source, target, axis in zip(apart[:3], packed, time, strict=True):
        source, target = np.moveaxis(source, axis, 1), np.moveaxis(target, axis, 1)
        target[0, :first], target[0, first : first + second] = source[0, :first], source[1, :second]
    data = DATA._replace(q=packed[0], k=packed[1], v=packed[2])
    d_apart = gradient(apart.segments > 0)
    d_packed = np.zeros_like(d_apart)
    d_packed[0, :first], d_packed[0, first : first + second] = d_apart[0, :first], d_apart[1, :second]
    alone, alone_gradients, _ = run(name, CASES[variant], apart, d_apart)
    together, together_gradients, _ = run(name, CASES[variant], data, d_packed)
    pairs = zip((alone, *alone_gradients[:3]), (together, *together_gradients[:3]), (1, *time), strict=True)
    for want, got, axis in pairs:
        want, got = np.moveaxis(want, axis, 1), np.moveaxis(got, axis, 1)
        assert_allclose(got[0, :first], want[0, :first], atol=1e-5)
        assert_allclose(got[0, first : first + second], want[1, :second], atol=1e-5)
    assert_allclose(together_gradients[3], alone_gradients[3], rtol=1e-4, atol=1e-4)


@EVERY
@pytest.mark.parametrize("query", often((0, 130, 199, 200, 340), 200, 340))
def test_no_gradient_reaches_what_a_query_must_not_see(name: str, variant: str, query: int) -> None:
    at_query = np.zeros_like(REAL)
    at_query[0, query] = True
    _, (dq, dk, dv, _), _ = run(name, CASES[variant], DATA, gradient(at_query))
    start, window = (0 if query < 200 else 200), CASES[variant].window
    first = start if window is None else max(start, query - window + 1)
    seen = np.zeros_like(REAL)
    seen[0, first : query + 1] = True
    assert not dq[~at_query].any()
    for gradients in (dk, dv):
        per_key = np.abs(gradients).sum((1, 3))
        assert not per_key[~seen].any()
        assert per_key[seen].all() or query == start


@EVERY
def test_padding_is_finite(name: str, variant: str) -> None:
    data = rows(lengths=((0,), (150,)))
    out, gradients, _ = run(name, CASES[variant], data, gradient(np.ones_like(REAL)))
    assert all(np.isfinite(x).all() for x in (out, *gradients))
    assert out.shape == (2, LENGTH, HEADS, VALUE_DIM)


@pytest.mark.parametrize("name", ["cudnn", pytest.param("tokamax", marks=tokamax)])
def test_some_queries_of_a_row_with_all_of_its_keys(name: str) -> None:
    """As a device of `context` has them: the kernel's own causal mask, by index, would hide keys."""
    data, case = rows(lengths=((70, LENGTH - 70), (LENGTH,)), length=LENGTH), CASES["window"]
    late = slice(LENGTH // 2, None)

    @jax.jit
    def both(data: Rows) -> tuple[jax.Array, jax.Array]:
        positions, segments = data.positions, data.segments
        whole = Operands(*data[:3], MaskInputs(positions, positions, segments, segments, None), None)
        of = whole.mask_inputs._replace(q_positions=positions[:, late], q_segments=segments[:, late])
        with jax.numpy_rank_promotion("allow"):
            part = IMPLEMENTATIONS[name](whole._replace(q=data.q[:, late], mask_inputs=of), case.variant).heads
        return part, IMPLEMENTATIONS["reference"](whole, case.variant).heads[:, late]

    got, expected = both(data)
    assert_allclose(got, expected, atol=1e-5)


IMAGES = ((0, 1, 100, 90), (0, 2, 190, 10), (0, 3, 230, 90), (1, 1, 0, 90), (1, 2, 250, 90))
"""Row, number, first token and length of images."""


def same_with_images(served: Any, images: np.ndarray, window: int | None = None, data: Rows = DATA) -> None:
    """As the reference, with gradients."""
    variant = Variant(window=window, scale=0.3, soft_cap=None, ahead=89)
    there = [jnp.asarray(x) for x in (data.positions, data.segments, images)]

    def loss(attend: Any, q: Any, k: Any, v: Any) -> Any:
        positions, segments, numbers = there
        places = MaskInputs(positions, positions, segments, segments, None, numbers, numbers)
        out = attend(Operands(q, k, v, places, None), variant).heads
        return jnp.sum(jnp.where((segments > 0)[..., None, None], jnp.sin(out), 0.0))

    value, expected = (
        jax.jit(jax.value_and_grad(partial(loss, attend), argnums=(0, 1, 2)))(*data[:3])
        for attend in (served, IMPLEMENTATIONS["reference"])
    )
    for got, want in zip(jax.tree.leaves(value), jax.tree.leaves(expected), strict=True):
        assert_allclose(got, want, atol=1e-4, rtol=1e-5)


def by_entry(operands: Operands, variant: Variant, mesh: Any = None) -> Any:
    """Splash as the entry point makes it; images that are the segments are the same array."""
    q, k, v, of, _ = operands
    numbers = of.q_segments if variant.window is None and variant.ahead == LENGTH else of.q_images
    return dispatch.attention(
        q,
        k,
        v,
        q_positions=of.q_positions,
        k_positions=of.q_positions,
        q_segments=of.q_segments,
        k_segments=of.q_segments,
        q_parents=None,
        window=variant.window,
        scale=variant.scale,
        soft_cap=None,
        sinks=None,
        kernel="splash",
        mesh=mesh,
        images=(numbers, numbers),
        ahead=variant.ahead,
    )


SEEING = {
    "blockwise": partial(blockwise, same_tokens=True, block=64, short=False),
    "short_rows": partial(blockwise, same_tokens=True, block=128, short=True),
    "splash": by_entry,
}


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("window", often((None, 40), 40))
def test_tokens_of_an_image_see_one_another(name: str, window: int | None) -> None:
    """Across blocks; in a window the past of an image is cut, not its future. Gradients too."""
    same_with_images(SEEING[name], numbered_images(), window)


def numbered_images() -> np.ndarray:
    images = np.zeros((2, LENGTH), np.int32)
    for row, number, start, size in IMAGES:
        images[row, start : start + size] = number
    return images


@pytest.mark.thorough
@pytest.mark.parametrize("context", [1, 3])
def test_images_on_several_devices(context: int) -> None:
    grid = np.asarray(jax.devices()[: 2 * context]).reshape(1, 2, context, 1)
    mesh = Mesh(grid, ("data", "fsdp", "context", "tensor"), axis_types=(AxisType.Auto,) * 4)
    same_with_images(partial(by_entry, mesh=mesh), numbered_images(), 40)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_random_images_in_random_documents(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = tuple(tuple(map(int, rng.integers(40, 128, 3))) for _ in range(2))
    images = np.zeros((2, LENGTH), np.int32)
    for row, parts in enumerate(lengths):
        number = start = 0
        for length in parts:
            first = start + int(rng.integers(0, 20))
            while first < start + length - 2:
                number, size = number + 1, min(int(rng.integers(1, 91)), start + length - first)
                images[row, first : first + size] = number
                first += size + int(rng.integers(0, 3))
            start += length
    window = [None, int(rng.integers(1, 200))][seed % 2]
    same_with_images(by_entry, images, window, rows(lengths=lengths))


def test_patches_of_an_image_see_one_another() -> None:
    """Images that are the segments: splash without order, and the reference's past and images."""

    def whole(operands: Operands, variant: Variant) -> Any:
        return by_entry(operands, replace(variant, ahead=LENGTH))

    same_with_images(whole, DATA.segments)
