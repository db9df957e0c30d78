"""RL cluster: actor, critic, reference, teachers and rollout engine, each on the devices that it is given."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from jaxtyping import Float

from posttrain.batch import Batch, TokenStats
from posttrain.cluster.critic import Critic
from posttrain.cluster.ledger import Holder, Holding, ledger
from posttrain.cluster.reference import ReferencePolicy
from posttrain.cluster.scorers import Scorer, model_inputs, teacher_logps
from posttrain.cluster.sync import Replica, WeightSync
from posttrain.metrics import Metrics
from posttrain.rollout.types import RolloutEngine
from posttrain.runtime.profiler import span
from posttrain.train.trainer import Trainer


class Role(enum.Enum):
    ACTOR = "actor"
    REFERENCE = "reference"
    TEACHER = "teacher"
    CRITIC = "critic"


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
    ):
        self.actor = actor
        self.engine = engine
        self.version = 0
        """Version of the actor's weights: the number of hand-overs to the engine, whatever updates lie between."""
        self.reference = reference
        self.critic = critic
        self._sync = WeightSync(replica, engine)
        self._teachers = tuple(teachers)

    def logps(self, role: Role, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Log-probabilities of the batch's tokens under a role's weights, at the actor's temperature."""
        with span(f"{role.value}/logps"):
            if role is Role.ACTOR:
                return np.asarray(self.stats(batch).logps)
            if role is Role.TEACHER:
                return teacher_logps(self._teachers, batch)
            if self.reference is None:
                raise ValueError("this cluster has no reference; make it with one")
            return self.reference.logps(batch)

    def stats(self, batch: Batch) -> TokenStats:
        """Token statistics of the batch under the actor's weights."""
        return self.actor.stats(model_inputs(batch))

    def values(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Critic's value before each token of the batch."""
        if self.critic is None:
            raise ValueError("this cluster has no critic; make it with one")
        with span(f"{Role.CRITIC.value}/values"):
            return self.critic.values(batch)

    def update_actor(self, batch: Batch, *, update: bool) -> Metrics:
        """One step of the actor, see `Trainer.step`."""
        return self.actor.step(batch, update=update)

    def update_critic(self, batch: Batch) -> Metrics:
        """One update of the critic's value loss; nothing without a critic."""
        if self.critic is None:
            return {}
        with span(f"{Role.CRITIC.value}/update"):
            return self.critic.step(batch)

    @property
    def warming_up(self) -> bool:
        """True while the critic learns alone."""
        return self.critic is not None and self.version < self.critic.warmup

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Hold optimizer states on the devices for updates, wherever they are between them."""
        trainers = [self.actor, *([] if self.critic is None else [self.critic.trainer])]
        for trainer in trainers:
            trainer.load_optimizer()
        try:
            yield
        finally:
            for trainer in trainers:
                trainer.offload_optimizer()

    def hand_over(self) -> Metrics:
        """Give the engine the updated weights as a new version, and refresh the reference where that is due."""
        self.version += 1
        if self.reference is not None:
            self.reference.refresh(self.version)
        return self.sync_weights()

    def sync_weights(self) -> Metrics:
        """Give the engine the actor's weights under their present version."""
        with span("sync"):
            return self._sync(self.version)

    def memory(self, phase: str) -> dict[str, float]:
        """Bytes of each role on device and host at the end of a phase, see `ledger`."""
        roles: dict[str, Holder] = {"actor": self.actor.arrays, "optimizer": self.actor.optimizer_arrays}
        if self.critic is not None:
            roles["critic"] = self.critic.trainer.arrays
            roles["critic_optimizer"] = self.critic.trainer.optimizer_arrays
        if isinstance(self.engine, Holding):
            roles["rollout"] = self.engine.arrays
        if self.reference is not None:
            roles["reference"] = self.reference.arrays
        for number, teacher in enumerate(self._teachers):
            if isinstance(teacher, Holding):
                roles[f"teacher_{number}"] = teacher.arrays
        return ledger(phase, roles)
