"""Sync of the actor's weights to the rollout engine: shared arrays, or copies on devices of its own."""

from __future__ import annotations

import time
from typing import Protocol, runtime_checkable

from jax.sharding import Mesh

from posttrain.cluster.transfer import BYTES_AT_ONCE, digests, model_on, moved, shardings_on
from posttrain.errors import RunError
from posttrain.metrics import Metrics
from posttrain.models.decoder import Decoder
from posttrain.rollout.types import RolloutEngine
from posttrain.train.trainer import Trainer
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
        sent, held = digests(trained), digests(self._weights.read(trained.__contains__))
        if stale := [path for path in sent if sent[path] != held[path]]:
            raise RunError(
                f"sync: stale weights: {len(stale)} of {len(sent)} arrays of version {version} at the rollout engine "
                f"are not the actor's ({', '.join(stale[:3])}); samples would come from an older policy"
            )
        return sum(w.nbytes for w in trained.values()), len(trained)


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
