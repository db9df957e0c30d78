"""Reductions: by hand, additive, blind to masked tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.losses.reduce import ConstantLength, Reduction, sequence_mean, sequence_sums, to_tokens, token_mean

pytestmark = pytest.mark.fast

VALUES = jnp.array([[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]])
WEIGHT = jnp.array([[0.0, 1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.5, 0.0, 0.0]])
SEGMENTS = jnp.array([[1, 1, 1, 2, 2], [1, 1, 1, 2, 0]])

REDUCTIONS: list[Reduction] = [token_mean, sequence_mean, ConstantLength(10)]


@pytest.mark.parametrize(
    ("reduce", "total", "weight"),
    [
        (token_mean, 2 + 3 + 4 + 7 + 4, 4.5),
        (sequence_mean, 2.5 + 4 + 11 / 1.5, 3),
        (ConstantLength(10), 2 + 3 + 4 + 7 + 4, 30),
    ],
)
def test_by_hand(reduce: Reduction, total: float, weight: float) -> None:
    mean = reduce(VALUES, WEIGHT, SEGMENTS)
    np.testing.assert_allclose([mean.total, mean.weight], [total, weight], rtol=1e-6)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_rows_add_up(reduce: Reduction) -> None:
    whole = reduce(VALUES, WEIGHT, SEGMENTS)
    parts = [reduce(VALUES[i : i + 1], WEIGHT[i : i + 1], SEGMENTS[i : i + 1]) for i in range(2)]
    added = parts[0] + parts[1]
    np.testing.assert_allclose([added.total, added.weight], [whole.total, whole.weight], rtol=1e-6)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf, 1e38])
def test_masked_values_do_not_matter(reduce: Reduction, poison: float) -> None:
    def total(values: jax.Array) -> jax.Array:
        return reduce(values, WEIGHT, SEGMENTS).total

    poisoned = jnp.where(WEIGHT > 0, VALUES, poison)
    for clean, dirty in zip(jax.value_and_grad(total)(VALUES), jax.value_and_grad(total)(poisoned), strict=True):
        np.testing.assert_array_equal(clean, dirty)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_nothing_counted(reduce: Reduction) -> None:
    mean = reduce(VALUES, jnp.zeros_like(WEIGHT), SEGMENTS)
    assert float(mean.total) == 0.0
    assert float(mean.weight) == 0.0
    assert np.isnan(mean.value())


def test_sequence_sums_and_back() -> None:
    sums = sequence_sums(VALUES, SEGMENTS)
    np.testing.assert_array_equal(sums[:, :3], [[0, 6, 9], [10, 21, 9]])
    np.testing.assert_array_equal(to_tokens(sums, SEGMENTS), [[6, 6, 6, 9, 9], [21, 21, 21, 9, 10]])


def test_reductions_are_values() -> None:
    assert len({token_mean, sequence_mean, ConstantLength(10), ConstantLength(10)}) == 3
    with pytest.raises(ValueError, match="length=0 must be at least 1"):
        ConstantLength(0)
