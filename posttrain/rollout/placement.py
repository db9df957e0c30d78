"""Layout of the sampler's weights over the devices: the trainer's, or one in which no weight travels at each token."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax import Array
from jax.sharding import Mesh

from posttrain.config import MESH_AXES, SamplerTensor
from posttrain.errors import ConfigError
from posttrain.kernels.platform import platform_of
from posttrain.mesh import param_sharding
from posttrain.models.config import ModelConfig
from posttrain.models.decoder import FusedPart
from posttrain.rollout.lanes import mesh_of
from posttrain.weights.state import ModelWeights

LOGGER = logging.getLogger("posttrain.rollout")

SHARE = 4
"""Part of a device's memory, one over this, that weights made for sampling may take."""


@dataclass(frozen=True)
class Placement:
    """Devices of a sampler's rows, cache and weights."""

    mesh: Mesh | None
    """None: one device."""
    fuse: tuple[FusedPart, ...]
    """On accelerators `attention`, whose projections each dispatch would lay out anew otherwise, and `mlp` where the
    weights are copied anyway."""


def choose_placement(
    wanted: SamplerTensor, source: ModelWeights, arrays: Mapping[str, Array | jax.ShapeDtypeStruct], memory: int | None
) -> Placement:
    """The smallest number of devices to split weights over whose part takes at most 1 / `SHARE` of `memory`, the bytes
    of a device (None: unknown, any fits); the trainer's mesh where no weight is split over `fsdp`, and where nothing
    fits. ConfigError for a number that the mesh or the model does not allow.
    """
    trained = mesh_of(next(iter(arrays.values())).sharding)
    on_cpu = platform_of(source.model.compute.mesh if trained is None else trained) == "cpu"

    kept = Placement(trained, () if on_cpu else ("attention",))
    if trained is None:
        if wanted not in ("auto", "trained", 1):
            raise ConfigError(f"rollout.tensor={wanted}: the model is on one device; use auto")
        return kept
    copied: tuple[FusedPart, ...] = () if on_cpu else ("attention", "mlp")
    if isinstance(wanted, int):
        mesh = _sampling_mesh(trained, wanted)
        if mesh is None:
            raise ConfigError(
                f"rollout.tensor={wanted}: must be one of {_sizes(trained)}, for "
                + ", ".join(f"mesh.{axis}={trained.shape[axis]}" for axis in MESH_AXES[1:])
            )
        if mesh != trained and not _divides(source.model.config, wanted):
            least = min(block.attention.num_kv_heads for block in source.model.config.blocks)
            name = source.model.config.model_type
            raise ConfigError(f"rollout.tensor={wanted} must divide num_kv_heads={least} of {name}")
        try:
            _bytes(source, arrays, mesh)
        except ConfigError as error:
            raise ConfigError(f"rollout.tensor={wanted}: {error}") from error
        return kept if mesh == trained else Placement(mesh, copied)
    if wanted == "trained" or _sampling_mesh(trained, trained.shape["tensor"]) == trained:
        return kept
    for size in _sizes(trained):
        mesh = _sampling_mesh(trained, size)
        if mesh is None or size < trained.shape["tensor"] or not _divides(source.model.config, size):
            continue
        if _fits(source, arrays, mesh, memory):
            LOGGER.info("rollout: weights are split over %d devices while samples run, from fsdp", size)
            return Placement(mesh, copied)
    LOGGER.warning(
        "rollout: no copy of the weights fits 1/%d of a device's memory, so they are gathered from fsdp at every "
        "token; rollout.tensor makes one all the same",
        SHARE,
    )
    return kept


def _sizes(mesh: Mesh) -> list[int]:
    """Numbers of devices that weights can be split over. Those of `expert` keep their place in the order of devices."""
    if mesh.shape["expert"] > 1:
        return [mesh.shape["tensor"]]
    devices = mesh.shape["fsdp"] * mesh.shape["context"] * mesh.shape["tensor"]
    return [size for size in range(1, devices + 1) if devices % size == 0]


def _sampling_mesh(mesh: Mesh, tensor: int) -> Mesh | None:
    """The same devices in the same order, none of them along `fsdp`, nor, without `expert`, along `context`; None where
    it cannot be."""
    if tensor not in _sizes(mesh):
        return None
    expert = mesh.shape["expert"]
    context = mesh.shape["context"] if expert > 1 else 1
    if mesh.shape["fsdp"] == 1 and mesh.shape["context"] == context and mesh.shape["tensor"] == tensor:
        return mesh
    grid = mesh.devices.reshape(-1, 1, expert, context, tensor)
    return Mesh(grid, MESH_AXES, axis_types=mesh.axis_types)


def _divides(config: ModelConfig, tensor: int) -> bool:
    return all(block.attention.num_kv_heads % tensor == 0 for block in config.blocks)


def _fits(
    source: ModelWeights, arrays: Mapping[str, Array | jax.ShapeDtypeStruct], mesh: Mesh, memory: int | None
) -> bool:
    try:
        needed = _bytes(source, arrays, mesh)
    except ConfigError:  # an axis does not divide its dimension
        return False
    return memory is None or needed <= memory // SHARE


def _bytes(source: ModelWeights, arrays: Mapping[str, Array | jax.ShapeDtypeStruct], mesh: Mesh) -> int:
    """Bytes of the weights on one device. ConfigError if an axis does not divide its dimension."""
    placed = {path: param_sharding(mesh, path, dims, shape) for path, dims, shape in source.shapes()}
    return sum(math.prod(placed[path].shard_shape(w.shape)) * w.dtype.itemsize for path, w in arrays.items())


def device_memory() -> int | None:
    """Bytes of a local device; None where it does not say, as a CPU."""
    limits: Sequence[int] = [
        stats["bytes_limit"] for device in jax.local_devices() if (stats := device.memory_stats()) is not None
    ]
    return min(limits, default=None)
