"""Trainer: one program per row length that runs all micro-batches and one update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from posttrain.batch import (
    Batch,
    LossOutput,
    ScoreLoss,
    ScoreStats,
    TokenLoss,
    TokenStats,
    packing_metrics,
    rows_per_pass,
)
from posttrain.kernels.logits.chunk_stats import PLAIN, Terms
from posttrain.kernels.platform import platform_of
from posttrain.losses.router import RouterLoss, check_weight, load_metrics, updated_correction
from posttrain.mesh import BATCH_SPEC, param_sharding, replicated, row_shards, single_device_mesh
from posttrain.metrics import Metrics, merge
from posttrain.models.decoder import Decoder
from posttrain.models.moe import check_router, correction_paths
from posttrain.runtime.cpu import fast_compile_options
from posttrain.runtime.host_memory import gc_disabled, trim_host_memory
from posttrain.tracking.console import progress_bar
from posttrain.train.accumulate import concatenated, flatten_micro, stack_over
from posttrain.train.layer_matching import Matching
from posttrain.train.objective import Objective
from posttrain.train.optim import clipped, global_norm
from posttrain.tree import Metric, added_up, replace
from posttrain.weights.lora import has_lora
from posttrain.weights.quantize import is_quantized
from posttrain.weights.state import ModelWeights, Weights

StatsT = TypeVar("StatsT", TokenStats, ScoreStats)
Refuse = Callable[[Mapping[str, Metric]], Array]
"""A veto on an update, from the merged metrics of the loss; traced into the program of the step."""


class Trainer:
    """Trains the parameters of `model` (only the adapter's, if it has one) in place.

    The gradient is that of sum(loss totals) / sum(loss weights) over the whole batch plus that of the mean
    `router_loss`, for any split into micro-batches. `correction_rate`: update of the router's bias correction after
    each step. Log-probabilities are those of softmax(logits / temperature). `teachers` process the same rows; they are
    placed on the mesh and never written. `matching`: layers matched with those of the one teacher; its projections are
    trained and checkpointed, but not part of the model. `noise_alpha`: NEFTune, arXiv:2310.05914, uniform noise on the
    embeddings in training, up to alpha / sqrt(length of the sequence * D). `refuse`: veto on an update, a function of
    the step's metrics inside its program.
    """

    def __init__(
        self,
        model: Decoder,
        loss: TokenLoss | ScoreLoss,
        optimizer: optax.GradientTransformation,
        *,
        temperature: float,
        max_grad_norm: float,
        micro_batch_rows: int | None = None,
        mesh: Mesh | None = None,
        router_loss: RouterLoss | None = None,
        correction_rate: float = 0.0,
        terms: Terms = PLAIN,
        teachers: Sequence[Decoder] = (),
        matching: Matching | None = None,
        noise_alpha: float = 0.0,
        dropout_seed: int | None = None,
        refuse: Refuse | None = None,
    ):
        if is_quantized(model) and not has_lora(model):
            raise ValueError("Trainer: quantized weights cannot be trained; give the model an adapter (lora)")
        self.model = model
        self.mesh = single_device_mesh() if mesh is None else mesh
        self.step_number = 0
        """Number of steps, those without an update included; the only step counter."""
        self.skipped_updates = 0
        """Steps whose update the caller skipped; the learning-rate schedule lags `step_number` by them."""
        self.num_programs = 0
        """Number of programs traced for steps, evaluation and statistics: one each per batch shape."""
        self._stepped = False
        self._compiling: Future[Any] | None = None
        self._optimizer, self._max_grad_norm = optimizer, max_grad_norm
        self._micro_batch_rows, self._correction_rate, self._refuse = micro_batch_rows, correction_rate, refuse
        self._weights = _structure(model, self.mesh)
        self._trainable = self._weights.trainable()
        self._objective = Objective(
            student=self._weights,
            teachers=[_structure(teacher, self.mesh) for teacher in teachers],
            loss=loss,
            temperature=temperature,
            terms=terms,
            router_loss=router_loss if router_loss is not None and router_loss.on else None,
            matching=matching,
            noise_alpha=noise_alpha,
            dropout_seed=dropout_seed,
        )
        balanced = self._objective.router_loss is not None
        check_router(model.config, balanced, correction_rate, adapter=has_lora(model))
        self._loss_checked = not balanced
        at = _projection_shardings(matching, self.mesh)
        self._projections: Weights = {} if matching is None else jax.device_put(matching.projections(), at)
        for teacher in self._objective.teachers:
            _place(teacher, self.mesh)
        self._compile(_place(self._weights, self.mesh) | at)

    def _compile(self, placed: dict[str, NamedSharding]) -> None:
        """Create the optimizer state and the jitted programs for the given parameter shardings."""
        state = self._opt_state_shardings(placed)
        self._opt_state = jax.jit(self._optimizer.init, out_shardings=state)(self.params)
        # Outputs need the shardings of the arguments: others would trigger a recompilation.
        trained = {path: placed[path] for path in self.params}
        options = fast_compile_options(platform_of(self.mesh))
        self._step = jax.jit(
            self._step_program, donate_argnums=(0, 2), out_shardings=(trained, state, None), compiler_options=options
        )
        self._evaluate = jax.jit(self._evaluate_program, compiler_options=options)
        self._stats = jax.jit(self._stats_program, compiler_options=options)
        self._loss_of_all = jax.jit(self._objective.loss)

    @property
    def params(self) -> Weights:
        """Trained parameters by path, projections included."""
        return {**self._weights.read(self._trainable.__contains__), **self._projections}

    @property
    def weights(self) -> Weights:
        """All parameters by path, frozen ones and projections included."""
        return {**self._weights.read(), **self._projections}

    @property
    def _frozen(self) -> Weights:
        return self._weights.read(lambda path: path not in self._trainable)

    @property
    def _teacher_weights(self) -> list[Weights]:
        """Teacher parameters: arguments of programs, never donated."""
        return [teacher.read() for teacher in self._objective.teachers]

    def step(self, batch: Batch, *, update: bool = True) -> Metrics:
        """One update from one batch of host rows. Metrics of the device stay there.

        A gradient that is not finite, a batch without any weight, a veto of `refuse` or `update=False` leave parameters
        and optimiser state bitwise as they are, and show as `update_skipped` = 1. The step counts all the same.
        """
        arguments = self._arguments(batch, update=update)
        if not self._stepped:
            # Compile before the update, which can then use the memory that compilation takes.
            with progress_bar("compiling the update"):
                if self._compiling is None:
                    self._lower(arguments).compile()
                else:
                    self._compiling.result()
            trim_host_memory(platform_of(self.mesh))
            self._stepped, self._compiling = True, None
        params, self._opt_state, metrics = self._step(*arguments)
        self._write(params)
        self.step_number += 1
        self.skipped_updates += not update
        return {**metrics, **packing_metrics(batch)}

    def compile_ahead(self, batch: Batch, scored: Batch) -> None:
        """Compile the first update for a batch of this shape in a background thread.

        `step` waits for it. The program of `stats` for `scored` is compiled when this returns. No effect if the update
        is compiled or being compiled.
        """
        if self._stepped or self._compiling is not None:
            return
        threads = ThreadPoolExecutor(max_workers=2)
        with gc_disabled():
            lowered = self._stats.lower(self.weights, *self._micro_batches(scored))
        # Statistics first: they are traced faster, and the update is traced while they compile.
        scoring = threads.submit(lowered.compile)
        self._compiling = threads.submit(self._lower(self._arguments(batch)).compile)
        threads.shutdown(wait=False)
        scoring.result()

    def _arguments(self, batch: Batch, *, update: bool = True) -> tuple[Any, ...]:
        """Arguments of `_step_program`."""
        micro, count = self._micro_batches(batch)
        if not self._loss_checked:
            first = jax.tree.map(lambda x: x[0], micro)
            check_weight(self._objective.loss, first, scores=self.model.config.scalar_head)
            self._loss_checked = True
        inputs = micro, count, np.uint32(self.step_number), np.bool_(update), self._teacher_weights
        return self.params, self._frozen, self._opt_state, *inputs

    def _lower(self, arguments: tuple[Any, ...]) -> jax.stages.Lowered:
        with gc_disabled():
            return self._step.lower(*arguments)

    def evaluate(self, batches: Iterable[Batch], each: Callable[[Batch, Any], None] | None = None) -> Metrics:
        """Loss and metrics over all batches, without an update.

        A whole-batch loss is computed over all batches together, so that the batch size does not matter; the model
        still processes them one by one. `each` is called with every batch and its statistics as host arrays.
        """
        if self._objective.needs_whole_batch:
            return self._evaluate_at_once(batches, each)
        totals: dict[str, Metric] = {}
        for batch in batches:
            output, stats = self._evaluate(self.weights, *self._micro_batches(batch), self._teacher_weights)
            totals = merge(totals, {"loss": output.loss, **output.metrics})
            if each is not None:
                each(batch, _rows_on_host(stats, batch))
        return dict(totals)

    def _evaluate_at_once(self, batches: Iterable[Batch], each: Callable[[Batch, Any], None] | None) -> Metrics:
        parts = []
        for batch in batches:
            stats = _rows_on_host(self._stats(self.weights, *self._micro_batches(batch), self._teacher_weights), batch)
            parts.append((stats, replace(batch, teachers=None, experts=None)))
            if each is not None:
                each(batch, stats)
        output = self._loss_of_all(*concatenated(parts))
        return {"loss": output.loss, **output.metrics}

    def stats(self, batch: Batch, weights: Weights | None = None) -> TokenStats:
        """Token statistics of host rows as host arrays, under other weights of the same structure if given."""
        stats = self._stats(self.weights if weights is None else weights, *self._micro_batches(batch))
        assert isinstance(stats, TokenStats), "a reward model has scores instead of log-probabilities"
        return _rows_on_host(stats, batch)

    def scores(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Reward model scores of host rows as a host array."""
        stats = self._stats(self.weights, *self._micro_batches(batch))
        assert isinstance(stats, ScoreStats), "only a reward model has scores"
        return np.asarray(_rows_on_host(stats, batch).scores)

    def state(self) -> dict[str, Any]:
        """Arrays of a checkpoint."""
        params = {path: w for path, w in self.params.items() if path not in self._projections}
        # A branch of their own: who reads the model's parameters need not know of them.
        more = {"projections": self._projections} if self._projections else {}
        return {"params": params, "opt_state": self._opt_state, **more}

    def restore(self, state: dict[str, Any], step: int, skipped_updates: int = 0) -> None:
        self._write({**state["params"], **state.get("projections", {})})
        self._opt_state = state["opt_state"]
        self.step_number, self.skipped_updates = step, skipped_updates

    def _write(self, params: Weights) -> None:
        self._projections = {path: params[path] for path in self._projections}
        self._weights.write({path: w for path, w in params.items() if path not in self._projections})

    def _opt_state_shardings(self, placed: dict[str, NamedSharding]) -> Any:
        """Optimizer state shardings: per-parameter state like its parameter, counters replicated."""

        def sharding(path: tuple[Any, ...], _: Any) -> NamedSharding:
            name = getattr(path[-1], "key", None) if path else None
            return placed[name] if name in placed else replicated(self.mesh)

        return jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(self._optimizer.init, self.params))

    def _micro_batches(self, batch: Batch) -> tuple[Batch, Array]:
        """Micro-batches [M, rows, T] on the mesh, and the number of non-empty ones: the others are never computed."""
        host = jax.tree.map(np.asarray, batch)
        total = host.tokens.shape[0]
        rows = rows_per_pass(total, self._micro_batch_rows, row_shards(self.mesh))
        padding = -total % rows
        used = np.flatnonzero(host.segments.any(axis=1))
        count = int(used[-1]) // rows + 1 if used.size else 0

        def split(x: np.ndarray) -> np.ndarray:
            rest = x.shape[1:]
            whole = np.pad(x, ((0, padding), *((0, 0) for _ in rest))) if padding else x
            return whole.reshape(-1, rows, *rest)

        sharding = NamedSharding(self.mesh, PartitionSpec(None, *BATCH_SPEC))
        return jax.device_put(jax.tree.map(split, host), sharding), jax.device_put(
            np.int32(count), replicated(self.mesh)
        )

    def _step_program(
        self,
        params: Weights,
        frozen: Weights,
        opt_state: Any,
        micro: Batch,
        count: Array,
        step: Array,
        wanted: Array,
        teacher_weights: list[Weights],
    ) -> tuple[Weights, Any, Metrics]:
        self.num_programs += 1
        objective = self._objective
        inputs, router_weight = (micro, objective.keys(step, micro)), objective.router_weight(micro, count)
        gradient, (output, routers) = objective.gradients(params, frozen, teacher_weights, router_weight, inputs, count)
        weight = output.loss.weight
        norm = global_norm(_mean(gradient, weight))
        usable = jnp.isfinite(norm) & (weight > 0) & wanted
        if self._refuse is not None:
            usable &= ~self._refuse(output.metrics)

        def update(gradient: Weights, params: Weights, opt_state: Any) -> tuple[Weights, Any]:
            gradient = clipped(_mean(gradient, weight), norm, self._max_grad_norm)
            updates, new_state = self._optimizer.update(gradient, opt_state, params)
            sums = {path: p.astype(jnp.float32) + updates[path].astype(jnp.float32) for path, p in params.items()}
            # An optimizer may adopt the gradient's dtype; a changed dtype would recompile the next step.
            new_state = jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), new_state, opt_state)
            return {path: sums[path].astype(p.dtype) for path, p in params.items()}, new_state

        new_params, new_state = self._if(usable, update, gradient, params, opt_state)
        if self._correction_rate and routers is not None:
            for path, numbers in correction_paths(self.model.config).items():
                changed = updated_correction(params[path], routers.load[jnp.asarray(numbers)], self._correction_rate)
                new_params[path] = jnp.where(usable, changed, params[path])
        metrics: Metrics = {
            "loss": output.loss,
            **output.metrics,
            **({} if routers is None else load_metrics(routers.load)),
            "grad_norm": norm,
            "update_skipped": 1.0 - usable.astype(jnp.float32),
        }
        return new_params, new_state, metrics

    def _if(
        self, usable: Array, update: Callable[..., tuple[Weights, Any]], gradient: Weights, *old: Any
    ) -> tuple[Weights, Any]:
        """Apply `update` if `usable`, else return the old values."""
        if platform_of(self.mesh) == "cpu":
            # XLA:CPU would fuse the condition's inputs into every kernel; on GPU a branch synchronizes with the host.
            return jax.lax.cond(usable, update, lambda _, *old: old, gradient, *old)
        new: tuple[Weights, Any] = jax.tree.map(lambda n, o: jnp.where(usable, n, o), update(gradient, *old), old)
        return new

    def _evaluate_program(
        self, weights: Weights, micro: Batch, count: Array, teacher_weights: list[Weights]
    ) -> tuple[LossOutput, TokenStats | ScoreStats]:
        self.num_programs += 1

        def one(batch: Batch) -> tuple[LossOutput, TokenStats | ScoreStats]:
            output, passed = self._objective.loss_output(weights, batch, teacher_weights, self._objective.loss)
            return output, passed.stats

        outputs, stats = stack_over(one, micro, count)
        return added_up(outputs), stats

    def _stats_program(
        self, weights: Weights, micro: Batch, count: Array, teacher_weights: list[Weights] | None = None
    ) -> TokenStats | ScoreStats:
        self.num_programs += 1
        stats: TokenStats | ScoreStats = stack_over(
            lambda batch: self._objective.forward(weights, batch, teacher_weights).stats, micro, count
        )
        return stats


