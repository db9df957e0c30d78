from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from numpy.testing import assert_array_equal

from posttrain.train.objective import stack_over, sum_over

pytestmark = pytest.mark.fast

MICRO = jnp.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(("over", "expected"), [(sum_over, 28.0), (stack_over, [6.0, 22.0, 0.0])])
def test_only_the_first_count_and_one_trace(over: Any, expected: Any) -> None:
    """Of a whole model twice the trace would be seconds of the first step."""
    traced = []

    def function(rows: Array) -> Array:
        traced.append(rows.shape)
        return jnp.sum(rows)

    found = jax.jit(lambda micro, count: over(function, micro, count))(MICRO, jnp.int32(2))
    assert_array_equal(found, expected)
    assert traced == [(4,)]
