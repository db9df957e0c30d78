"""Two answers that go on from one prompt in their row see what they would see with a prompt each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from posttrain.kernels.attention.call import MaskInputs, Operands
from tests.kernels.attention_cases import CASES, HEAD_DIM, HEADS, IMPLEMENTATIONS, KV_HEADS, VALUE_DIM, Case

PROMPT, FIRST, SECOND = 150, 90, 144
LENGTH = PROMPT + FIRST + SECOND
STARTS = (PROMPT, PROMPT + FIRST)
OWN = {"first": np.r_[:PROMPT, STARTS[0] : STARTS[1]], "second": np.r_[:PROMPT, STARTS[1] : LENGTH]}
"""Where the tokens of each answer and of its prompt stand."""


def drawn() -> tuple[Array, ...]:
    rng = np.random.default_rng(0)
    shapes = ((1, LENGTH, HEADS, HEAD_DIM), (1, KV_HEADS, LENGTH, HEAD_DIM), (1, KV_HEADS, LENGTH, VALUE_DIM), (HEADS,))
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def row(*values: int) -> Array:
    return jnp.asarray(np.repeat(np.asarray(values, np.int32), (PROMPT, FIRST, SECOND)))[None]


def shared_places() -> MaskInputs:
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None] - row(0, 0, FIRST)
    return MaskInputs(positions, positions, segments := row(1, 2, 3), segments, row(0, 1, 1))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("reference", "all"),
        ("blockwise", "full"),
        ("blockwise", "all"),
        ("short_rows", "all"),
        ("blockwise_uneven", "window"),
        ("cudnn", "window"),
    ],
)
def test_answers_go_on_from_one_prompt(name: str, case: str) -> None:
    kind: Case = CASES[case]
    *arrays, sinks = drawn()
    given = sinks if kind.sinks else None
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(1, LENGTH, HEADS, VALUE_DIM)), jnp.float32)

    def shared(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out = IMPLEMENTATIONS[name](Operands(q, k, v, shared_places(), given), kind.variant).heads
        # The prompt is in both sequences that it is compared with, and here once.
        return jnp.sum(out * weights * (1 + (row(1, 0, 0) > 0))[..., None, None]), out

    def apart(q: Array, k: Array, v: Array) -> tuple[Array, dict[str, Array]]:
        total, outs = jnp.zeros(()), {}
        for own, places in OWN.items():
            positions = jnp.arange(len(places), dtype=jnp.int32)[None]
            ones = jnp.ones_like(positions)
            operands = Operands(
                q[:, places],
                k[:, :, places],
                v[:, :, places],
                MaskInputs(positions, positions, ones, ones, None),
                given,
            )
            outs[own] = IMPLEMENTATIONS["reference"](operands, kind.variant).heads
            total += jnp.sum(outs[own] * weights[:, places])
        return total, outs

    gradients, out = jax.jit(jax.grad(shared, argnums=(0, 1, 2), has_aux=True))(*arrays)
    expected, outs = jax.jit(jax.grad(apart, argnums=(0, 1, 2), has_aux=True))(*arrays)
    _, without_gradient = jax.jit(shared)(*arrays)
    for own, places in OWN.items():
        np.testing.assert_allclose(out[:, places], outs[own], atol=1e-5)
        np.testing.assert_allclose(without_gradient[:, places], outs[own], atol=1e-5)
    for got, want in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("name", ["blockwise", "short_rows"])
def test_one_answer_does_not_see_the_other(name: str) -> None:
    *arrays, _ = drawn()

    def second(k: Array) -> Array:
        out = IMPLEMENTATIONS[name](
            Operands(arrays[0], k, arrays[2], shared_places(), None), CASES["full"].variant
        ).heads
        return jnp.sum(out[:, STARTS[1] :])

    gradient = np.asarray(jax.jit(jax.grad(second))(arrays[1]))
    assert not gradient[:, :, STARTS[0] : STARTS[1]].any()
    assert gradient[:, :, :PROMPT].any() and gradient[:, :, STARTS[1] :].any()
