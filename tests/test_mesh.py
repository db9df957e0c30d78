from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from posttrain.config import MeshSection
from posttrain.errors import ConfigError
from posttrain.mesh import make_mesh, param_sharding, replicated, row_shards, single_device_mesh


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
