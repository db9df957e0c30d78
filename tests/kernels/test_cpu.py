"""Matrix products and their gradients, values computed once, unstacked layers, and caches, on CPU and elsewhere."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.config import MeshSection
from posttrain.kernels.platform import computed_once, matmul, unstack_layers
from posttrain.mesh import make_mesh
from posttrain.models.cache import KVCache, empty_cache
from tests.often import often
from tests.tiny import tiny_model

SIZES = [(16, 24), (24, 16), (16, 16)]


def operands(lead: tuple[int, ...], size: tuple[int, int], dtype: str) -> list[Array]:
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=shape).astype(jnp.dtype(dtype)))
        for shape in ((*lead, size[0]), size, (*lead, size[1]))
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lead", often([((),), ((6,),), ((4, 6),), ((4, 2, 3),)], ((),), ((4, 6),)))
@pytest.mark.parametrize(("dtype", "added_in"), [("float32", None), ("bfloat16", None), ("bfloat16", jnp.float32)])
def test_gradient_is_the_librarys(
    lead: tuple[int, ...], size: tuple[int, int], dtype: str, added_in: type | None
) -> None:
    x, w, cotangent = operands(lead, size, dtype)
    cotangent = jnp.asarray(np.asarray(cotangent, added_in or dtype))

    @jax.jit
    def both(x: Array, w: Array, cotangent: Array) -> list[tuple[Array, tuple[Array, ...]]]:
        out, pull = jax.vjp(lambda x, w: matmul(x, w, added_in), x, w)
        wide, of_library = jax.vjp(jnp.matmul, *(y.astype(jnp.float32) for y in (x, w)))
        return [(out, pull(cotangent)), (wide, of_library(cotangent.astype(jnp.float32)))]

    (out, gradients), (wide, of_library) = both(x, w, cotangent)
    assert out.dtype == cotangent.dtype
    tolerance = 2e-5 if dtype == "float32" else 0.1
    assert_allclose(np.asarray(out, np.float32), wide, atol=tolerance)
    for got, expected in zip(gradients, of_library, strict=True):
        assert got.dtype == x.dtype
        assert_allclose(np.asarray(got, np.float32), expected, atol=tolerance)


@pytest.mark.parametrize("size", SIZES)
def test_on_a_mesh(size: tuple[int, int]) -> None:
    x, w, cotangent = operands((8, 4), size, "float32")
    mesh = make_mesh(MeshSection(fsdp=4, tensor=2))
    placed = [
        jax.device_put(y, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))
        for y, axes in ((x, ("fsdp",)), (w, ("fsdp", "tensor")), (cotangent, ("fsdp", None, "tensor")))
    ]

    def gradient(x: Array, w: Array, cotangent: Array) -> tuple[Array, Array]:
        return jax.vjp(matmul, x, w)[1](cotangent)

    for got, expected in zip(jax.jit(gradient)(*placed), gradient(x, w, cotangent), strict=True):
        assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_only_a_cpu_has_operands_turned(size: tuple[int, int], platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a barrier would only keep the compiler from its own choice of layouts."""
    monkeypatch.setattr("posttrain.kernels.platform.platform_of", lambda mesh: platform)
    x, w, cotangent = operands((4, 6), size, "float32")
    text = jax.jit(lambda x, w, cotangent: jax.vjp(matmul, x, w)[1](cotangent)).lower(x, w, cotangent).as_text()
    assert ("optimization_barrier" in text) == (platform == "cpu" and size[0] > size[1])
    for got, expected in zip(jax.vjp(matmul, x, w)[1](cotangent), jax.vjp(jnp.matmul, x, w)[1](cotangent), strict=True):
        assert_allclose(got, expected, atol=2e-5)


STACK = jnp.arange(24.0).reshape(3, 4, 2)
NOUGHT = jnp.int32(0)


@pytest.mark.parametrize("repeats", [1, 3])
def test_layers_of_a_stack_and_their_gradients(repeats: int) -> None:
    stack = STACK[:repeats]

    def total(stack: Array, cut: Any) -> Array:
        return sum(((number + 1) * jnp.sin(layer)).sum() for number, layer in enumerate(cut(stack)))

    layers = jax.jit(unstack_layers)(stack, NOUGHT)
    assert_array_equal(jnp.stack(layers), stack)
    found = jax.jit(jax.grad(total), static_argnums=1)(stack, lambda stack: unstack_layers(stack, NOUGHT))
    assert_array_equal(found, jax.jit(jax.grad(total), static_argnums=1)(stack, list))


def test_integers_have_layers_too() -> None:
    """As the codes of quantised weights, beside which others are trained."""
    codes = jnp.arange(6, dtype=jnp.int8).reshape(3, 2)

    def total(scales: Array, codes: Array) -> Array:
        parts = zip(unstack_layers(scales, NOUGHT), unstack_layers(codes, NOUGHT), strict=True)
        return sum((scale * code).sum() for scale, code in parts)

    assert_array_equal(jax.jit(jax.grad(total))(jnp.ones((3, 2)), codes), codes.astype(jnp.float32))


@pytest.mark.optimized
def test_places_are_given_to_kernels() -> None:
    """A place that the compiler knew would be part of a kernel, and so a kernel of its own."""

    @jax.jit
    def program(stack: Array, opaque_zero: Array) -> list[Array]:
        return [jnp.sin(layer) for layer in unstack_layers(stack, opaque_zero)]

    text = program.lower(STACK, NOUGHT).compile().as_text()
    assert "dynamic-slice" in text and " slice(" not in text


@pytest.mark.optimized
def test_what_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: Array, y: Array) -> list[Array]:
        (sine,) = computed_once(lambda: (jnp.sin(x)[None],), x[0] >= 0, None)
        return [(y * sine).sum(), (y + sine).sum(axis=-1), jnp.cumsum(y - sine, axis=-1)]

    x, y = jnp.arange(8.0), jnp.ones((4, 8))
    compiled = jax.jit(program).lower(x, y).compile()
    assert compiled.as_text().count(" sine(") == 1
    found = compiled(x, y)
    monkeypatch.setattr("posttrain.kernels.platform.platform_of", lambda mesh: "tpu")
    elsewhere = jax.jit(lambda x, y: program(x, y)).lower(x, y).compile()
    assert "conditional" not in elsewhere.as_text()
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-6), found, elsewhere(x, y))


@pytest.mark.optimized
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_row_is_decoded_without_a_copy_of_its_cache(tokens: int) -> None:
    model = tiny_model(num_layers=2).for_decoding()
    graph, state = nnx.split(model)
    cache = empty_cache(model.config, 1, 64, jnp.dtype(jnp.float32))

    @partial(jax.jit, donate_argnums=3)
    def program(state: nnx.State, ids: Array, start: Array, cache: KVCache) -> tuple[Array, KVCache]:
        positions = start + jnp.arange(tokens, dtype=jnp.int32)[None]
        hidden, after, _ = nnx.merge(graph, state).forward(ids, positions, jnp.ones_like(ids), cache)
        assert isinstance(after, KVCache)
        return hidden, after

    text = program.lower(state, jnp.ones((1, tokens), jnp.int32), jnp.int32(5), cache).compile().as_text()
    sizes = {x.size for x in jax.tree.leaves(cache)}
    of_whole = [
        line
        for line in text.splitlines()
        if (found := re.search(r"= f32\[([\d,]+)\]\S* (?:copy|transpose|dynamic-update-slice)\(", line))
        and math.prod(map(int, found[1].split(","))) in sizes
    ]
    assert not of_whole
