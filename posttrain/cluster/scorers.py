"""Models that only score: the one that a run started from, and teachers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float

from posttrain.batch import Batch, TopK, rows_per_pass, teacher_batch
from posttrain.kernels.logits.token_stats import token_stats
from posttrain.kernels.logits.top_k import top_k
from posttrain.mesh import BATCH_SPEC, row_shards
from posttrain.models.decoder import Decoder
from posttrain.train.trainer import Trainer
from posttrain.tree import replace
from posttrain.weights.state import ModelWeights, Weights


class Reference:
    """The actor as it is when this is made.

    Only what is trained is copied: of an actor with an adapter the adapter, which need not be a new one, and what is
    trained in full beside it. No second copy of the base exists.
    """

    def __init__(self, actor: Trainer):
        self._actor = actor
        self._weights: Weights = jax.tree.map(jnp.copy, actor.params)

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Log-probabilities of the batch's tokens, at the actor's temperature."""
        return np.asarray(self._actor.stats(_own_routing(batch), {**self._actor.weights, **self._weights}).logps)

    def added_to(self, batch: Batch) -> Batch:
        """The batch with its log-probabilities."""
        return replace(batch, ref_logps=self.logps(batch))

    def for_step(self, batch: Batch) -> Batch:
        """The same for the actor's next step, which, where it is the first, is compiled meanwhile."""
        self._actor.compile_ahead(replace(batch, ref_logps=np.zeros(batch.shape, np.float32)), _own_routing(batch))
        return self.added_to(batch)


def _own_routing(batch: Batch) -> Batch:
    """The inputs of a model whose router chooses for itself: recorded experts are the actor's."""
    return replace(model_inputs(batch), experts=None)


def model_inputs(batch: Batch) -> Batch:
    """A batch without the arrays that no model reads, which would make another program of the same computation."""
    return Batch(
        tokens=batch.tokens,
        positions=batch.positions,
        segments=batch.segments,
        loss_weight=batch.loss_weight,
        parents=batch.parents,
        experts=batch.experts,
    )


class FrozenModel:
    """A model on `mesh`, where it was loaded, that says what it thinks of host rows; `rows` of them in one pass.

    `temperature`: of `logps`, and of the divergence that `top_k` is for. `k`: how many ids `top_k` gives.
    """

    def __init__(self, model: Decoder, mesh: Mesh, *, temperature: float, rows: int | None = None, k: int = 1):
        self._weights, self._mesh, self._rows = ModelWeights(model), mesh, rows
        vocab_size = model.config.vocab_size

        def logps(weights: Weights, tokens: Array, positions: Array, segments: Array, weight: Array) -> Array:
            bound = self._weights.bind(weights)
            hidden, _ = bound(tokens, positions, segments)
            stats = token_stats(
                bound.logits,
                hidden,
                tokens,
                segments,
                temperature=temperature,
                vocab_size=vocab_size,
                only=weight != 0,
            )
            return stats.logps

        def best(weights: Weights, tokens: Array, positions: Array, segments: Array, weight: Array) -> TopK:
            bound = self._weights.bind(weights)
            hidden, _ = bound(tokens, positions, segments)
            return top_k(
                bound.logits,
                hidden,
                tokens,
                k=k,
                temperature=temperature,
                vocab_size=vocab_size,
                only=weight != 0,
            )

        self._logps, self._top_k = jax.jit(logps), jax.jit(best)

    @property
    def weights(self) -> Weights:
        return self._weights.read()

    def at(self, temperature: float) -> FrozenModel:
        """The same model at another temperature."""
        return FrozenModel(self._weights.model, self._mesh, temperature=temperature, rows=self._rows)

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Log-probabilities of the tokens that have a weight."""
        return self._in_passes(self._logps, batch)

    def top_k(self, batch: Batch) -> TopK:
        """The most probable ids in the place of each token that has a weight."""
        return self._in_passes(self._top_k, batch)

    def _in_passes(self, function: Callable[..., Any], batch: Batch) -> Any:
        """The host arrays that `function` gives of all rows; zeros of empty ones at the end."""
        assert batch.parents is None, "sequences that go on from others are scored by the trainer"
        total, used = batch.shape[0], np.flatnonzero(np.asarray(batch.segments).any(axis=1))
        rows = rows_per_pass(total, self._rows, row_shards(self._mesh))
        weights, parts = self._weights.read(), []
        for start in range(0, int(used[-1]) + 1 if used.size else 1, rows):
            inputs = (batch.tokens, batch.positions, batch.segments, batch.loss_weight)
            arrays = [np.asarray(x)[start : start + rows] for x in inputs]
            padded = [np.pad(x, ((0, rows - len(x)), (0, 0))) for x in arrays]
            placed = jax.device_put(padded, NamedSharding(self._mesh, BATCH_SPEC))
            parts.append(jax.device_get(function(weights, *placed)))

        def whole(*x: np.ndarray) -> np.ndarray:
            found = np.concatenate(x)[:total]
            return np.pad(found, ((0, total - len(found)), *((0, 0) for _ in found.shape[1:])))

        return jax.tree.map(whole, *parts)


@runtime_checkable
class Scorer(Protocol):
    """A model that scores the tokens of host rows, wherever it is."""

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]: ...


def teacher_logps(teachers: Sequence[Scorer], batch: Batch) -> Float[np.ndarray, "B T"]:
    """Log-probabilities of the batch's tokens; of several teachers the mean, as its `teacher_weights` say."""
    if batch.teacher_weights is None:
        if len(teachers) != 1:
            raise ValueError(f"{len(teachers)} teachers: the batch has no teacher_weights, which one teacher needs not")
        return teachers[0].logps(batch)
    shares = np.moveaxis(np.asarray(batch.teacher_weights), -1, 0)
    total = np.zeros(batch.shape, np.float32)
    for number, (share, teacher) in enumerate(zip(shares, teachers, strict=True)):
        if share.any():
            # One that has no say may say anything.
            total += np.where(share > 0, share * teacher.logps(teacher_batch(batch, number)), 0.0)
    return total
