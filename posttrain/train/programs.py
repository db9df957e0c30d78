"""Programs of a trainer made from shapes: one per row length that runs all micro-batches and one update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from posttrain.batch import (
    Batch,
    DraftLoss,
    DraftStats,
    ImageFeatures,
    LossOutput,
    ScoreLoss,
    ScoreStats,
    TokenLoss,
    TokenStats,
    rows_per_pass,
)
from posttrain.errors import ConfigError
from posttrain.kernels.platform import platform_of, traced_for
from posttrain.losses.router import load_metrics, updated_correction
from posttrain.mesh import BATCH_SPEC, param_sharding, replicated, row_shards
from posttrain.metrics import Metrics
from posttrain.models.activations import batch_flops
from posttrain.models.config import ModelConfig, check_router
from posttrain.models.decoder import Decoder
from posttrain.models.names import TOWER
from posttrain.models.vision.tower import ImagePatches
from posttrain.runtime import processes
from posttrain.runtime.xla import Recent, fast_compile_options, gc_disabled
from posttrain.train.layer_matching import Matching
from posttrain.train.objective import Objective, TrainSettings
from posttrain.train.optimizers import (
    Optimizer,
    Prepare,
    clipped,
    global_norm,
    parameter_of,
    trained_parameters,
    update_metrics,
)
from posttrain.train.qk_clip import check_clip, clip_factors, clip_metrics
from posttrain.tree import added_up, stack_over
from posttrain.weights.lora import has_lora
from posttrain.weights.state import ModelWeights, Weights, WeightShapes, active_parameters, is_quantized

CALL_PATCHES, CALL_ROWS = 512, 8
"""Patches of a device in one call of a tower, at least, and pictures, at most."""

_TRAINERS = Recent["TrainPrograms"](3)
"""Those of actor, critic and block drafter."""


def programs_of(
    model: ModelWeights,
    loss: TokenLoss | ScoreLoss | DraftLoss,
    optimizer: Optimizer,
    settings: TrainSettings,
    *,
    mesh: Mesh,
    teachers: Sequence[ModelWeights] = (),
) -> TrainPrograms:
    """Programs of a trainer, see `TrainPrograms`. An equal trainer before, as of the same run in one process, spares
    this one tracing and compilation; none is equal to one with a function of the user.
    """

    def make() -> TrainPrograms:
        shapes = [one.outline().model for one in (model, *teachers)]
        return TrainPrograms(shapes[0], loss, optimizer, settings, mesh=mesh, teachers=shapes[1:])

    if not all(map(_is_value, (loss, optimizer, settings))):
        return make()
    layouts = (
        (one.graph, frozenset((path, x.shape, x.dtype) for path, x in one.structs().items()))
        for one in (model, *teachers)
    )
    key = *layouts, loss, optimizer, settings, mesh
    return _TRAINERS.of(key, make)


def _is_value(x: Any) -> bool:
    """Return whether equal ones do the same: numbers, words, this package's functions and dataclasses of such."""
    if isinstance(x, tuple | frozenset):
        return all(map(_is_value, x))
    if isinstance(x, FunctionType):
        return x.__module__.startswith("posttrain.") and "<locals>" not in x.__qualname__
    if type(x).__module__.startswith("posttrain."):
        is_dataclass = dataclasses.is_dataclass(x)
        return not is_dataclass or all(_is_value(getattr(x, own.name)) for own in dataclasses.fields(x) if own.compare)
    return x is None or isinstance(x, bool | int | float | str | bytes)


