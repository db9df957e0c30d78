from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.sharding import PartitionSpec
from numpy.testing import assert_array_equal

from posttrain.config import MeshSection
from posttrain.mesh import make_mesh
from posttrain.tree import Max, Mean, added_over, stack_over, sum_over

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


@pytest.mark.parametrize("largest", [4.0, float("nan")])
def test_what_devices_have_is_merged_as_what_micro_batches_have(largest: float) -> None:
    mesh, rows = make_mesh(MeshSection(data=2, fsdp=1), jax.devices()[:2]), PartitionSpec("data")
    tree = Mean(total=jnp.arange(2.0), weight=jnp.ones(2)), Max(largest=jnp.asarray([largest, 3.0]))

    def local(tree: Any) -> Any:
        return added_over(jax.tree.map(lambda x: x[0], tree), ("data",))

    split = partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=PartitionSpec(), check_vma=False)
    mean, top = jax.jit(split(local))(tree)
    assert_array_equal([mean.total, mean.weight, top.largest], [1.0, 2.0, largest])
