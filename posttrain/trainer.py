"""The trainer: one program per row length that does all micro-batches and one update."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from posttrain.batch import Batch, LossOutput, TokenLoss, TokenStats
from posttrain.kernels.token_stats import token_stats
from posttrain.mesh import BATCH_SPEC, param_sharding, replicated, single_device_mesh
from posttrain.metrics import Metrics, merge
from posttrain.models.decoder import Decoder
from posttrain.models.weights import ModelWeights, Weights
from posttrain.optim import clip_by_global_norm
from posttrain.tree import Mean


class HostStats(NamedTuple):
    """`TokenStats` of host rows as host arrays."""

    logps: Float[np.ndarray, "B T"]
    entropy: Float[np.ndarray, "B T"]


class Trainer:
    """Trains the parameters of `model` (only the adapter's, if it has one) in place.

    The gradient is the gradient of sum(loss totals) / sum(loss weights) over the whole batch, whatever the split into
    micro-batches. Log-probabilities are those of softmax(logits / temperature).
    """

    def __init__(
        self,
        model: Decoder,
        loss: TokenLoss,
        optimizer: optax.GradientTransformation,
        *,
        temperature: float,
        max_grad_norm: float,
        micro_batch_rows: int | None = None,
        mesh: Mesh | None = None,
    ):
        self.model = model
        self.loss = loss
        self.mesh = single_device_mesh() if mesh is None else mesh
        self.step_number = 0
        """Updates done so far; this is the one step counter."""
        self.num_programs = 0
        """Programs traced so far for steps, evaluation and statistics: one each for every shape of batch."""
        self._optimizer = optimizer
        self._temperature = temperature
        self._max_grad_norm = max_grad_norm
        self._micro_batch_rows = micro_batch_rows
        self._weights = ModelWeights(model)
        self._trainable = self._weights.trainable()
        placed = self._place()
        state = self._opt_state_shardings(placed)
        self._opt_state = jax.jit(optimizer.init, out_shardings=state)(self.params)
        # Results must lie where the arguments lay: another placement would be another program.
        trained = {path: placed[path] for path in self.params}
        self._step = jax.jit(self._step_program, donate_argnums=(0, 2), out_shardings=(trained, state, None))
        self._evaluate = jax.jit(self._evaluate_program)
        self._stats = jax.jit(self._stats_program)

    @property
    def params(self) -> Weights:
        """The trained parameters by path."""
        return self._weights.read(self._trainable.__contains__)

    @property
    def weights(self) -> Weights:
        """All parameters by path, frozen ones included."""
        return self._weights.read()

    @property
    def _frozen(self) -> Weights:
        return self._weights.read(lambda path: path not in self._trainable)

    def step(self, batch: Batch) -> Metrics:
        """One update from one batch of host rows. Metrics stay on the device.

        A gradient that is not finite, or a batch without any weight, changes nothing and shows as `update_skipped` = 1.
        """
        micro, count = self._micro_batches(batch)
        params, self._opt_state, metrics = self._step(self.params, self._frozen, self._opt_state, micro, count)
        self._weights.write(params)
        self.step_number += 1
        return metrics

    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """The loss and its metrics over all batches, without an update."""
        totals: dict[str, Mean] = {}
        for batch in batches:
            output = self._evaluate(self.weights, *self._micro_batches(batch))
            totals = merge(totals, {"loss": output.loss, **output.metrics})
        return dict(totals)

    def stats(self, batch: Batch, weights: Weights | None = None) -> HostStats:
        """Token statistics of host rows as host arrays, under other weights of the same structure if given."""
        micro, count = self._micro_batches(batch)
        arrays = jax.device_get(self._stats(self.weights if weights is None else weights, micro, count))
        return HostStats(*(x.reshape(-1, x.shape[-1])[: batch.shape[0]] for x in arrays))

    def state(self) -> dict[str, Any]:
        """The arrays that a checkpoint must hold."""
        return {"params": self.params, "opt_state": self._opt_state}

    def restore(self, state: dict[str, Any], step: int) -> None:
        self._weights.write(state["params"])
        self._opt_state = state["opt_state"]
        self.step_number = step

    def _place(self) -> dict[str, NamedSharding]:
        """Put every parameter where the mesh wants it; nothing moves if it lies there already."""
        dims, weights = self._weights.dims(), self._weights.read()
        placed = {path: param_sharding(self.mesh, path, dims[path], w.shape) for path, w in weights.items()}
        self._weights.write(jax.device_put(weights, placed))
        return placed

    def _opt_state_shardings(self, placed: dict[str, NamedSharding]) -> Any:
        """What belongs to a parameter lies where the parameter lies; counters are everywhere."""

        def sharding(path: tuple[Any, ...], _: Any) -> NamedSharding:
            name = getattr(path[-1], "key", None) if path else None
            return placed[name] if name in placed else replicated(self.mesh)

        return jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(self._optimizer.init, self.params))

    def _micro_batches(self, batch: Batch) -> tuple[Batch, Array]:
        """[M, rows, T] on the mesh, and how many of the M hold anything: the rest is never computed."""
        host = jax.tree.map(np.asarray, batch)
        total = host.tokens.shape[0]
        shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        rows = total if self._micro_batch_rows is None else min(self._micro_batch_rows, total)
        rows = -(-rows // shards) * shards
        padding = -total % rows
        used = np.flatnonzero(host.segments.any(axis=1))
        count = int(used[-1]) // rows + 1 if used.size else 0

        def split(x: np.ndarray) -> np.ndarray:
            return np.pad(x, ((0, padding), (0, 0))).reshape(-1, rows, x.shape[1])

        sharding = NamedSharding(self.mesh, PartitionSpec(None, *BATCH_SPEC))
        return jax.device_put(jax.tree.map(split, host), sharding), jax.device_put(
            np.int32(count), replicated(self.mesh)
        )

    def _forward(self, weights: Weights, batch: Batch) -> TokenStats:
        model = self._weights.bind(weights)
        tokens, positions, segments = map(jnp.asarray, (batch.tokens, batch.positions, batch.segments))
        hidden, _ = model(tokens, positions, segments)
        return token_stats(
            model.logits,
            hidden,
            tokens,
            segments,
            temperature=self._temperature,
            vocab_size=model.config.vocab_size,
        )

    def _loss_output(self, weights: Weights, batch: Batch) -> LossOutput:
        return self.loss(self._forward(weights, batch), batch)

    def _gradient(self, params: Weights, frozen: Weights, batch: Batch) -> tuple[Weights, LossOutput]:
        def total(params: Weights) -> tuple[Array, LossOutput]:
            output = self._loss_output({**frozen, **params}, batch)
            return jnp.asarray(output.loss.total), output

        # With respect to float32 copies, so that what is added up over chunks and tokens is added up in float32.
        gradient, output = jax.grad(total, has_aux=True)(jax.tree.map(lambda p: p.astype(jnp.float32), params))
        return gradient, output

    def _step_program(
        self, params: Weights, frozen: Weights, opt_state: Any, micro: Batch, count: Array
    ) -> tuple[Weights, Any, Metrics]:
        self.num_programs += 1
        gradient, output = _sum_over(functools.partial(self._gradient, params, frozen), micro, count)
        weight = output.loss.weight
        gradient = jax.tree.map(lambda g: g / jnp.where(weight > 0, weight, 1.0), gradient)
        gradient, norm = clip_by_global_norm(gradient, self._max_grad_norm)
        usable = jnp.isfinite(norm) & (weight > 0)
        updates, new_state = self._optimizer.update(gradient, opt_state, params)

        def keep(new: Array, old: Array) -> Array:
            return jnp.where(usable, new, old)

        new_params = {
            path: keep((p.astype(jnp.float32) + updates[path].astype(jnp.float32)).astype(p.dtype), p)
            for path, p in params.items()
        }
        metrics = {
            "loss": output.loss,
            **output.metrics,
            "grad_norm": norm,
            "update_skipped": 1.0 - usable.astype(jnp.float32),
            "num_tokens": jnp.sum(micro.segments > 0),
        }
        return new_params, jax.tree.map(keep, new_state, opt_state), metrics

    def _evaluate_program(self, weights: Weights, micro: Batch, count: Array) -> LossOutput:
        self.num_programs += 1
        return _sum_over(functools.partial(self._loss_output, weights), micro, count)

    def _stats_program(self, weights: Weights, micro: Batch, count: Array) -> tuple[Array, Array]:
        self.num_programs += 1

        def body(index: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
            stats = self._forward(weights, jax.tree.map(lambda x: x[index], micro))
            return out[0].at[index].set(stats.logps), out[1].at[index].set(stats.entropy)

        zeros = jnp.zeros(micro.tokens.shape, jnp.float32)
        return jax.lax.fori_loop(0, count, body, (zeros, zeros))


def _sum_over(function: Any, micro: Batch, count: Array) -> Any:
    """The sum of a pytree-valued function over the first `count` micro-batches."""
    if micro.tokens.shape[0] == 1:
        return function(jax.tree.map(lambda x: x[0], micro))
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], micro))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(index: Array, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, function(jax.tree.map(lambda x: x[index], micro)))

    return jax.lax.fori_loop(0, count, body, zeros)


def check_finite(metrics: dict[str, float], step: int) -> None:
    """FloatingPointError when the step's gradient was not finite; the weights are still those before it."""
    if not np.isfinite(metrics["grad_norm"]):
        raise FloatingPointError(
            f"step {step}: the gradient norm is {metrics['grad_norm']}; the update was not applied. "
            "Lower optimizer.learning_rate, or look for extreme values in the data or the rewards"
        )