class TrainPrograms:
    """Update, evaluation and statistics of models whose parameters may be shapes. Parameters: see `Trainer`.

    It holds no array, and the mesh's devices need not be there: `lower_update` gives the program for a topology.
    """

    def __init__(
        self,
        model: Decoder,
        loss: TokenLoss | ScoreLoss | DraftLoss,
        optimizer: Optimizer | optax.GradientTransformation,
        settings: TrainSettings,
        *,
        mesh: Mesh,
        teachers: Sequence[Decoder] = (),
    ):
        if is_quantized(model) and not has_lora(model):
            raise ValueError("Trainer: quantized weights cannot be trained; give the model an adapter (lora)")
        self.mesh = mesh
        self.num_traced = 0
        """Number of programs traced for updates, evaluation and statistics: one each per batch shape."""
        self.settings = settings
        self.structure = on_mesh(model, mesh)
        self.trainable = self.structure.trainable()
        rule = optimizer if isinstance(optimizer, Optimizer) else Optimizer(transformation=optimizer)
        trained = trained_parameters(self.structure, settings.matching)
        self.optimizer = rule.with_parameters(trained)
        self.objective = Objective(
            student=self.structure,
            teachers=[on_mesh(teacher, mesh) for teacher in teachers],
            loss=loss,
            settings=settings,
        )
        if settings.qk_clip is not None:
            check_clip(model.config, adapter=has_lora(model))
        if self.optimizer.average is not None and settings.correction_rate:
            raise ConfigError(
                "optimizer.ema averages what the optimiser updates, and router.correction_rate changes the router's "
                "correction beside it; remove one"
            )
        balanced = self.objective.router_loss is not None
        if balanced or settings.correction_rate:
            check_router(model.config, settings.correction_rate, adapter=has_lora(model))
        self.projections = _projection_shapes(settings.matching, mesh)
        """Projections of layer matching, which are trained but not part of the model."""
        self.weights = placed_shapes(self.structure, mesh) | self.projections
        """All parameters by path, frozen ones and projections included."""
        self.opt_state = self._opt_state_shapes()
        self.frozen_towers = self._frozen_towers() if settings.image_cache_bytes else ()
        """Numbers of the models, in `Batch.encoded`, whose towers encode pictures outside of the step."""
        self._jit()

    def _jit(self) -> None:
        # Outputs need the shardings of the arguments: others would trigger a recompilation.
        outputs = jax.tree.map(lambda x: x.sharding, (self.params, self.opt_state))
        # What the host reads is whole on every device: a process holds no more of it than that of its own.
        read = replicated(self.mesh)
        options = fast_compile_options(platform_of(self.mesh))
        self.update = jax.jit(
            traced_for(self.mesh, self._step_program),
            donate_argnums=(0, 2),
            out_shardings=(*outputs, read, read),
            compiler_options=options,
        )
        self.evaluate = jax.jit(
            traced_for(self.mesh, self._evaluate_program), out_shardings=(read, None), compiler_options=options
        )
        self.init = jax.jit(self.optimizer.init, out_shardings=outputs[1])
        self.stats = jax.jit(traced_for(self.mesh, self._stats_program), compiler_options=options)
        self.loss_of_all = jax.jit(self.objective.loss)
        self.encode = {
            number: jax.jit(
                traced_for(self.mesh, functools.partial(_encode, self._structures[number])),
                out_shardings=read,
                compiler_options=options,
            )
            for number in self.frozen_towers
        }
        """Programs of the towers that encode pictures outside of the step, by the numbers of their models."""

    def call_rows(self, size: int) -> int:
        """Pictures of so many patches in one call of a tower, one in each row."""
        return row_shards(self.mesh) * min(max(CALL_PATCHES // size, 1), CALL_ROWS)

    def lower_encode(self, number: int, pictures: ImagePatches) -> jax.stages.Lowered:
        """Lower the call of a tower on pictures of shapes [B, P]."""
        place = NamedSharding(self.mesh, BATCH_SPEC)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), pictures)
        with gc_disabled():
            return self.encode[number].lower(placed_shapes(self._structures[number], self.mesh), shapes)

    def read_by_the_step(self, batch: Batch) -> Batch:
        """Batch without the patches that a frozen tower has encoded."""
        if 0 not in self.frozen_towers:
            return batch
        return dataclasses.replace(batch, patches=None, patch_images=None, patch_places=None)

    @property
    def _structures(self) -> list[ModelWeights]:
        """Structures of the model and its teachers."""
        return [self.structure, *self.objective.teachers]

    def _frozen_towers(self) -> tuple[int, ...]:
        trained = self.structure.tower_training[0] != "frozen"
        numbers = (number for number, one in enumerate(self._structures) if one.model.config.vision is not None)
        return tuple(number for number in numbers if number or not trained)

    @property
    def params(self) -> WeightShapes:
        """Trained parameters by path, projections included."""
        return {path: x for path, x in self.weights.items() if path in self.trainable or path in self.projections}

    @property
    def frozen(self) -> WeightShapes:
        return {path: x for path, x in self.weights.items() if path not in self.params}

    @functools.cached_property
    def language_factor(self) -> float:
        """Operations of the language model's products with the backward pass, relative to the forward pass: frozen
        parameters have no gradient of their own, and of a block drafter's target nothing has one."""
        language = {path: x.size for path, x in self.weights.items() if not path.startswith(TOWER)}
        trained = sum(size for path, size in language.items() if path in self.params)
        if self.structure.model.drafter is not None:
            return 1 + 2 * trained / sum(language.values())
        return 2 + trained / sum(language.values())

    @functools.cached_property
    def _active(self) -> list[tuple[ModelConfig, float]]:
        models = (weights.model for weights in self._structures)
        return [(model.config, active_parameters(model)) for model in models]

    def flops(self, batch: Batch) -> tuple[float, float]:
        """Operations of an update on host rows by the models' arithmetic, of language models and of the vision tower in
        the step: nothing is computed twice, and the backward pass is twice the forward pass of what is trained."""
        (config, active), *teachers = self._active
        products, attention = batch_flops(config, active, batch)
        language = self.language_factor * products + (3 if self.structure.model.drafter is None else 1) * attention
        language += sum(sum(batch_flops(config, active, batch)) for config, active in teachers)
        vision = self.structure.model.config.vision
        if vision is None or batch.patches is None or 0 in self.frozen_towers:
            return language, 0.0
        work = vision.work(np.asarray(batch.patch_images), np.asarray(batch.patch_places))
        return language, work.trained(*self.structure.tower_training)

    def lower_update(self, batch: Batch) -> jax.stages.Lowered:
        """Lower the update for a batch of shapes [B, T]."""
        micro, count = self.micro_shapes(batch)
        inputs = micro, count, np.uint32(0), np.bool_(True), self._teacher_shapes(), self.memory()
        with gc_disabled():
            return self.update.lower(self.params, self.frozen, self.opt_state, *inputs)

    def lower_stats(self, batch: Batch) -> jax.stages.Lowered:
        """Lower the statistics of the student for a batch of shapes [B, T]."""
        with gc_disabled():
            return self.stats.lower(self.weights, *self.micro_shapes(batch))

    def lower_evaluation(self, batch: Batch) -> jax.stages.Lowered:
        """Lower the evaluation for a batch of shapes [B, T]."""
        with gc_disabled():
            return self.evaluate.lower(self.weights, *self.micro_shapes(batch), self._teacher_shapes())

    def micro_rows(self, total: int) -> int:
        """Rows of a micro-batch for a batch of `total` rows, over all devices."""
        return rows_per_pass(total, self.settings.micro_batch_rows, row_shards(self.mesh))

    @property
    def micro_sharding(self) -> NamedSharding:
        """Sharding of micro-batches [M, rows, ...]."""
        return NamedSharding(self.mesh, PartitionSpec(None, *BATCH_SPEC))

    def micro_shapes(self, batch: Batch) -> tuple[Batch, jax.ShapeDtypeStruct]:
        """Shapes of a batch's micro-batches [M, rows, T], and of the number of those that are computed."""
        total = batch.tokens.shape[0]
        rows = self.micro_rows(total)

        def split(x: Any) -> jax.ShapeDtypeStruct:
            shape = -(-total // rows), rows, *x.shape[1:]
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self.micro_sharding)

        micro: Batch = jax.tree.map(split, batch)
        return micro, jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(self.mesh))

    def memory(self) -> dict[str, np.ndarray]:
        """Memory of the veto before the first step; empty without one."""
        veto = self.settings.skip_update
        return {} if veto is None else {"refuse": veto.start()}

    def _teacher_shapes(self) -> list[WeightShapes]:
        return [placed_shapes(teacher, self.mesh) for teacher in self.objective.teachers]

    def _opt_state_shapes(self) -> Any:
        """Optimizer state: what has as many dimensions as its parameter is sharded like it, all else replicated."""

        def placed(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            like = self.weights.get(parameter_of(path, self.weights) or "")
            same = like is not None and len(like.shape) == len(x.shape)
            sharding = _sharding_like(like, x.shape) if like is not None and same else replicated(self.mesh)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(placed, jax.eval_shape(self.optimizer.init, self.params))

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
        memory: dict[str, Array],
    ) -> tuple[Weights, Any, dict[str, Array], Metrics]:
        self.num_traced += 1
        objective, settings = self.objective, self.settings
        inputs, router_weight = (micro, objective.keys(step, micro)), objective.router_weight(micro, count)
        gradient, passed = objective.gradients(params, frozen, teacher_weights, router_weight, inputs, count)
        output, routers, largest = passed
        gradient = jax.lax.with_sharding_constraint(gradient, {path: x.sharding for path, x in self.params.items()})
        weight = output.loss.weight
        norm = global_norm(_mean(gradient, weight))
        usable = jnp.isfinite(norm) & (weight > 0) & wanted
        veto_metrics: Mapping[str, Array] = {}
        if settings.skip_update is not None:
            skipped, remembered, veto_metrics = settings.skip_update(output.metrics, memory["refuse"])
            memory, usable = {"refuse": remembered}, usable & ~skipped

        def prepare(gradient: Array) -> Array:
            mean: Array = clipped(_mean(gradient, weight), norm, settings.max_grad_norm)
            return mean

        config, factors, clip = self.structure.model.config, {}, {}
        if settings.qk_clip is not None:
            factors = clip_factors(config, largest, settings.qk_clip)
            clip = clip_metrics(config, largest, settings.qk_clip, usable)
        new_params, new_state = self._updated(gradient, params, opt_state, prepare, usable, factors, step)
        if settings.correction_rate and routers is not None:
            for path, numbers in config.correction_paths.items():
                changed = updated_correction(params[path], routers.load[jnp.asarray(numbers)], settings.correction_rate)
                new_params[path] = jnp.where(usable, changed, params[path])
        if labels := self.optimizer.labels:
            clip |= {"grad_clipped": (usable & (norm > settings.max_grad_norm)).astype(jnp.float32)}
            clip |= update_metrics(params, new_params, labels)
        metrics: Metrics = {
            "loss": output.loss,
            **output.metrics,
            **veto_metrics,
            **clip,
            **({} if routers is None else load_metrics(routers.load)),
            "grad_norm": norm,
            "update_skipped": 1.0 - usable.astype(jnp.float32),
        }
        return new_params, new_state, memory, metrics

    def _updated(
        self,
        gradient: Weights,
        params: Weights,
        opt_state: Any,
        prepare: Prepare,
        usable: Array,
        factors: Weights,
        step: Array,
    ) -> tuple[Weights, Any]:
        """Parameters and state after the update; the old ones if it is not `usable`."""
        if platform_of(self.mesh) != "cpu":
            return self.optimizer.update(gradient, opt_state, params, prepare, usable, factors, at=step)

        # XLA:CPU would fuse the condition's inputs into every kernel; on GPU a branch synchronizes with the host.
        def update(gradient: Weights, params: Weights, opt_state: Any) -> tuple[Weights, Any]:
            return self.optimizer.update(gradient, opt_state, params, prepare, None, factors, at=step)

        new: tuple[Weights, Any] = jax.lax.cond(usable, update, lambda _, *old: old, gradient, params, opt_state)
        return new

    def _evaluate_program(
        self, weights: Weights, micro: Batch, count: Array, teacher_weights: list[Weights]
    ) -> tuple[LossOutput, TokenStats | ScoreStats | DraftStats]:
        self.num_traced += 1

        def one(batch: Batch) -> tuple[LossOutput, TokenStats | ScoreStats | DraftStats]:
            output, passed = self.objective.loss_output(weights, batch, teacher_weights, self.objective.loss)
            return output, passed.stats

        outputs, stats = stack_over(one, micro, count)
        return added_up(outputs), stats

    def _stats_program(
        self, weights: Weights, micro: Batch, count: Array, teacher_weights: list[Weights] | None = None
    ) -> TokenStats | ScoreStats | DraftStats:
        self.num_traced += 1
        stats: TokenStats | ScoreStats | DraftStats = stack_over(
            lambda batch: self.objective.forward(weights, batch, teacher_weights).stats, micro, count
        )
        return stats


