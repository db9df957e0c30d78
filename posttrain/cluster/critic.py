"""Critic: a value model with a scalar head, its own optimizer and devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from posttrain.batch import Batch
from posttrain.cluster.scorers import own_routing
from posttrain.losses.value import values_before
from posttrain.metrics import Metrics
from posttrain.train.trainer import Trainer
from posttrain.tree import replace

SHOWN = {"grad_norm": "critic/grad_norm", "update_skipped": "critic/update_skipped"}
"""Metrics of the critic's trainer that are shown beside those of its loss."""


class Critic:
    """Values of contexts, learned beside the actor. `warmup`: first versions of the actor's weights in which the critic
    learns alone."""

    def __init__(self, trainer: Trainer, *, warmup: int):
        assert trainer.model.config.scalar_head, "a critic has a scalar head"
        self.trainer, self.warmup = trainer, warmup

    def values(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Value before each token of the batch."""
        scores = jnp.asarray(self.trainer.scores(own_routing(batch)))
        return np.asarray(values_before(scores, jnp.asarray(batch.segments)))

    def step(self, batch: Batch) -> Metrics:
        """One update of the value loss on a batch with `returns` and `old_values`."""
        told = self.trainer.step(critic_inputs(batch))
        return {SHOWN.get(name, name): value for name, value in told.items() if name in SHOWN or "critic/" in name}

    def state(self) -> dict[str, Any]:
        return {**self.trainer.state(), "step": jnp.int32(self.trainer.step_number)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore arrays and step. A checkpoint without them, from before there was a critic, is refused on reading."""
        arrays = {name: value for name, value in state.items() if name != "step"}
        self.trainer.restore(arrays, int(state["step"]))


def critic_inputs(batch: Batch) -> Batch:
    """Batch with what the critic and its loss read."""
    return replace(own_routing(batch), returns=batch.returns, old_values=batch.old_values)
