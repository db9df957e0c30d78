from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.kernels import layout
from posttrain.kernels.layout import computed_once, unstack_layers

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
    monkeypatch.setattr(layout, "platform_of", lambda mesh: "tpu")
    elsewhere = jax.jit(lambda x, y: program(x, y)).lower(x, y).compile()
    assert "conditional" not in elsewhere.as_text()
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-6), found, elsewhere(x, y))
