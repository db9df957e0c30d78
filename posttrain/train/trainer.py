"""Trainer: parameters and optimizer state on a mesh, updated by its programs; all from host rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float

from posttrain.batch import (
    Batch,
    DraftLoss,
    ImageFeatures,
    ScoreLoss,
    ScoreStats,
    TokenLoss,
    TokenStats,
    model_inputs,
    packing_metrics,
)
from posttrain.data.image_rows import BatchPicture, ImageCache, batch_pictures, picture_features, picture_size
from posttrain.errors import ConfigError
from posttrain.kernels.platform import chip_of, platform_of
from posttrain.losses.router import check_weight
from posttrain.mesh import BATCH_SPEC, replicated, single_device_mesh
from posttrain.metrics import Metrics, merge
from posttrain.models.config import VisionConfig
from posttrain.models.decoder import Decoder
from posttrain.models.vision.tower import ImagePatches
from posttrain.runtime import processes
from posttrain.runtime.profiler import span
from posttrain.runtime.xla import gc_disabled, trim_host_memory
from posttrain.tracking.console import progress_bar
from posttrain.train.objective import TrainSettings
from posttrain.train.optimizers import Optimizer
from posttrain.train.programs import TrainPrograms, compile_everywhere, on_mesh, placed_shapes, programs_of
from posttrain.tree import Mean, Metric, concatenated, flatten_micro, replace
from posttrain.weights.state import ModelWeights, Weights

StatsT = TypeVar("StatsT", TokenStats, ScoreStats)


class Begun(NamedTuple):
    """Pictures of a batch, on their way through the frozen tower of a model where its features are not kept."""

    number: int
    pictures: Sequence[BatchPicture]
    kept: dict[bytes, ImageFeatures]
    calls: list[tuple[list[BatchPicture], ImageFeatures]]
    flops: float


class FrozenTowers:
    """Features of pictures by the frozen towers of a trainer's models, kept by their content. A picture goes through a
    tower in a row and a program that only its size decides: features are the same in any batch.

    `begin` and `finish` are called in the same order in every process.
    """

    def __init__(self, programs: TrainPrograms, weights: Sequence[ModelWeights]):
        self._programs, self._weights = programs, weights
        self._cache = ImageCache(programs.settings.image_cache_bytes)
        self._met = set[tuple[int, int]]()
        self._hits = self._encoded = 0
        self._flops = 0.0

    def begin(self, batch: Batch) -> list[Begun]:
        """Start to encode the pictures of host rows that are not kept."""
        pictures = list(batch_pictures(batch))
        return [self._begin(number, batch, pictures) for number in self._programs.frozen_towers]

    def finish(self, batch: Batch, begun: Sequence[Begun]) -> Batch:
        """Batch with the features of its pictures, which are kept now."""
        with span("images"):
            found = {one.number: self._finish(batch, one) for one in begun}
            return replace(batch, encoded=tuple(found.get(number) for number in range(len(self._weights))))

    def count(self, begun: Sequence[Begun]) -> None:
        """Count pictures in the metrics of the next step."""
        hits, encoded = sum(len(one.kept) for one in begun), sum(len(some) for one in begun for some, _ in one.calls)
        self._hits, self._encoded = self._hits + hits, self._encoded + encoded
        self._flops += sum(one.flops for one in begun)

    def counted(self) -> tuple[dict[str, float], float]:
        """Metrics of the pictures counted since the last call, if any, and operations for them."""
        hits, encoded, flops = self._hits, self._encoded, self._flops
        self._hits, self._encoded, self._flops = 0, 0, 0.0
        if not hits + encoded:
            return {}, flops
        return {"images/encoded": float(encoded), "images/hit_rate": hits / (hits + encoded)}, flops

    def _begin(self, number: int, batch: Batch, pictures: Sequence[BatchPicture]) -> Begun:
        vision = self._vision(number)
        kept: dict[bytes, ImageFeatures] = {}
        of_size: dict[int, dict[bytes, BatchPicture]] = {}
        for picture in pictures:
            features = self._cache.features(bytes([number]) + picture.digest)
            if features is not None:
                kept[picture.digest] = features
            else:
                of_size.setdefault(picture_size(vision.merge, picture.num_patches), {})[picture.digest] = picture
        calls, flops = [], 0.0
        for size, missing in sorted(of_size.items()):
            rows, left = self._programs.call_rows(size), list(missing.values())
            for some in (left[start : start + rows] for start in range(0, len(left), rows)):
                inputs = self._inputs(batch, some, rows, size)
                flops += vision.work(np.asarray(inputs.patch_images), np.asarray(inputs.patch_places)).total
                calls.append((some, self._run(number, inputs)))
        return Begun(number, pictures, kept, calls, flops)

    def _inputs(self, batch: Batch, pictures: Sequence[BatchPicture], rows: int, size: int) -> ImagePatches:
        given = {name: np.asarray(getattr(batch, name)) for name in ("patches", "patch_images", "patch_places")}
        arrays: dict[str, Any] = {name: np.zeros((rows, size, *x.shape[2:]), x.dtype) for name, x in given.items()}
        for row, picture in enumerate(pictures):
            for name, x in given.items():
                arrays[name][row, : picture.num_patches] = x[picture.row, picture.patches]
        arrays["patch_images"] = (arrays["patch_images"] > 0).astype(np.int32)
        return ImagePatches(**arrays)

    def _run(self, number: int, inputs: ImagePatches) -> ImageFeatures:
        program, weights = self._programs.encode[number], self._weights[number].read()
        placed = processes.on_devices(inputs, NamedSharding(self._programs.mesh, BATCH_SPEC))
        if processes.count() > 1 and (size := (number, inputs.patches.shape[1])) not in self._met:
            compile_everywhere(program, weights, placed)
            self._met.add(size)
        encoded: ImageFeatures = program(weights, placed)
        return encoded

    def _finish(self, batch: Batch, begun: Begun) -> ImageFeatures:
        model, vision = self._weights[begun.number].model, self._vision(begun.number)
        found, block = dict(begun.kept), vision.merge**2
        for pictures, encoded in begun.calls:
            host = processes.on_host(encoded)
            for row, picture in enumerate(pictures):
                own = picture_features(host, row, slice(0, picture.num_patches // block))
                found[picture.digest] = own
                self._cache.put(bytes([begun.number]) + picture.digest, own)
        assert batch.patches is not None
        rows, count = batch.patches.shape[0], batch.patches.shape[1] // block
        levels, dtype = model.config.deepstack, model.compute.dtype
        features = np.zeros((rows, count, vision.embed_dim), dtype)
        deeper = np.zeros((rows, levels, count, vision.embed_dim), dtype) if levels else None
        for picture in begun.pictures:
            at, own = slice(picture.patches.start // block, picture.patches.stop // block), found[picture.digest]
            features[picture.row, at] = own.features
            if deeper is not None:
                deeper[picture.row, :, at] = own.deeper
        return ImageFeatures(features=features, deeper=deeper)

    def _vision(self, number: int) -> VisionConfig:
        vision = self._weights[number].model.config.vision
        assert vision is not None
        return vision


@runtime_checkable
class Checkpointable(Protocol):
    """Role whose arrays are saved and restored with a trainer's."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Trainer:
    """Trains the parameters of `model` (only the adapter's, if it has one) in place:

        trainer = Trainer(model, loss, optax.adamw(1e-5), TrainSettings(temperature=1.0, max_grad_norm=1.0))
        for batch in batches:
            metrics = to_host(trainer.step(batch))

    The gradient is that of sum(loss totals) / sum(loss weights) over the whole batch plus that of the mean router loss,
    for any split into micro-batches. `teachers` process the same rows; they are placed on the mesh and never written.
    `mesh`: by default the first device.
    """

    def __init__(
        self,
        model: Decoder,
        loss: TokenLoss | ScoreLoss | DraftLoss,
        optimizer: Optimizer | optax.GradientTransformation,
        settings: TrainSettings,
        *,
        mesh: Mesh | None = None,
        teachers: Sequence[Decoder] = (),
    ):
        self.model, self.settings = model, settings
        self.mesh = single_device_mesh() if mesh is None else mesh
        self.step_number = 0
        """Number of steps, those without an update included; the only step counter, which schedules read."""
        self._stepped = False
        self._compiling: Future[Any] | None = None
        self._met = set[Any]()
        rule = optimizer if isinstance(optimizer, Optimizer) else Optimizer(transformation=optimizer)
        self._weights, *self._teachers = (on_mesh(one, self.mesh) for one in (model, *teachers))
        self._programs = programs_of(self._weights, loss, rule, settings, mesh=self.mesh, teachers=self._teachers)
        self._objective = self._programs.objective
        self._loss_checked = self._objective.router_loss is None
        projections = {} if settings.matching is None else settings.matching.projections()
        places = {path: x.sharding for path, x in self._programs.projections.items()}
        self._projections: Weights = processes.on_devices(projections, places)
        for weights in (*self._teachers, self._weights):
            _place(weights, self.mesh)
        self._opt_places = jax.tree.map(lambda x: x.sharding, self._programs.opt_state)
        self._opt_state = self._programs.init(self.params)
        towers = self._programs.frozen_towers
        self._towers = FrozenTowers(self._programs, [self._weights, *self._teachers]) if towers else None
        self._memory: dict[str, Array] = processes.on_devices(self._programs.memory(), replicated(self.mesh))
        self._offloaded = False
        self.companions: dict[str, Checkpointable] = {}
        """Roles beside the actor, by name, whose arrays are saved and restored with the trainer's."""
        self.offload_optimizer()

    @property
    def num_programs(self) -> int:
        """Number of programs traced for steps, evaluation and statistics: one each per batch shape."""
        return self._programs.num_traced

    @property
    def params(self) -> Weights:
        """Trained parameters by path, projections included."""
        return {**self._weights.read(self._programs.trainable.__contains__), **self._projections}

    @property
    def weights(self) -> Weights:
        """All parameters by path, frozen ones and projections included."""
        return {**self._weights.read(), **self._projections}

    @property
    def _frozen(self) -> Weights:
        return self._weights.read(lambda path: path not in self._programs.trainable)

    @property
    def _teacher_weights(self) -> list[Weights]:
        """Teacher parameters: arguments of programs, never donated."""
        return [teacher.read() for teacher in self._teachers]

    def arrays(self) -> list[Array]:
        """Model parameters and projections."""
        return list(self.weights.values())

    def optimizer_arrays(self) -> list[Array]:
        """Optimizer state, on the devices or in the host's memory."""
        return list(jax.tree.leaves(self._opt_state))

    def load_optimizer(self) -> None:
        """Bring the optimizer state to the devices."""
        if self._offloaded:
            self._opt_state, self._offloaded = jax.device_put(self._opt_state, self._opt_places), False

    def offload_optimizer(self) -> None:
        """Move the optimizer state to the host's memory, if the trainer was made to."""
        if self.settings.offload_optimizer:
            places = jax.tree.map(lambda place: place.with_memory_kind("pinned_host"), self._opt_places)
            self._opt_state, self._offloaded = jax.device_put(self._opt_state, places), True

    def step(self, batch: Batch, *, update: bool = True) -> Metrics:
        """One update from one batch of host rows. Metrics of the device stay there. Parameters and optimizer state
        before are donated: whoever holds them, such as an engine, needs those of now (`engine.update_weights`) before
        the next use. Batch, frozen parameters and teachers are not.

        A gradient that is not finite, a batch without any weight, a veto of `skip_update` or `update=False` leave
        parameters and optimiser state bitwise as they are, and show as `update_skipped` = 1. The step counts all the
        same.
        """
        with span("update"):
            return self._step(batch, update=update)

    def _step(self, batch: Batch, *, update: bool) -> Metrics:
        drawn_at = batch.sampler_temperature
        if drawn_at is not None and drawn_at != self.settings.temperature:
            raise ConfigError(
                f"Trainer.step: the batch was sampled at temperature {drawn_at:g}, and the trainer scores it at "
                f"TrainSettings(temperature={self.settings.temperature:g}), so that ratios and the KL are of another "
                "policy; give both the same temperature"
            )
        batch = self.encoded(batch)
        with span("update/inputs"):
            arguments = self._arguments(batch, update=update)
        if not self._stepped:
            # Compile before the update, which can then use the memory that compilation takes.
            with progress_bar("compiling the update"):
                if self._compiling is None:
                    self._lower(arguments).compile()
                else:
                    self._compiling.result()
            processes.wait_for_all("first update")
            trim_host_memory(platform_of(self.mesh))
            self._stepped, self._compiling = True, None
        params, self._opt_state, self._memory, metrics = self._programs.update(*arguments)
        self._write(params)
        self.step_number += 1
        return {**metrics, **packing_metrics(batch), **self._flops(batch)}

    def _flops(self, batch: Batch) -> dict[str, float | Mean]:
        """Metrics of the operations of an update on host rows, and of the tower's share with images."""
        language, tower = self._programs.flops(batch)
        pictures, before = ({}, 0.0) if self._towers is None else self._towers.counted()
        tower += before
        chip, total = chip_of(self.mesh.devices.flat[0]), language + tower
        return {
            **pictures,
            "perf/tflops": total / 1e12,
            **({} if batch.patches is None else {"perf/tower_ratio": Mean(total=tower, weight=total)}),
            **({} if chip is None else {"perf/ideal_s": total / (chip.flops * self.mesh.size)}),
        }

    def compile_ahead(self, batch: Batch, scored: Batch) -> None:
        """Compile the first update for a batch of this shape in a background thread.

        `step` waits for it. The program of `stats` for `scored` is compiled when this returns. No effect if the update
        is compiled or being compiled.
        """
        if self._stepped or self._compiling is not None:
            return
        threads = ThreadPoolExecutor(max_workers=2)
        with gc_disabled():
            lowered = self._programs.stats.lower(self.weights, *self._micro_batches(scored))
        # Statistics first: they are traced faster, and the update is traced while they compile.
        scoring = threads.submit(lowered.compile)
        self._compiling = threads.submit(self._lower(self._arguments(batch)).compile)
        threads.shutdown(wait=False)
        scoring.result()

    def _arguments(self, batch: Batch, *, update: bool = True) -> tuple[Any, ...]:
        """Arguments of `TrainPrograms.update`."""
        self.load_optimizer()
        micro, count = self._micro_batches(batch)
        if not self._loss_checked:
            first = jax.tree.map(lambda x: x[0], micro)
            check_weight(self._objective.loss, first, scores=self.model.config.scalar_head)
            self._loss_checked = True
        inputs = micro, count, np.uint32(self.step_number), np.bool_(update), self._teacher_weights, self._memory
        return self.params, self._frozen, self._opt_state, *inputs

    def _lower(self, arguments: tuple[Any, ...]) -> jax.stages.Lowered:
        with gc_disabled():
            return self._programs.update.lower(*arguments)

    def evaluate(self, batches: Iterable[Batch], each: Callable[[Batch, Any], None] | None = None) -> Metrics:
        """Loss and metrics over all batches, without an update.

        A whole-batch loss is computed over all batches together, so that the batch size does not matter; the model
        still processes them one by one. `each` is called with every batch and its statistics as host arrays.
        """
        if self._objective.needs_whole_batch:
            return self._evaluate_at_once(batches, each)
        totals: dict[str, Metric] = {}
        for batch in batches:
            arguments = self.weights, *self._micro_batches(batch), self._teacher_weights
            self._meet(self._programs.evaluate, *arguments)
            output, stats = self._programs.evaluate(*arguments)
            totals = merge(totals, {"loss": output.loss, **output.metrics})
            if each is not None:
                each(batch, _rows_on_host(stats, batch))
        return dict(totals)

    def _evaluate_at_once(self, batches: Iterable[Batch], each: Callable[[Batch, Any], None] | None) -> Metrics:
        parts = []
        for batch in batches:
            stats = self._stats(batch, self.weights, self._teacher_weights)
            parts.append((stats, replace(batch, teachers=None, experts=None).without_images()))
            if each is not None:
                each(batch, stats)
        output = self._programs.loss_of_all(*concatenated(parts))
        return {"loss": output.loss, **output.metrics}

    def stats(self, batch: Batch, weights: Weights | None = None) -> TokenStats:
        """Token statistics of host rows as host arrays, under other weights of the same structure if given."""
        stats = self._stats(model_inputs(batch), self.weights if weights is None else weights)
        assert isinstance(stats, TokenStats), "a reward model has scores instead of log-probabilities"
        return stats

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Log-probabilities of the tokens of host rows that have a weight, as a host array."""
        return np.asarray(self.stats(batch).logps)

    def scores(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Reward model scores of host rows as a host array."""
        stats = self._stats(model_inputs(batch), self.weights)
        assert isinstance(stats, ScoreStats), "only a reward model has scores"
        return np.asarray(stats.scores)

    def _stats(self, batch: Batch, weights: Weights, *teacher_weights: list[Weights]) -> TokenStats | ScoreStats:
        """Statistics of host rows as host arrays."""
        arguments = weights, *self._micro_batches(batch), *teacher_weights
        self._meet(self._programs.stats, *arguments)
        return _rows_on_host(self._programs.stats(*arguments), batch)

    def _meet(self, program: Any, *arguments: Any) -> None:
        """Compile a program in all processes before the first run of it."""
        if processes.count() > 1 and program not in self._met:
            compile_everywhere(program, *arguments)
            self._met.add(program)

    def state(self) -> dict[str, Any]:
        """Arrays of a checkpoint."""
        params = {path: w for path, w in self.params.items() if path not in self._projections}
        # Branches of their own: who reads the model's parameters need not know of them.
        more: dict[str, Any] = {"projections": self._projections} if self._projections else {}
        more |= {"memory": self._memory} if self._memory else {}
        more |= {name: arrays for name, one in self.companions.items() if (arrays := one.state())}
        opt_state = jax.device_put(self._opt_state, self._opt_places) if self._offloaded else self._opt_state
        return {"params": params, "opt_state": opt_state, **more}

    def restore(self, state: dict[str, Any], step: int) -> None:
        self._write({**state["params"], **state.get("projections", {})})
        self._opt_state, self._offloaded = state["opt_state"], False
        self._memory = state["memory"] if self._memory else {}
        self.offload_optimizer()
        for name, one in self.companions.items():
            one.restore(state.get(name, {}))
        self.step_number = step

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the exponential moving average, if there is one, in the place of the trained parameters."""
        average = self._opt_state.average
        if not average:
            yield
            return
        last = self.params
        self._write(
            {path: jax.device_put(x, last[path].sharding).astype(last[path].dtype) for path, x in average.items()}
        )
        try:
            yield
        finally:
            self._write(last)

    def _write(self, params: Weights) -> None:
        self._projections = {path: params[path] for path in self._projections}
        self._weights.write({path: w for path, w in params.items() if path not in self._projections})

    @property
    def begin(self) -> Callable[[Batch], Callable[[], Batch]] | None:
        """Function that starts frozen towers on the pictures of a batch that are not kept, and returns one that waits
        for them and returns the batch with its features; None without such towers."""
        return None if self._towers is None else self._begin

    def _begin(self, batch: Batch, *, counts: bool = True) -> Callable[[], Batch]:
        towers = self._towers
        if towers is None or batch.patches is None or batch.encoded is not None:
            return lambda: batch
        with span("images"):
            begun = towers.begin(batch)

        def finish() -> Batch:
            if counts:
                towers.count(begun)
            return towers.finish(batch, begun)

        return finish

    def encoded(self, batch: Batch) -> Batch:
        """Batch with the features of its pictures by frozen towers, which run on those that are not kept; both are
        counted in the metrics of the next step."""
        return self._begin(batch)()

    def _micro_batches(self, batch: Batch) -> tuple[Batch, Array]:
        """Micro-batches [M, rows, T] on the mesh, and the number of non-empty ones: the others are never computed."""
        host = jax.tree.map(np.asarray, self._programs.read_by_the_step(self._begin(batch, counts=False)()))
        total = host.tokens.shape[0]
        rows = self._programs.micro_rows(total)
        padding = -total % rows
        used = np.flatnonzero(host.segments.any(axis=1))
        count = int(used[-1]) // rows + 1 if used.size else 0

        def split(x: np.ndarray) -> np.ndarray:
            rest = x.shape[1:]
            whole = np.pad(x, ((0, padding), *((0, 0) for _ in rest))) if padding else x
            return whole.reshape(-1, rows, *rest)

        micro = processes.on_devices(jax.tree.map(split, host), self._programs.micro_sharding)
        return micro, processes.on_devices(np.int32(count), replicated(self.mesh))


def _rows_on_host(stats: StatsT, batch: Batch) -> StatsT:
    """Statistics [M, rows, T] as host arrays of the batch's rows, without the padding rows of the last micro-batch."""
    arrays: StatsT = jax.tree.map(lambda x: flatten_micro(np.asarray(x))[: batch.shape[0]], processes.on_host(stats))
    return arrays


def _place(weights: ModelWeights, mesh: Mesh) -> None:
    """Move every parameter to its sharding on the mesh; no copy if it is there already."""
    placed = {path: x.sharding for path, x in placed_shapes(weights, mesh).items()}
    weights.write(jax.device_put(weights.read(), placed))


def check_finite(metrics: dict[str, float], step: int) -> None:
    """Raises FloatingPointError if the step's gradient was not finite; the weights are unchanged by it."""
    if not np.isfinite(metrics["grad_norm"]):
        raise FloatingPointError(
            f"step {step}: the gradient norm is {metrics['grad_norm']}; the update was not applied. "
            "Lower optimizer.learning_rate, or look for extreme values in the data or the rewards"
        )
