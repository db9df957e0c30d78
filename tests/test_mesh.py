from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from numpy.testing import assert_allclose

from posttrain.config import MeshSection
from posttrain.errors import ConfigError
from posttrain.mesh import (
    arranged,
    by_slice,
    make_mesh,
    param_sharding,
    replicated,
    ring_hops,
    row_shards,
    single_device_mesh,
)


@dataclass(frozen=True)
class Chip:
    """What JAX tells of a TPU."""

    coords: tuple[int, int, int]
    slice_index: int = 0
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0
    platform: str = "tpu"


def chips(*dims: int, kind: str = "TPU v5 lite", slices: int = 1) -> list[Chip]:
    """Chips of a box, the first coordinate fastest, as JAX lists those of one host."""
    places = [(x, y, z) for z, y, x in itertools.product(*map(range, reversed(dims)))]
    return [Chip(place, number, kind) for number in range(slices) for place in places]


FLAT, CUBE = chips(16, 16, 1), chips(4, 4, 4, kind="TPU v5")


@pytest.mark.parametrize(
    ("devices", "sizes", "before", "hops"),
    [
        (FLAT, (16, 16), [1, 1], [1, 1]),
        (FLAT, (1, 256), [0, 1.06], [0, 1]),
        (FLAT, (32, 8), [8.5, 1.75], [2.25, 1]),
        (chips(2, 4, 1), (1, 8), [0, 1.75], [0, 1]),
        (chips(2, 4, 1), (2, 4), [2, 1.5], [2, 1]),
        (CUBE, (4, 16), [1, 1.25], [1, 1]),
        (chips(3, 3, 1), (3, 3), [1.33, 1.33], [1.33, 1.33]),
    ],
)
def test_neighbours_of_an_axis_are_neighbours_on_the_torus(
    devices: list[Chip], sizes: tuple[int, ...], before: list[float], hops: list[float]
) -> None:
    own, grid = np.asarray(devices).reshape(sizes), arranged(devices, sizes)
    assert {*grid.flat} == {*devices} and grid.shape == sizes
    for order, expected in ((own, before), (grid, hops)):
        assert_allclose(ring_hops(order) or [], expected, atol=0.005)
    assert arranged(devices[::-1], sizes).tolist() == grid.tolist(), "whatever order they come in"


def test_devices_that_are_no_box_keep_their_order(caplog: pytest.LogCaptureFixture) -> None:
    for devices in (jax.devices(), chips(2, 4, 1)[:5], [*chips(2, 2, 1), Chip((0, 0, 0))]):
        assert arranged(devices, (len(devices),)).tolist() == [*devices]
        assert ring_hops(np.asarray(devices)) is None
    said = "mesh: the 5 devices are no box of the torus and keep their order"
    assert caplog.messages == [said, said], "of TPUs"
    part = chips(4, 4, 1)[8:]
    assert ring_hops(arranged(part, (8,))) == [1], "a box anywhere in the slice"
    # Two devices of one chip are nearest.
    cores = [replace(chip, core_on_chip=core) for core in (0, 1) for chip in chips(2, 2, 1, kind="TPU7x")]
    pairs = arranged(cores, (4, 2))
    assert ring_hops(pairs) == [1, 1] and all(one.coords == other.coords for one, other in pairs)