def compile_everywhere(program: Any, *arguments: Any) -> None:
    """Compile a program in all processes: collective operations between CPU processes wait for 30 seconds only, and
    compilations differ by more."""
    program.lower(*arguments).compile()
    processes.wait_for_all("compiled program")


def _encode(structure: ModelWeights, weights: Weights, pictures: ImagePatches) -> ImageFeatures:
    """Run pictures through the tower of a model."""
    model = structure.bind(weights)
    assert model.tower is not None
    return model.tower.features(pictures, model.compute)


def _mean(gradient: Any, weight: Array | float) -> Any:
    """Gradients of a sum divided by its weight, in float32."""
    return jax.tree.map(lambda g: g.astype(jnp.float32) / jnp.where(weight > 0, weight, 1.0), gradient)


def _sharding_like(parameter: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> NamedSharding:
    """Sharding of a parameter for its state, which may have fewer numbers in a dimension: whole if not divisible."""
    sharding = parameter.sharding
    assert isinstance(sharding, NamedSharding) and len(shape) == len(parameter.shape)
    alone = (NamedSharding(sharding.mesh, PartitionSpec(axes)) for axes in sharding.spec)
    parts = [size // one.shard_shape((size,))[0] for size, one in zip(parameter.shape, alone, strict=False)]
    kept = (axes if size % n == 0 else None for axes, size, n in zip(sharding.spec, shape, parts, strict=False))
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


def on_mesh(model: Decoder, mesh: Mesh) -> ModelWeights:
    """Access to the weights of a model whose kernels use this mesh."""
    model.compute = dataclasses.replace(model.compute, mesh=mesh)
    return ModelWeights(model)


def placed_shapes(weights: ModelWeights, mesh: Mesh) -> WeightShapes:
    """Shapes of a model's parameters with their shardings on the mesh."""
    dims = weights.dims()
    return {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=param_sharding(mesh, path, dims[path], x.shape))
        for path, x in weights.structs().items()
    }


def _projection_shapes(matching: Matching | None, mesh: Mesh) -> WeightShapes:
    if matching is None:
        return {}
    shapes, declared = matching.shapes(), matching.parameters()
    places = {path: param_sharding(mesh, path, declared[path].dims, shape) for path, shape in shapes.items()}
    return {path: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=places[path]) for path, shape in shapes.items()}
