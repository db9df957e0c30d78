"""RL cluster: actor, critic, reference, teachers and rollout engine, each on the devices that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from posttrain.batch import Batch, model_inputs, own_routing
from posttrain.cluster.reference import ReferencePolicy, Scorer, Teachers
from posttrain.cluster.sync import Replica, WeightSync, local_bytes
from posttrain.losses.value import values_before
from posttrain.metrics import Metrics
from posttrain.rollout.types import RolloutEngine
from posttrain.runtime.profiler import span
from posttrain.train.trainer import Trainer
from posttrain.tree import replace
from posttrain.weights.state import ModelWeights

SHOWN = ("grad_norm", "update_skipped")
"""Metrics of a learner's trainer that are shown beside those of its loss."""


class Learner:
    """Role that learns beside the actor and is saved and restored with it."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def state(self) -> dict[str, Any]:
        return {**self.trainer.state(), "step": jnp.int32(self.trainer.step_number)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore arrays and step. A checkpoint without them, from before there was this role, is refused on
        reading."""
        arrays = {name: value for name, value in state.items() if name != "step"}
        self.trainer.restore(arrays, int(state["step"]))


class Critic(Learner):
    """Values of contexts, learned beside the actor. `warmup`: first versions of the actor's weights in which the critic
    learns alone. `own_tower`: its frozen vision tower may be another than the actor's."""

    def __init__(self, trainer: Trainer, *, warmup: int, own_tower: bool):
        assert trainer.model.config.scalar_head, "a critic has a scalar head"
        super().__init__(trainer)
        self.warmup, self._own_tower = warmup, own_tower

    @span("critic/values")
    def values(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Value before each token of the batch."""
        scores = jnp.asarray(self.trainer.scores(self._inputs(batch)))
        return np.asarray(values_before(scores, jnp.asarray(batch.segments)))

    @span("critic/update")
    def step(self, batch: Batch) -> Metrics:
        """One update of the value loss on a batch with `returns` and `old_values`."""
        told = self.trainer.step(replace(self._inputs(batch), returns=batch.returns, old_values=batch.old_values))
        return _shown(told, "critic")

    def _inputs(self, batch: Batch) -> Batch:
        """Batch as its model reads it, with the actor's features of pictures if they are its own too."""
        inputs = own_routing(batch)
        return replace(inputs, encoded=None) if self._own_tower else inputs


class DrafterLearner(Learner):
    """Block drafter that learns from the samples of each update of the actor, whose weights it reads as they are then.

    `trainer`: of a drafter beside a model that has the actor's arrays.
    """

    def __init__(self, trainer: Trainer, actor: Trainer):
        super().__init__(trainer)
        self._actor, self._weights = ModelWeights(actor.model), ModelWeights(trainer.model)

    @property
    def weights(self) -> dict[str, Array]:
        """Arrays of the drafter, which its next update donates."""
        drafter = self.trainer.model.drafter
        assert drafter is not None
        return drafter.arrays()

    @span("drafter/update")
    def step(self, batch: Batch) -> Metrics:
        """One update on the tokens of a batch that have a weight."""
        self._weights.write(self._actor.read())
        return _shown(self.trainer.step(model_inputs(batch)), "drafter")


def _shown(metrics: Metrics, role: str) -> Metrics:
    own = {name: value for name, value in metrics.items() if f"{role}/" in name}
    return own | {f"{role}/{name}": metrics[name] for name in SHOWN}


class Cluster:
    """Actor, critic, reference, teachers and rollout engine of one run. Teachers score at the actor's temperature.

    `replica`: the actor's model as the engine gets it, which decides how weights reach the engine.
    """

    def __init__(
        self,
        actor: Trainer,
        engine: RolloutEngine,
        replica: Replica,
        *,
        reference: ReferencePolicy | None,
        teachers: Sequence[Scorer] = (),
        critic: Critic | None = None,
        drafter: DrafterLearner | None = None,
    ):
        self.actor = actor
        self.engine = engine
        self.version = 0
        """Version of the actor's weights: the number of syncs after updates, whatever updates lie between."""
        self.teachers = Teachers(teachers)
        self._reference, self._critic, self.drafter = reference, critic, drafter
        self._sync = WeightSync(replica, engine)

    @property
    def reference(self) -> ReferencePolicy:
        """Reference policy. ValueError for a cluster without one."""
        if self._reference is None:
            raise ValueError("this cluster has no reference; make it with one")
        return self._reference

    @property
    def critic(self) -> Critic:
        """Critic. ValueError for a cluster without one."""
        if self._critic is None:
            raise ValueError("this cluster has no critic; make it with one")
        return self._critic

    def update_actor(self, batch: Batch, *, update: bool) -> Metrics:
        """One step of the actor, see `Trainer.step`."""
        return self.actor.step(batch, update=update)

    def update_critic(self, batch: Batch) -> Metrics:
        """One update of the critic's value loss; nothing without a critic."""
        return {} if self._critic is None else self._critic.step(batch)

    def update_drafter(self, batch: Batch) -> Metrics:
        """One update of a block drafter that learns beside the actor; nothing without one."""
        return {} if self.drafter is None else self.drafter.step(batch)

    @property
    def warming_up(self) -> bool:
        """True while the critic learns alone."""
        return self._critic is not None and self.version < self._critic.warmup

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Hold optimizer states on the devices for updates, wherever they are between them."""
        trainers = [self.actor, *(one.trainer for one in (self._critic, self.drafter) if one is not None)]
        for trainer in trainers:
            trainer.load_optimizer()
        try:
            yield
        finally:
            for trainer in trainers:
                trainer.offload_optimizer()

    def sync_weights(self, version: int) -> Metrics:
        """Give the engine the actor's weights as this version; a new one refreshes the reference where that is due."""
        if version > self.version and self._reference is not None:
            self._reference.refresh(version)
        self.version = version
        with span("sync"):
            if self.drafter is not None and isinstance(self.engine, Drafting):
                self.engine.update_drafter(self.drafter.weights)
            return self._sync(version)

    def release_cache(self) -> None:
        """Free the memory of the engine's cache, whose prefixes end with an update."""
        if isinstance(self.engine, Caching):
            self.engine.release_cache()

    def memory(self, phase: str) -> dict[str, float]:
        """Bytes of each role on device and host at the end of a phase, see `ledger`."""
        roles: dict[str, Holder] = {"actor": self.actor.arrays, "optimizer": self.actor.optimizer_arrays}
        if self._critic is not None:
            roles["critic"] = self._critic.trainer.arrays
            roles["critic_optimizer"] = self._critic.trainer.optimizer_arrays
        if self.drafter is not None:
            roles["drafter"] = self.drafter.weights.values
            roles["drafter_optimizer"] = self.drafter.trainer.optimizer_arrays
        if isinstance(self.engine, Holding):
            roles["rollout"] = self.engine.arrays
        if self._reference is not None:
            roles["reference"] = self._reference.arrays
        for number, teacher in enumerate(self.teachers.scorers):
            if isinstance(teacher, Holding):
                roles[f"teacher_{number}"] = teacher.arrays
        return ledger(phase, roles)


Holder = Callable[[], Iterable[Array]]
"""Gives the arrays that a role holds."""

HOST = ("pinned_host", "unpinned_host")


@runtime_checkable
class Holding(Protocol):
    """Role that tells the arrays that it holds."""

    def arrays(self) -> Iterable[Array]: ...


@runtime_checkable
class Caching(Protocol):
    """Engine with a cache that it can give up between samples."""

    def release_cache(self) -> None: ...


@runtime_checkable
class Drafting(Protocol):
    """Engine with a block drafter."""

    def update_drafter(self, weights: Mapping[str, Array]) -> None: ...


def ledger(phase: str, roles: Mapping[str, Holder]) -> dict[str, float]:
    """GiB of each role over the devices of this process: `memory/<phase>/<role>_gib`, in host memory
    `memory/<phase>/<role>_host_gib`.

    Arrays that several roles share count for the first one.
    """
    counted: set[int] = set()
    found: dict[str, float] = {}
    for role, arrays in roles.items():
        device = host = 0
        for array in arrays():
            if id(array) in counted or array.is_deleted():
                continue
            counted.add(id(array))
            if array.sharding.memory_kind in HOST:
                host += local_bytes(array)
            else:
                device += local_bytes(array)
        found[f"memory/{phase}/{role}_gib"] = device / 2**30
        if host:
            found[f"memory/{phase}/{role}_host_gib"] = host / 2**30
    return found