def test_slices_are_outside() -> None:
    devices = jax.devices()
    mesh = make_mesh(MeshSection(slices=2, fsdp=2, tensor=-1))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
    assert mesh.devices[1].ravel().tolist() == devices[4:]
    mesh = make_mesh(MeshSection(slices=2, slice_axis="fsdp", data=2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "expert": 1, "context": 1, "tensor": 1}
    assert {*mesh.devices[:, :2].flat} == {*devices[:4]}
    assert MeshSection(slices=2, data=3, fsdp=4).row_shards == 24


@pytest.mark.parametrize(
    ("wanted", "devices", "message"),
    [
        (1, chips(2, 2, 1, slices=2), "mesh.slices=1: the TPU devices are of 2 slices, 4 and 4; set mesh.slices=2"),
        (2, chips(2, 4, 1), "mesh.slices=2: the TPU devices are of 1 slices, 8; set mesh.slices=1"),
        (
            2,
            [*chips(3, 2, 1), *chips(2, 1, 1, slices=2)[2:]],
            "mesh.slices=2: the TPU devices are of 2 slices, 6 and 2; take as many of each",
        ),
    ],
)
def test_slices_that_are_not_those_of_the_devices(wanted: int, devices: list[Chip], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        by_slice(devices, wanted)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("section", "sizes"),
    [
        (MeshSection(), (1, 8, 1, 1, 1)),
        (MeshSection(data=2, tensor=2), (2, 2, 1, 1, 2)),
        (MeshSection(data=-1, fsdp=1), (8, 1, 1, 1, 1)),
        (MeshSection(data=1, fsdp=4, tensor=2), (1, 4, 1, 1, 2)),
        (MeshSection(fsdp=2, expert=-1), (1, 2, 4, 1, 1)),
        (MeshSection(fsdp=2, context=-1), (1, 2, 1, 4, 1)),
    ],
)
def test_sizes(section: MeshSection, sizes: tuple[int, int, int, int]) -> None:
    mesh = make_mesh(section)
    assert dict(mesh.shape) == dict(zip(("data", "fsdp", "expert", "context", "tensor"), sizes, strict=True))
    assert row_shards(mesh) == 8 // mesh.shape["tensor"] // mesh.shape["context"]
    assert section.row_shards in (None, row_shards(mesh))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            MeshSection(fsdp=3),
            "mesh: data=1, fsdp=3, expert=1, context=1, tensor=1 must multiply to the number of devices, 8",
        ),
        (
            MeshSection(tensor=3),
            "mesh: data=1, fsdp=-1, expert=1, context=1, tensor=3: the product of the others, 3, must divide "
            "the number of devices, 8",
        ),
        (
            MeshSection(slices=3),
            "mesh: data=3, fsdp=-1, expert=1, context=1, tensor=1 (mesh.slices=3 included): the product of the others, "
            "3, must divide the number of devices, 8",
        ),
        (MeshSection(slices=3, data=-1, fsdp=1), "mesh.slices=3 must divide data, here 8 devices"),
    ],
)
def test_sizes_that_cannot_be(section: MeshSection, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_mesh(section)
    assert str(raised.value) == message


@pytest.mark.parametrize("sizes", [{"data": -1}, {"tensor": 0}, {"fsdp": -2}])
def test_sizes_that_no_machine_has(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="sizes are positive, and at most one is -1"):
        MeshSection(**sizes)


def test_an_axis_without_slices() -> None:
    with pytest.raises(ValueError, match="slice_axis=fsdp has no effect on one slice"):
        MeshSection(slice_axis="fsdp")


def test_names_of_dimensions_become_shardings() -> None:
    mesh = make_mesh(MeshSection(data=2, fsdp=2, tensor=2))
    assert param_sharding(mesh, "k", ("layers", "embed", "mlp"), (3, 4, 6)).spec == PartitionSpec(
        None, "fsdp", "tensor"
    )
    assert param_sharding(mesh, "e", ("vocab", "embed"), (4, 4)).spec == PartitionSpec("tensor", "fsdp")
    experts = make_mesh(MeshSection(fsdp=2, expert=2, tensor=2))
    dims = ("layers", "expert", "mlp", "embed")
    assert param_sharding(experts, "d", dims, (3, 4, 6, 8)).spec == PartitionSpec(None, "expert", "tensor", "fsdp")
    with pytest.raises(ConfigError) as raised:
        param_sharding(experts, "mlp.experts.down", dims, (3, 5, 6, 8))
    assert str(raised.value) == (
        "mesh.expert=2 must divide the dimension 'expert' (5) of mlp.experts.down; use a divisor of 5"
    )
    assert param_sharding(mesh, "n", ("head_dim",), (5,)).spec == PartitionSpec(None)
    assert param_sharding(mesh, "head.kernel", ("embed", "vocab"), (4, 7)).spec == PartitionSpec("fsdp", None)
    with pytest.raises(ConfigError) as raised:
        param_sharding(mesh, "mlp.up.kernel", ("embed", "mlp"), (4, 7))
    assert str(raised.value) == (
        "mesh.tensor=2 must divide the dimension 'mlp' (7) of mlp.up.kernel; use a divisor of 7"
    )


def test_single_device_and_replicated() -> None:
    mesh = single_device_mesh()
    assert mesh.devices.tolist() == [[[[[jax.devices()[0]]]]]]
    assert jax.device_put(np.ones(3), replicated(make_mesh(MeshSection()))).sharding.is_fully_replicated
