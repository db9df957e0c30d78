"""Sync of the actor's weights to the rollout engine: shared arrays, or copies on devices of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from posttrain.cluster.ledger import local_bytes
from posttrain.cluster.transfer import BYTES_AT_ONCE, model_on, moved, shardings_on
from posttrain.config import MESH_AXES
from posttrain.errors import RunError
from posttrain.metrics import Metrics
from posttrain.models.decoder import Decoder
from posttrain.rollout.types import RolloutEngine
from posttrain.train.trainer import Trainer
from posttrain.tree import digests
from posttrain.weights.state import ModelWeights, Weights


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


class Copied:
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


class Beside:
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


class Gathered:
    """Copy of the actor's model for each process, on its own devices: one gather over the processes per update.

    An update moves trained parameters only.
    """

    def __init__(self, actor: Trainer, tensor: int):
        """`tensor`: devices that split each weight; a process's others hold copies."""
        self._actor = actor
        order = actor.mesh.devices.flatten()
        own = [device for device in order if device.process_index == jax.process_index()]
        assert [*order].index(own[0]) % len(own) == 0, "the devices of a process stand together in the mesh"
        axes = actor.mesh.axis_types
        shape = (-1, 1, 1, 1, tensor)
        everywhere = Mesh(order.reshape(shape), MESH_AXES, axis_types=axes)
        self._mesh = Mesh(np.asarray(own).reshape(shape), MESH_AXES, axis_types=axes)
        weights = ModelWeights(actor.model)
        self._places, self._own = shardings_on(everywhere, weights), shardings_on(self._mesh, weights)
        self._programs: dict[frozenset[str], Callable[[Weights], Weights]] = {}
        self.model = weights.bind(self._here(weights.read()))
        self.model.compute = replace(actor.model.compute, mesh=self._mesh)
        self._weights = ModelWeights(self.model)

    def _here(self, arrays: Weights) -> Weights:
        """Arrays on the devices of this process."""
        paths = frozenset(arrays)
        if paths not in self._programs:
            places = {path: self._places[path] for path in paths}
            self._programs[paths] = jax.jit(lambda arrays: arrays, out_shardings=places)
        found = self._programs[paths](arrays)
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
