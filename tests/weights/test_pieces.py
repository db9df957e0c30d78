"""Which parts of a parameter are read and written at once."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from posttrain.config import MeshSection
from posttrain.mesh import make_mesh
from posttrain.weights import pieces
from posttrain.weights.pieces import Pieces

Dim = tuple[int, int]
"""Devices along a dimension, and the size that each has of it."""
DIMS = st.lists(st.tuples(st.sampled_from([1, 1, 2, 4]), st.integers(1, 5)), min_size=1, max_size=4)


@given(st.tuples(st.permutations(range(4)), DIMS), st.integers(1, 5000))
def test_pieces_cover_a_parameter_and_stay_on_their_devices(chosen: tuple[list[int], list[Dim]], max_size: int) -> None:
    order, dims = chosen
    shape, parts = tuple(n * size for n, size in dims), [n for n, _ in dims]
    cut = Pieces.cut(shape, parts, [dim for dim in order if dim < len(dims)], max_size=max_size)
    parameter = np.arange(math.prod(cut.shape)).reshape(cut.shape)
    local = [size // n for size, n in zip(cut.shape, cut.parts, strict=True)]
    written = np.full(cut.shape, -1)
    for start in cut.starts():
        piece = np.full(cut.piece_shape, -1)
        for bands in cut.bands(start):
            piece[tuple(to for to, _ in bands)] = parameter[tuple(at for _, at in bands)]
        assert piece.min() >= 0
        for device in np.ndindex(*cut.parts):
            of_piece = tuple(slice(i * b, (i + 1) * b) for i, b in zip(device, cut.block, strict=True))
            corner = [i * size + first for i, size, first in zip(device, local, start, strict=True)]
            written[tuple(slice(c, c + b) for c, b in zip(corner, cut.block, strict=True))] = piece[of_piece]
    assert_array_equal(written, parameter)


def test_pieces_are_as_large_as_allowed() -> None:
    def block(max_size: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[int, ...]:
        return Pieces.cut((12, 8, 64, 32), (1, 4, 1, 2), order, max_size=max_size).block

    assert block(12 * 8 * 64 * 32) == (12, 2, 64, 16)
    assert block(5 * 8 * 64 * 32) == (4, 2, 64, 16)
    assert block(8 * 64 * 32 - 1) == (1, 1, 64, 16)
    # Four experts, one on each device, and all columns of a row.
    assert block(4 * 10 * 32) == (1, 1, 10, 16)
    assert block(1) == (1, 1, 1, 16)
    # A transposed matrix lies in the file by columns.
    assert block(4 * 64 * 10, (0, 1, 3, 2)) == (1, 1, 64, 4)


@pytest.mark.parametrize("axes", [None, {"fsdp": 4, "tensor": 2}])
def test_pieces_are_written_in_place(axes: dict[str, int] | None) -> None:
    shape, piece = (4, 256, 512), (1, 256, 512)
    spec = jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    sharding = None if axes is None else jax.sharding.NamedSharding(make_mesh(MeshSection(**axes)), spec)
    struct = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for s in (shape, piece)]
    compiled = pieces.write.lower(*struct, np.zeros(3, np.int32), sharding).compile()
    memory = compiled.memory_analysis()
    local = math.prod(shape) * 2 // (1 if sharding is None else 8)
    assert memory.alias_size_in_bytes == local
    assert memory.temp_size_in_bytes < local // 8
    assert not any(name in compiled.as_text() for name in ("all-gather", "all-reduce", "collective-permute"))