def _rows_on_host(stats: StatsT, batch: Batch) -> StatsT:
    """Statistics [M, rows, T] as host arrays of the batch's rows, without the padding rows of the last micro-batch."""
    arrays: StatsT = jax.tree.map(lambda x: flatten_micro(np.asarray(x))[: batch.shape[0]], jax.device_get(stats))
    return arrays


def _mean(gradient: Weights, weight: Array | float) -> Weights:
    return jax.tree.map(lambda g: g / jnp.where(weight > 0, weight, 1.0), gradient)


def _structure(model: Decoder, mesh: Mesh) -> ModelWeights:
    """Access to the weights of a model whose kernels use this mesh."""
    model.compute = dataclasses.replace(model.compute, mesh=mesh)
    return ModelWeights(model)


def _place(weights: ModelWeights, mesh: Mesh) -> dict[str, NamedSharding]:
    """Move every parameter to its sharding on the mesh; no copy if it is there already."""
    dims, arrays = weights.dims(), weights.read()
    placed = {path: param_sharding(mesh, path, dims[path], w.shape) for path, w in arrays.items()}
    weights.write(jax.device_put(arrays, placed))
    return placed


def _projection_shardings(matching: Matching | None, mesh: Mesh) -> dict[str, NamedSharding]:
    shapes = {} if matching is None else matching.shapes()
    return {path: param_sharding(mesh, path, dims, shape) for path, (dims, shape) in shapes.items()}


def check_finite(metrics: dict[str, float], step: int) -> None:
    """Raises FloatingPointError if the step's gradient was not finite; the weights are unchanged by it."""
    if not np.isfinite(metrics["grad_norm"]):
        raise FloatingPointError(
            f"step {step}: the gradient norm is {metrics['grad_norm']}; the update was not applied. "
            "Lower optimizer.learning_rate, or look for extreme values in the data or the rewards"
        )
