"""Sync of the actor's weights to the rollout engine: shared arrays, or copies on other devices, and their transfer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, Sharding

from posttrain.config import MESH_AXES
from posttrain.errors import RunError
from posttrain.mesh import param_sharding
from posttrain.metrics import Metrics
from posttrain.models.decoder import Decoder
from posttrain.rollout.types import RolloutEngine
from posttrain.runtime import processes
from posttrain.train.trainer import Trainer
from posttrain.tree import digests
from posttrain.weights.state import ModelWeights, Weights

BYTES_AT_ONCE = 1 << 30
"""Bytes under way at once."""


def shardings_on(mesh: Mesh, weights: ModelWeights) -> dict[str, Sharding]:
    """Sharding of every parameter on a mesh. ConfigError if an axis does not divide its dimension."""
    return {path: param_sharding(mesh, path, dims, shape) for path, dims, shape in weights.shapes()}


def moved(arrays: Weights, to: Mapping[str, Sharding], *, bytes_at_once: int = BYTES_AT_ONCE) -> Weights:
    """Copy each array to where `to` says; an array that lies there is copied as well, never shared.

    At most `bytes_at_once`, or one array that is larger, are under way.
    """
    done: Weights = {}
    for piece in _pieces(arrays, bytes_at_once):
        done |= jax.block_until_ready(processes.copied(piece, {path: to[path] for path in piece}))
    return done


def _pieces(arrays: Weights, bytes_at_once: int) -> Iterator[Weights]:
    piece: Weights = {}
    size = 0
    for path, array in arrays.items():
        if piece and size + array.nbytes > bytes_at_once:
            yield piece
            piece, size = {}, 0
        piece[path] = array
        size += array.nbytes
    if piece:
        yield piece


def model_on(model: Decoder, mesh: Mesh, *, bytes_at_once: int = BYTES_AT_ONCE) -> Decoder:
    """Copy of a model on another mesh."""
    weights = ModelWeights(model)
    copy = weights.bind(moved(weights.read(), shardings_on(mesh, weights), bytes_at_once=bytes_at_once))
    copy.compute = replace(model.compute, mesh=mesh)
    return copy


def in_host_memory(sharding: Sharding) -> Sharding:
    """Same sharding, in the memory of the devices' hosts."""
    return sharding.with_memory_kind("pinned_host")


class HeldWeights:
    """Weights that lie on the devices or, with `offload`, in the host's memory until they are used.

    `read` and `write`: access to where they are kept.
    """

    def __init__(self, read: Callable[[], Weights], write: Callable[[Weights], None], *, offload: bool):
        self._read, self._write, self._offload = read, write, offload
        self._places: dict[str, Sharding] = {}
        if offload:
            self._places = {path: w.sharding for path, w in read().items()}
            self.store(read())

    @classmethod
    def of(cls, weights: Weights, *, offload: bool) -> HeldWeights:
        """Weights that nothing else keeps."""
        kept = dict(weights)
        return cls(lambda: dict(kept), kept.update, offload=offload)

    @property
    def weights(self) -> Weights:
        """Weights where they lie between uses."""
        return self._read()

    def store(self, weights: Weights) -> None:
        """Hold these weights from now on, of the same layout."""
        if self._offload:
            weights = jax.device_put(weights, {path: in_host_memory(self._places[path]) for path in weights})
        self._write(weights)

    @contextmanager
    def on_devices(self) -> Iterator[Weights]:
        """Weights on the devices, for the duration of a use."""
        yield jax.device_put(self._read(), self._places) if self._offload else self._read()

    def change(self, function: Callable[[Weights], Weights]) -> None:
        """Replace the weights by a function of them on the devices."""
        with self.on_devices() as weights:
            self.store(function(weights))


@runtime_checkable
class Replica(Protocol):
    """The actor's model as the engine gets it."""

    @property
    def model(self) -> Decoder: ...

    def update(self, version: int) -> tuple[int, int]:
        """Take over the actor's present weights; return bytes and arrays that were moved."""
        ...


class Shared:
    """The actor's own model: engine and actor are on the same devices and share every array."""

    def __init__(self, actor: Trainer):
        self._actor = actor

    @property
    def model(self) -> Decoder:
        return self._actor.model

    def update(self, version: int) -> tuple[int, int]:
        return 0, 0


