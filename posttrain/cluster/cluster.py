"""RL cluster: actor, reference, teachers and rollout engine on one mesh; actor and engine share weights."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from posttrain.batch import Batch
from posttrain.cluster.scorers import Reference, Scorer, model_inputs, teacher_logps
from posttrain.metrics import Metrics
from posttrain.rollout.types import RolloutEngine
from posttrain.runtime.profiler import span
from posttrain.train.trainer import Trainer


class Role(enum.Enum):
    ACTOR = "actor"
    REFERENCE = "reference"
    TEACHER = "teacher"


class Cluster:
    """Actor, reference, teachers and rollout engine of one run.

    With `keep_reference`, the reference is the actor as it is when the cluster is made. `teachers` score at the
    actor's temperature.
    """

    def __init__(self, actor: Trainer, engine: RolloutEngine, *, keep_reference: bool, teachers: Sequence[Scorer] = ()):
        self.actor = actor
        self.engine = engine
        self.version = 0
        """Version of the actor's weights: the number of hand-overs to the engine, whatever updates lie between."""
        self._reference = Reference(actor) if keep_reference else None
        self._teachers = tuple(teachers)

    def logps(self, role: Role, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Log-probabilities of the batch's tokens under a role's weights, at the actor's temperature."""
        with span(f"{role.value}/logps"):
            if role is Role.ACTOR:
                return np.asarray(self.actor.stats(model_inputs(batch)).logps)
            if role is Role.TEACHER:
                return teacher_logps(self._teachers, batch)
            if self._reference is None:
                raise ValueError("this cluster keeps no reference; make it with keep_reference=True")
            return self._reference.logps(batch)

    def hand_over(self) -> Metrics:
        """Give the engine the updated weights as a new version."""
        self.version += 1
        return self.sync_weights()

    def sync_weights(self) -> Metrics:
        """Give the engine the actor's weights under their present version."""
        with span("sync"):
            self.engine.update_weights(self.actor.model, self.version)
        return {}
