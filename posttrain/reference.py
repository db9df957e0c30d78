"""The model that a run started from, as one that only scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from posttrain.batch import Batch
from posttrain.trainer import Trainer
from posttrain.weights.state import ADAPTER, Weights, without_adapter


class Reference:
    """The actor as it is when this is made.

    With an adapter it is the actor without it, so no second copy of the base exists, only of what is trained in full
    beside the adapter; without one, the weights are copied.
    """

    def __init__(self, actor: Trainer):
        self._actor = actor
        self._has_adapter = any(path.endswith(".lora_b") for path in actor.params)
        own = {path: w for path, w in actor.params.items() if ADAPTER not in path}
        self._weights: Weights = jax.tree.map(jnp.copy, own if self._has_adapter else actor.weights)

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Log-probabilities of the batch's tokens, at the actor's temperature."""
        base = without_adapter(self._actor.weights) if self._has_adapter else {}
        return np.asarray(self._actor.stats(model_inputs(batch), {**base, **self._weights}).logps)


def model_inputs(batch: Batch) -> Batch:
    """A batch without the arrays that no model reads, which would make another program of the same computation."""
    return Batch(
        tokens=batch.tokens,
        positions=batch.positions,
        segments=batch.segments,
        loss_weight=batch.loss_weight,
        experts=batch.experts,
    )
