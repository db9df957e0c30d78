"""Who plays which role, and where. All roles share one mesh; actor and engine share the weights."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from posttrain.batch import Batch
from posttrain.rollout.types import RolloutEngine
from posttrain.trainer import Trainer
from posttrain.weights.state import ADAPTER, Weights, without_adapter


class Role(enum.Enum):
    ACTOR = "actor"
    REFERENCE = "reference"


class Cluster:
    """Actor, reference and rollout engine of one run.

    The reference is the actor as it is when the cluster is made. With an adapter it is the actor without it, so no
    second copy of the base exists; without one, `keep_reference` copies the weights. It also copies what is trained in
    full beside an adapter.
    """

    def __init__(self, actor: Trainer, engine: RolloutEngine, *, keep_reference: bool):
        self.actor = actor
        self.engine = engine
        self._has_adapter = any(path.endswith(".lora_b") for path in actor.params)
        self._reference: Weights | None = None
        if keep_reference:
            own = {path: w for path, w in actor.params.items() if ADAPTER not in path}
            self._reference = jax.tree.map(jnp.copy, own if self._has_adapter else actor.weights)

    def logps(self, role: Role, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Log-probabilities of the batch's tokens under a role's weights, at the actor's temperature."""
        # Without the arrays that the model does not read, which would make another program of the same computation.
        rows = Batch(
            tokens=batch.tokens,
            positions=batch.positions,
            segments=batch.segments,
            loss_weight=batch.loss_weight,
            experts=batch.experts,
        )
        if role is Role.ACTOR:
            return self.actor.stats(rows).logps
        if self._reference is None:
            raise ValueError("this cluster keeps no reference; make it with keep_reference=True")
        base = without_adapter(self.actor.weights) if self._has_adapter else {}
        return self.actor.stats(rows, {**base, **self._reference}).logps

    def sync_weights(self) -> None:
        """Give the engine the actor's weights; their version is the number of updates done."""
        self.engine.update_weights(self.actor.model, self.actor.step_number)
