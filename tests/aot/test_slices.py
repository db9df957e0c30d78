"""Devices of slices that are not there: their order on the torus, and what of a step goes between slices."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from posttrain.config import MeshSection
from posttrain.errors import ConfigError
from posttrain.mesh import BATCH_SPEC, make_mesh, param_sharding, ring_hops, torus_note
from posttrain.plan.hlo import ProgramText
from posttrain.plan.lowered import compile_program
from posttrain.plan.machine import machine, topology_devices

DIMS, SHAPE, ROWS = ("embed", "mlp"), (2048, 1024), 256


@pytest.mark.parametrize(
    ("kind", "shape", "sizes", "hops"),
    [
        ("v5e", "16x16", {"data": 16, "fsdp": 16}, [1, 1]),
        ("v6e", "16x16", {"fsdp": 256}, [0, 1]),
        ("v5e", "2x4", {"fsdp": 8}, [0, 1]),
        ("v5p", "4x4x4", {"data": 4, "fsdp": 16}, [1, 1]),
    ],
)
def test_neighbours_on_an_axis(kind: str, shape: str, sizes: dict[str, int], hops: list[float]) -> None:
    mesh = make_mesh(MeshSection(**sizes), topology_devices(kind, shape))
    assert ring_hops(mesh.devices) == [*hops, 0, 0, 0]


def test_a_part_of_a_slice() -> None:
    devices = topology_devices("v5e", "4x4")
    assert torus_note(make_mesh(MeshSection(), devices[:8])) == "links between neighbours on a ring: fsdp 1"
    kept = make_mesh(MeshSection(), devices[:7])
    assert torus_note(kept) == "the devices are no box of the torus and keep their order"
    assert kept.devices.ravel().tolist() == [*devices[:7]]


def test_slices_are_those_of_the_devices() -> None:
    devices = machine("2xv5e-16").devices()
    with pytest.raises(ConfigError, match="mesh.slices=1: the TPU devices are of 2 slices, 16 and 16; set mesh.slices"):
        make_mesh(MeshSection(), devices)
    mesh = make_mesh(MeshSection(slices=2, data=4, fsdp=-1), devices)
    assert mesh.shape["data"] == 8 and mesh.shape["fsdp"] == 4
    assert [{d.slice_index for d in half.flat} for half in (mesh.devices[:4], mesh.devices[4:])] == [{0}, {1}]
    assert torus_note(mesh) == "links between neighbours on a ring: data 2, fsdp 1; data continues over 2 slices"


def gradient(axis: Literal["data", "fsdp"]) -> ProgramText:
    """Gradient of a product on two slices of 2x2."""
    mesh = make_mesh(MeshSection(slices=2, slice_axis=axis), topology_devices("v5e", "2x2", 2))
    place = param_sharding(mesh, "w", DIMS, SHAPE)
    w = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=place)
    x = jax.ShapeDtypeStruct((ROWS, SHAPE[0]), jnp.float32, sharding=NamedSharding(mesh, BATCH_SPEC))
    step = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), out_shardings=place)
    return compile_program(step.lower(w, x), mesh.size, num_slices=2).text


def test_gradients_go_between_slices_and_weights_where_asked() -> None:
    data, fsdp = gradient("data"), gradient("fsdp")
    size = 4 * SHAPE[0] * SHAPE[1]
    # Each device sends its quarter of the gradient.
    assert [c.kind for c in data.between] == ["all-reduce"] and data.wire_between() == size / 4
    gathered = [c.wire for c in fsdp.between if c.kind == "all-gather"]
    assert gathered == [size / 8], "each device's part of the weights"
    assert data.wire() > 0 and fsdp.wire() > 0
