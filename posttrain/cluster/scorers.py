"""Scorers, models that are only evaluated: teachers, reward models, references of another checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float

from posttrain.batch import Batch, TopK, rows_per_pass, teacher_batch
from posttrain.cluster.transfer import HeldWeights
from posttrain.kernels.logits.token_stats import token_stats
from posttrain.kernels.logits.top_k import top_k
from posttrain.mesh import BATCH_SPEC, row_shards
from posttrain.models.decoder import Decoder
from posttrain.tree import replace
from posttrain.weights.state import ModelWeights, Weights


def own_routing(batch: Batch) -> Batch:
    """Batch without recorded routing, which is the actor's: the router of the scorer chooses its own experts."""
    return replace(model_inputs(batch), experts=None)


def model_inputs(batch: Batch) -> Batch:
    """Batch without the arrays that no model reads; they would only cause another compilation."""
    return Batch(
        tokens=batch.tokens,
        positions=batch.positions,
        segments=batch.segments,
        loss_weight=batch.loss_weight,
        parents=batch.parents,
        experts=batch.experts,
    )


class FrozenModel:
    """Frozen model (teacher, reward model) on its mesh: scores of host rows, `rows` of them per forward pass.

    `temperature`: of `logps`, and of the divergence that `top_k` serves. `k`: number of ids of `top_k`. `offload`: its
    weights are in the host's memory between uses.
    """

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        temperature: float,
        rows: int | None = None,
        k: int = 1,
        offload: bool = False,
    ):
        self._weights, self._mesh, self._rows = ModelWeights(model), mesh, rows
        self.held = HeldWeights(self._weights.read, self._weights.write, offload=offload)
        vocab_size = model.config.vocab_size

        def logps(model: Decoder, hidden: Array, batch: Batch) -> Array:
            stats = token_stats(
                model.logits,
                hidden,
                jnp.asarray(batch.tokens),
                jnp.asarray(batch.segments),
                temperature=temperature,
                vocab_size=vocab_size,
                only=jnp.asarray(batch.loss_weight) != 0,
                mesh=mesh,
            )
            return stats.logps

        def best(model: Decoder, hidden: Array, batch: Batch) -> TopK:
            return top_k(
                model.logits,
                hidden,
                jnp.asarray(batch.tokens),
                k=k,
                temperature=temperature,
                vocab_size=vocab_size,
                only=jnp.asarray(batch.loss_weight) != 0,
                mesh=mesh,
            )

        def scores(model: Decoder, hidden: Array, batch: Batch) -> Array:
            return model.scores(hidden)

        self._logps, self._top_k, self._scores = map(self._program, (logps, best, scores))

    @property
    def weights(self) -> Weights:
        """Parameters by path, where they lie between uses."""
        return self.held.weights

    def arrays(self) -> Iterable[Array]:
        """Arrays held between uses."""
        return self.held.weights.values()

    def at(self, temperature: float) -> FrozenModel:
        """This model at another temperature."""
        return FrozenModel(self._weights.model, self._mesh, temperature=temperature, rows=self._rows)

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Log-probabilities of the tokens that have a weight."""
        return self._in_passes(self._logps, batch)

    def top_k(self, batch: Batch) -> TopK:
        """Most probable ids at each token that has a weight."""
        return self._in_passes(self._top_k, batch)

    def scores(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Scores of a reward model at each token."""
        return self._in_passes(self._scores, batch)

    def _program(self, read: Callable[[Decoder, Array, Batch], Any]) -> Callable[[Weights, Batch], Any]:
        """Compile a forward pass and what is read of its hidden states."""

        def forward(weights: Weights, batch: Batch) -> Any:
            model = self._weights.bind(weights)
            tokens, positions, segments = map(jnp.asarray, (batch.tokens, batch.positions, batch.segments))
            hidden, _ = model(tokens, positions, segments)
            return read(model, hidden, batch)

        return jax.jit(forward)

    def _in_passes(self, program: Callable[[Weights, Batch], Any], batch: Batch) -> Any:
        """Run a program over all rows, in passes of one shape; zeros for empty rows at the end."""
        assert batch.parents is None, "sequences with parents are scored by the trainer"
        total, used = batch.shape[0], np.flatnonzero(np.asarray(batch.segments).any(axis=1))
        rows = rows_per_pass(total, self._rows, row_shards(self._mesh))
        host, parts = jax.tree.map(np.asarray, own_routing(batch)), []
        with self.held.on_devices() as weights:
            for start in range(0, int(used[-1]) + 1 if used.size else 1, rows):
                part = jax.tree.map(lambda x, start=start: _padded(x[start : start + rows], rows), host)
                placed = jax.device_put(part, NamedSharding(self._mesh, BATCH_SPEC))
                parts.append(jax.device_get(program(weights, placed)))
        return jax.tree.map(lambda *x: _padded(np.concatenate(x)[:total], total), *parts)


def _padded(x: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(x, ((0, rows - len(x)), *((0, 0) for _ in x.shape[1:])))


@runtime_checkable
class Scorer(Protocol):
    """A model that scores the tokens of host rows, wherever it is."""

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]: ...


def teacher_logps(teachers: Sequence[Scorer], batch: Batch) -> Float[np.ndarray, "B T"]:
    """Log-probabilities of the batch's tokens; of several teachers the mean, weighted by `teacher_weights`."""
    if batch.teacher_weights is None:
        if len(teachers) != 1:
            raise ValueError(f"{len(teachers)} teachers: the batch has no teacher_weights, which one teacher needs not")
        return teachers[0].logps(batch)
    shares = np.moveaxis(np.asarray(batch.teacher_weights), -1, 0)
    total = np.zeros(batch.shape, np.float32)
    for number, (share, teacher) in enumerate(zip(shares, teachers, strict=True)):
        if share.any():
            # A teacher with weight 0 may return NaN; mask it before multiplying.
            total += np.where(share > 0, share * teacher.logps(teacher_batch(batch, number)), 0.0)
    return total