class ReshardedReplica:
    """Copy of the actor's model on other devices. An update moves trained parameters only: of an adapter the adapter.

    RunError if what arrived is not what was sent, bit by bit.
    """

    def __init__(self, actor: Trainer, mesh: Mesh, *, bytes_at_once: int = BYTES_AT_ONCE):
        self._actor, self._bytes_at_once = actor, bytes_at_once
        self.model = model_on(actor.model, mesh, bytes_at_once=bytes_at_once)
        self._weights = ModelWeights(self.model)
        self._places = shardings_on(mesh, self._weights)

    def update(self, version: int) -> tuple[int, int]:
        trained: Weights = {path: w for path, w in self._actor.params.items() if path in self._places}
        self._weights.write(moved(trained, self._places, bytes_at_once=self._bytes_at_once))
        check_arrived(digests(trained), digests(self._weights.read(trained.__contains__)), version)
        return sum(w.nbytes for w in trained.values()), len(trained)


class ColocatedReplica:
    """Copy of the actor's trained parameters on the actor's own devices, for an engine that samples while they are
    updated; all others are shared. An update copies the trained ones, of an adapter the adapter."""

    def __init__(self, actor: Trainer, *, bytes_at_once: int = BYTES_AT_ONCE):
        self._bytes_at_once = bytes_at_once
        self._source = ModelWeights(actor.model)
        # Not projections, which are trained and no part of the model.
        self._trained = frozenset(actor.params).__contains__
        self.model = self._source.bind({**self._source.read(), **self._copy()})
        self._weights = ModelWeights(self.model)

    def update(self, version: int) -> tuple[int, int]:
        copy = self._copy()
        self._weights.write(copy)
        check_arrived(digests(self._source.read(self._trained)), digests(copy), version)
        return sum(w.nbytes for w in copy.values()), len(copy)

    def _copy(self) -> Weights:
        trained = self._source.read(self._trained)
        return moved(trained, {path: w.sharding for path, w in trained.items()}, bytes_at_once=self._bytes_at_once)


class PerProcessReplica:
    """Copy of the actor's model for each process, on its own devices: one gather over the processes per update.

    An update moves trained parameters only.
    """

    def __init__(self, actor: Trainer, tensor: int):
        """`tensor`: devices that split each weight; a process's others hold copies."""
        self._actor = actor
        # Those of a process together: on a torus they may stand apart in the actor's mesh.
        order = sorted(actor.mesh.devices.flat, key=lambda device: device.process_index)
        own = [device for device in order if device.process_index == jax.process_index()]
        axes = actor.mesh.axis_types
        shape = (-1, 1, 1, 1, tensor)
        everywhere = Mesh(np.asarray(order).reshape(shape), MESH_AXES, axis_types=axes)
        self._mesh = Mesh(np.asarray(own).reshape(shape), MESH_AXES, axis_types=axes)
        weights = ModelWeights(actor.model)
        self._places, self._own = shardings_on(everywhere, weights), shardings_on(self._mesh, weights)
        self.model = weights.bind(self._here(weights.read()))
        self.model.compute = replace(actor.model.compute, mesh=self._mesh)
        self._weights = ModelWeights(self.model)

    def _here(self, arrays: Weights) -> Weights:
        """Arrays on the devices of this process."""
        found = moved(arrays, self._places)
        return {
            path: jax.make_array_from_single_device_arrays(
                array.shape, self._own[path], [shard.data for shard in array.addressable_shards]
            )
            for path, array in found.items()
        }

    def update(self, version: int) -> tuple[int, int]:
        trained: Weights = {path: w for path, w in self._actor.params.items() if path in self._own}
        here = self._here(trained)
        self._weights.write(here)
        check_arrived(digests(trained), digests(here), version)
        return sum(local_bytes(w) for w in here.values()), len(here)


def check_arrived(sent: Mapping[str, int], held: Mapping[str, int], version: int) -> None:
    """RunError if digests of arrays at the engine are not those of the actor's."""
    if stale := [path for path in sent if sent[path] != held[path]]:
        raise RunError(
            f"sync: stale weights: {len(stale)} of {len(sent)} arrays of version {version} at the rollout engine are "
            f"not the actor's ({', '.join(stale[:3])}); samples would come from an older policy"
        )


class WeightSync:
    """Hand-over of a replica's weights to the engine, with time and bytes."""

    def __init__(self, replica: Replica, engine: RolloutEngine):
        self._replica, self._engine = replica, engine

    def __call__(self, version: int) -> Metrics:
        started = time.perf_counter()
        size, arrays = self._replica.update(version)
        self._engine.update_weights(self._replica.model, version)
        seconds = time.perf_counter() - started
        gib = size / 2**30
        return {
            "sync/seconds": seconds,
            "sync/gib": gib,
            "sync/gib_per_s": gib / seconds,
            "sync/arrays": float(arrays),
        }


def local_bytes(array: Array) -> int:
    """Bytes of an array on the devices of this process, every copy counted."""
    shard = math.prod(array.sharding.shard_shape(array.shape))
    return shard * array.dtype.itemsize * len(array.sharding.addressable_devices)
