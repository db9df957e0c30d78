"""Programs made from shapes are those that run on arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

from posttrain.batch import Batch
from posttrain.config import MeshSection
from posttrain.kernels.platform import platform_of, traced_for
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh, single_device_mesh
from posttrain.models.config import Compute
from posttrain.plan.lowered import batch_of
from posttrain.plan.sampling import RolloutShapes
from posttrain.rollout.decode_weights import Loaded
from posttrain.rollout.paged import empty_pool
from posttrain.rollout.programs import Side
from posttrain.train.objective import TrainSettings
from posttrain.train.programs import TrainPrograms
from posttrain.train.trainer import Trainer
from posttrain.weights.load import outline_of
from posttrain.weights.state import ModelWeights
from tests.tiny import tiny_config, tiny_model

SETTINGS = TrainSettings(temperature=1.0, max_grad_norm=1.0)


def outline(mesh: jax.sharding.Mesh) -> object:
    return outline_of(tiny_config(), Compute(dtype=jnp.dtype(jnp.float32), mesh=mesh), np.dtype(np.float32))


def test_an_update_of_shapes_is_that_of_arrays() -> None:
    mesh = make_mesh(MeshSection(data=2, fsdp=2, tensor=2))
    trainer = Trainer(tiny_model(), SFTLoss(), optax.adamw(1e-3), SETTINGS, mesh=mesh)
    whole: Batch = jax.tree.map(np.array, batch_of(8, 16))
    arrays = trainer._lower(trainer._arguments(whole)).as_text()
    shapes = TrainPrograms(outline(mesh), SFTLoss(), optax.adamw(1e-3), SETTINGS, mesh=mesh)  # type: ignore[arg-type]
    assert shapes.lower_update(batch_of(8, 16)).as_text() == arrays


def test_decoding_of_shapes_is_that_of_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options of the platform: XLA refuses one that it does not know."""
    monkeypatch.setattr("posttrain.rollout.programs.compile_options", lambda platform: {f"no_option_of_{platform}": 1})
    mesh = single_device_mesh()
    made = RolloutShapes(outline(mesh), mesh, slots=2, max_length=64, steps=4, max_tokens=16, memory=2**30)  # type: ignore[arg-type]
    source = ModelWeights(tiny_model())
    source.model.compute = Compute(dtype=jnp.dtype(jnp.float32), mesh=mesh)
    arrays = jax.device_put(source.read(), {path: x.sharding for path, x in made.loaded.arrays.items()})
    loaded = Loaded.of(source, arrays, 0, made.loaded.placement)
    pool = empty_pool(made.runner.pool_shapes(loaded))
    placed = made.runner.programs.lower([Side(loaded, pool)], made.rows).as_text()
    lowered = made.lower_decode()
    assert lowered.as_text() == placed
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_option_of_cpu"):
        lowered.compile()


def test_kernels_ask_the_devices_that_they_are_traced_for() -> None:
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("data",), abstract_device=device)
    asked: list[str] = []

    def program(x: jax.Array) -> jax.Array:
        asked.append(platform_of(None))
        return x

    jax.jit(traced_for(mesh, program)).lower(1.0)
    assert asked == ["tpu"] and platform_of(None) == "cpu"
