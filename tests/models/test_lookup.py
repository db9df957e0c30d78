"""Lookup in a sharded token table: values and gradient of one device, and no gradient of all rows on every device."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.testing import assert_allclose

from posttrain.config import ROW_AXES, MeshSection
from posttrain.mesh import make_mesh, split_axes
from posttrain.models.layers import Embedding, Init, lookup

ROWS, LENGTH, WIDTH = 8, 4, 16
WHOLE = rf"(?:all-gather|all-reduce)[^=]*= [a-z0-9]+\[{ROWS},{LENGTH},{WIDTH}\]|\[{ROWS},{LENGTH},{WIDTH}\]\S* all-"


@pytest.mark.few(3)
@pytest.mark.parametrize("vocabulary", [20, 96], ids=["sum of tables", "all rows"])
@pytest.mark.parametrize(
    "axes",
    [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "expert": 2}, {"fsdp": 8}, {"fsdp": 2, "context": 4}],
)
def test_eight_devices_as_one(axes: dict[str, int], vocabulary: int) -> None:
    mesh, draw = make_mesh(MeshSection(**axes)), np.random.default_rng(0)
    table = draw.normal(size=(vocabulary, WIDTH)).astype(np.float32)
    tokens = draw.integers(0, vocabulary, (ROWS, LENGTH)).astype(np.int32)
    weight = draw.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)

    def run(mesh: Mesh | None, table: Any, tokens: Any, weight: Any) -> Any:
        def loss(table: Any) -> Any:
            x = lookup(table, tokens, jnp.float32, mesh)
            return jnp.sum(jnp.square(x) * weight), x

        return jax.value_and_grad(loss, has_aux=True)(table)

    (_, expected), expected_gradient = jax.jit(run, static_argnums=0)(None, table, tokens, weight)

    def at(x: np.ndarray, *spec: Any) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    given = at(table, "tensor", split_axes("embed", WIDTH, mesh.shape)), at(tokens, ROW_AXES), at(weight, ROW_AXES)
    compiled = jax.jit(run, static_argnums=0).lower(mesh, *given).compile()
    (_, values), gradient = compiled(*given)
    assert_allclose(values, expected, rtol=1e-6)
    assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-5)
    assert gradient.sharding.shard_shape(gradient.shape) == given[0].sharding.shard_shape(table.shape)
    text = compiled.as_text()
    assert text is not None and re.search(WHOLE, text) is None


@pytest.mark.parametrize(("vocabulary", "width", "stored"), [(256, 72, 128), (256, 128, 128), (250, 72, 72)])
def test_a_table_for_lookups_has_whole_registers(vocabulary: int, width: int, stored: int) -> None:
    """Where a TPU would else store it by columns, and copy it for each program; its rows are the same."""
    embedding = Embedding(vocabulary, width, Init(0.02, np.dtype(np.float32), nnx.Rngs(0)), scale=2.0)
    tokens = jnp.asarray([[0, 5, vocabulary - 1]])
    expected = embedding(tokens, np.dtype(np.float32), None)
    embedding.widen()
    assert embedding.embedding.shape == (vocabulary, stored)
    np.testing.assert_array_equal(embedding(tokens, np.dtype(np.float32), None), expected)
