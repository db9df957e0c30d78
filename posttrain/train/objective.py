"""Training objective: its settings, and its gradient over all micro-batches as pure functions of arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float

from posttrain.batch import (
    Batch,
    BatchLoss,
    DraftStats,
    LossOutput,
    RouterStats,
    ScoreStats,
    TokenStats,
    TopK,
)
from posttrain.config import TrainSection
from posttrain.kernels.logits.chunk_stats import PLAIN, Terms
from posttrain.kernels.logits.token_stats import Teacher, stats_vjp, token_stats
from posttrain.kernels.platform import platform_of
from posttrain.losses.reduce import CotangentLoss, known_cotangents, sequence_sums, to_tokens
from posttrain.losses.router import RouterLoss, router_means, weight_of
from posttrain.mesh import BATCH_SPEC, param_sharding, part_of_sum, whole_array
from posttrain.models.activations import Features
from posttrain.models.adapter import drop, has_dropout
from posttrain.models.decoder import Decoder
from posttrain.train.layer_matching import Matching
from posttrain.train.qk_clip import LargestHeads, largest_of
from posttrain.tree import Metric, Micro, added_over, flatten_micro, num_micro, replace, stack_over, sum_over
from posttrain.weights.state import ModelWeights, Weights

UNROLLED_LAYERS_ON_CPU = 8
"""Maximum depth up to which XLA:CPU gradients unroll the layers: faster than a scan, which stacks all residuals, and
still compiled in acceptable time."""

UNROLLED_LAYERS_ON_GPU = 32
"""The same on one GPU, where a scan copies weights, residuals and gradients to and from their stacks. On several its
scheduler might gather the weights of all layers at once."""

AnyLoss = Callable[[Any, Batch], LossOutput]
"""Loss on the model's statistics: a `TokenLoss`, a `ScoreLoss` or a `DraftLoss`."""


@runtime_checkable
class SkipUpdate(Protocol):
    """Veto on updates, traced in the program of the update, which carries its memory from step to step."""

    def start(self) -> np.ndarray:
        """Memory before the first step."""

    def __call__(self, metrics: Mapping[str, Metric], memory: Array) -> tuple[Array, Array, Mapping[str, Array]]:
        """Veto on a step with these metrics, the memory after it, and metrics beside those of the loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of a trainer beside model, loss, optimizer and mesh."""

    temperature: float
    """Log-probabilities are those of softmax(logits / temperature)."""
    max_grad_norm: float
    """Greatest global norm of a gradient; a greater one is clipped."""
    qk_clip: float | None = None
    """Largest attention logit of a head, whose queries and keys are scaled down by what it is above it."""
    micro_batch_rows: int | None = None
    """Rows per forward pass, at most; None: all. Any split gives the same gradient."""
    router_loss: RouterLoss | None = None
    """Load balancing of MoE models, whose mean is added to the loss; None: not computed."""
    correction_rate: float = 0.0
    """Update of the router's bias correction after each step."""
    terms: Terms = PLAIN
    """Statistics that the loss needs beside log-probabilities and entropies."""
    matching: Matching | None = None
    """Layers matched with the one teacher's; projections are trained and checkpointed, but not part of the model."""
    noise_alpha: float = 0.0
    """NEFTune, arXiv:2310.05914: uniform noise on the embeddings in training, up to alpha / sqrt(length of the
    sequence * D)."""
    dropout_seed: int | None = None
    """Seed of dropout and noise; ValueError without it where there is one of them."""
    skip_update: SkipUpdate | None = None
    """Veto on an update by the step's metrics, inside its program; its memory is checkpointed."""
    gather_once: bool = False
    """On a mesh of `data` and `fsdp` alone, gather the weights and reduce the gradients once an update, not in each
    micro-batch."""
    image_cache_bytes: int = 0
    """Host memory for features by frozen towers, which then are no part of the step; 0: they are."""
    offload_optimizer: bool = False
    """`Trainer.offload_optimizer()` moves the optimizer state to the host's memory until the next step."""

    @classmethod
    def of(cls, section: TrainSection, *, temperature: float, dropout_seed: int | None, terms: Terms) -> TrainSettings:
        """Settings of a stage: what the sections of all stages have; `replace` adds what one kind has."""
        router = section.router
        balanced = router.balance_coef or router.z_coef
        return cls(
            temperature=temperature,
            max_grad_norm=section.optimizer.max_grad_norm,
            qk_clip=section.optimizer.qk_clip,
            micro_batch_rows=section.pass_rows,
            router_loss=RouterLoss(balance_coef=router.balance_coef, z_coef=router.z_coef) if balanced else None,
            correction_rate=router.correction_rate,
            terms=terms,
            dropout_seed=dropout_seed,
            image_cache_bytes=section.kept_images_mib * 2**20,
        )


Arrays = tuple[Weights, Weights, list[Weights], Array]
"""Trained parameters, frozen ones, those of teachers, and the weight of the router loss."""


class Keys(NamedTuple):
    """PRNG keys of a micro-batch."""

    dropout: Array | None
    noise: Array | None
    """Noise keys, one per row."""


class ForwardOutput(NamedTuple):
    """Outputs of a forward pass."""

    stats: TokenStats | ScoreStats | DraftStats
    routers: RouterStats | None
    vjp_sum: Array | None = None
    """sum(statistics * cotangents)."""
    largest: LargestHeads = MappingProxyType({})
    """Largest attention logits, with `qk_clip` in passes that are differentiated."""


class Passed(NamedTuple):
    """Outputs of the passes beside their gradient."""

    output: LossOutput
    routers: RouterStats | None
    largest: LargestHeads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Structures of a student and its teachers; all arrays are arguments, so that programs may donate them."""

    student: ModelWeights
    teachers: Sequence[ModelWeights]
    loss: AnyLoss
    settings: TrainSettings
    alone: bool = False
    """Run on each device by itself, inside `jax.shard_map`."""

    def __post_init__(self) -> None:
        if self.settings.matching is not None and len(self.teachers) != 1:
            raise ValueError(f"Trainer: matching needs exactly one in-step teacher, got {len(self.teachers)}")
        if (self._dropout or self.settings.noise_alpha) and self.settings.dropout_seed is None:
            raise ValueError("Trainer: adapter dropout and noise_alpha need dropout_seed")
        if self.settings.gather_once and not (self.alone or self._splits_rows_alone("data", "fsdp")):
            raise ValueError(
                "Trainer: gather_once needs a mesh of data and fsdp alone, of several devices, and no adapter dropout"
            )

    @property
    def needs_whole_batch(self) -> bool:
        loss: object = self.loss
        return isinstance(loss, BatchLoss) and loss.needs_whole_batch

    @functools.cached_property
    def router_loss(self) -> RouterLoss | None:
        """Router loss with a coefficient above 0."""
        given = self.settings.router_loss
        return given if given is not None and given.on else None

    @functools.cached_property
    def _dropout(self) -> bool:
        return has_dropout(self.student.model)

    @functools.cached_property
    def _projections(self) -> frozenset[str]:
        return frozenset(() if self.settings.matching is None else self.settings.matching.shapes())

    @functools.cached_property
    def _used_once(self) -> frozenset[str]:
        return used_once(self.student)

    @functools.cached_property
    def _unrolled(self) -> bool:
        config, compute = self.student.model.config, self.student.model.compute
        platform = platform_of(self.mesh)
        if platform == "gpu":
            return config.num_layers <= UNROLLED_LAYERS_ON_GPU and (self.mesh is None or self.mesh.size == 1)
        # XLA:CPU merges recomputation with the first computation, but not across a loop.
        return platform == "cpu" and config.num_layers <= UNROLLED_LAYERS_ON_CPU and compute.remat == "none"

    def keys(self, step: Array, micro: Batch) -> Keys:
        """PRNG keys of the step's micro-batches; noise keys are per row, independent of the split."""
        seed = self.settings.dropout_seed
        if seed is None:
            return Keys(None, None)
        key, (num_micro, rows) = jax.random.fold_in(jax.random.key(seed), step), micro.tokens.shape[:2]
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_micro * rows)).reshape(num_micro, rows)
        return Keys(keys[:, 0] if self._dropout else None, keys if self.settings.noise_alpha else None)

    def forward(
        self,
        weights: Weights,
        batch: Batch,
        teacher_params: list[Weights] | None = None,
        keys: Keys | None = None,
        cotangents: Mapping[str, Array] | None = None,
        *,
        backward: bool = False,
    ) -> ForwardOutput:
        """Statistics of weighted tokens; without `teacher_params` of the student only.

        With `cotangents`, also the sum of statistics * cotangents, which then is the only output with a gradient.
        `backward`: the pass is differentiated, which changes the program but, except for rounding, not the result.
        """
        model = self._bound(self.student, self._without_projections(weights))
        model.unroll = backward and self._unrolled
        matching = None if teacher_params is None else self.settings.matching
        if keys is not None and keys.dropout is not None:
            drop(model, keys.dropout)
        tokens, positions, segments = map(jnp.asarray, (batch.tokens, batch.positions, batch.segments))
        experts = None if batch.experts is None else jnp.moveaxis(jnp.asarray(batch.experts, jnp.int32), 2, 0)
        parents = None if batch.parents is None else jnp.asarray(batch.parents)
        noise = None if keys is None or keys.noise is None else self._noise(keys.noise, segments)
        assert matching is None or parents is None, "layer matching does not support parent segments"
        inputs, taps = (tokens, positions, segments), None if matching is None else matching.student
        beside: dict[str, Any] = {"parents": parents, "images": model.images_of(batch)}
        clips = backward and self.settings.qk_clip is not None
        hidden, routing, student_features, logits = model.features(
            *inputs, taps, experts=experts, noise=noise, largest=clips, **beside
        )
        routers, largest = None if routing is None else routing.stats, largest_of(logits) if logits else {}
        if model.drafter is not None or model.config.scalar_head:
            return ForwardOutput(_stats_without_logps(model, batch, hidden), routers, largest=largest)
        teachers: list[Teacher | TopK] = []
        only, teacher_features = jnp.asarray(batch.loss_weight) != 0, Features()
        for structure, arrays in zip(self.teachers, teacher_params or [], strict=teacher_params is not None):
            teacher = self._bound(structure, jax.lax.stop_gradient(arrays))
            taps = None if matching is None else matching.teacher
            beside["images"] = teacher.images_of(batch, len(teachers) + 1)
            final, _, teacher_features, _ = teacher.features(*inputs, taps, **beside)
            teachers.append(Teacher(teacher.logits, final))
        teachers += (batch.teachers or ()) if teacher_params is not None else ()
        others = {} if matching is None else matching(student_features, teacher_features, weights, segments, only)
        terms = self.settings.terms
        terms = terms if teacher_params is not None else dataclasses.replace(terms, divergence=None)
        options: dict[str, Any] = {
            "temperature": self.settings.temperature,
            "vocab_size": model.config.vocab_size,
            "only": only,
            "terms": terms,
            "teachers": teachers,
            "teacher_weights": batch.teacher_weights if teachers else None,
            "mesh": self.mesh,
        }
        head = self._head(model, weights)
        problem, vjp_sum = (head.logits, hidden, tokens, segments), None
        if cotangents is None:
            stats = token_stats(*problem, **options)
        else:
            token_cotangents = {name: ct for name, ct in cotangents.items() if name not in others}
            vjp_sum, stats = stats_vjp(*problem, cotangents=token_cotangents, **options)
            vjp_sum += sum(jnp.sum(x * cotangents[name]) for name, x in others.items() if name in cotangents)
        return ForwardOutput(replace(stats, **others), routers, vjp_sum, largest)

    def _noise(self, keys: Array, segments: Array) -> Float[Array, "B T D"]:
        """NEFTune noise, scaled by 1 / sqrt(length * width) per sequence, arXiv:2310.05914."""
        shape = (segments.shape[1], self.student.model.config.embed_dim)
        lengths = to_tokens(sequence_sums(jnp.ones(segments.shape), segments), segments)
        scale = self.settings.noise_alpha / jnp.sqrt(jnp.maximum(lengths, 1.0) * shape[1])
        return jax.vmap(lambda key: jax.random.uniform(key, shape, minval=-1.0, maxval=1.0))(keys) * scale[..., None]

    def loss_output(
        self,
        weights: Weights,
        batch: Batch,
        teacher_params: list[Weights],
        loss: AnyLoss,
        keys: Keys | None = None,
        cotangents: Mapping[str, Array] | None = None,
        *,
        backward: bool = False,
    ) -> tuple[LossOutput, ForwardOutput]:
        forward = self.forward(weights, batch, teacher_params, keys, cotangents, backward=backward)
        output = loss(forward.stats, batch)
        if forward.routers is None:
            return output, forward
        metrics = {**output.metrics, **router_means(forward.routers, num_tokens(batch))}
        return LossOutput(loss=output.loss, metrics=metrics), forward

    def gradients(
        self,
        params: Weights,
        frozen: Weights,
        teacher_params: list[Weights],
        router_weight: Array,
        inputs: tuple[Batch, Keys],
        count: Array,
    ) -> tuple[Weights, Passed]:
        """Gradient over all micro-batches. A whole-batch loss needs a second forward pass if there are several."""
        arrays = params, frozen, teacher_params, router_weight
        if not self.needs_whole_batch or num_micro(inputs) == 1:
            return self._total_gradient(arrays, inputs, None, count)

        def statistics(objective: Objective, arrays: Arrays, inputs: Micro, count: Array) -> Any:
            params, frozen, teachers, _ = arrays
            return stack_over(
                lambda one: objective.forward({**frozen, **params}, one[0], teachers, one[1]).stats, inputs, count
            )

        if self.settings.gather_once:
            rows = PartitionSpec(None, *BATCH_SPEC)
            stats = self._on_each_device(statistics, arrays, rows)(arrays, inputs, count)
        else:
            stats = statistics(self, arrays, inputs, count)

        def whole(stats: Any) -> tuple[Array, LossOutput]:
            output = self.loss(flatten_micro(stats), flatten_micro(inputs[0]))
            return jnp.asarray(output.loss.total), output

        cotangents, output = jax.grad(whole, has_aux=True)(stats)
        gradient, passed = self._total_gradient(arrays, inputs, cotangents, count)
        metrics = {**output.metrics, **passed.output.metrics}
        return gradient, passed._replace(output=LossOutput(loss=output.loss, metrics=metrics))

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        """Mesh over which the compiler splits arrays."""
        mesh = self.student.model.compute.mesh
        if mesh is None or not self.alone:
            return mesh
        return Mesh(mesh.devices.reshape(-1)[:1].reshape([1] * mesh.devices.ndim), mesh.axis_names)

    def _splits_rows_alone(self, *axes: str) -> bool:
        """True on several devices that these axes split; not with adapter dropout, whose masks are drawn for all rows
        of a micro-batch."""
        mesh = self.mesh
        if mesh is None or mesh.size == 1 or self._dropout:
            return False
        return mesh.size == math.prod(mesh.shape[axis] for axis in axes)

    def _total_gradient(
        self, arrays: Arrays, inputs: tuple[Batch, Keys], cotangents: Any, count: Array
    ) -> tuple[Weights, Passed]:
        """Sum of `_gradient` over micro-batches, of the loss or, with `cotangents`, of the statistics.

        On a mesh of `data` alone, and where weights are gathered once, each device adds up those of its own rows, and
        all devices' once.
        """

        def total(objective: Objective, arrays: Arrays, micro: Micro, count: Array) -> Any:
            def one(micro: Any) -> Any:
                loss = self.loss if micro[1] is None else CotangentLoss(micro[1])
                return objective._gradient(arrays, micro[0], loss)

            return sum_over(one, micro, count)

        mesh, micro = self.mesh, (inputs, cotangents)
        if not self.settings.gather_once and (num_micro(inputs) == 1 or not self._splits_rows_alone("data")):
            return total(self, arrays, micro, count)
        assert mesh is not None
        specs = self._specs(mesh, self.student, arrays[0])

        def summed(*given: Any) -> Any:
            gradient, outputs = total(*given)
            parts = {path: part_of_sum(g.astype(jnp.float32), specs[path], mesh) for path, g in gradient.items()}
            return parts, added_over(outputs, mesh.axis_names)

        return self._on_each_device(summed, arrays, (specs, PartitionSpec()))(arrays, micro, count)

    def _on_each_device(self, function: Callable[..., Any], arrays: Arrays, outputs: Any) -> Callable[..., Any]:
        """Map a function of an objective, of whole `arrays`, micro-batches and their number over the devices, each with
        its own rows. `outputs`: specs of what it returns."""
        mesh, alone, dtype = self.mesh, dataclasses.replace(self, alone=True), self.student.model.compute.dtype
        assert mesh is not None
        params, frozen, teachers, _ = arrays
        structures = [self.student, self.student, *self.teachers]
        specs = [self._specs(mesh, *one) for one in zip(structures, [params, frozen, *teachers], strict=True)]
        # Gathered in the type in which their one product reads them.
        narrow = {path for path in params if path in self._used_once and dtype.itemsize < params[path].dtype.itemsize}

        def local(arrays: list[Weights], weight: Array, *rest: Any) -> Any:
            trained = {path: w.astype(dtype) if path in narrow else w for path, w in arrays[0].items()}
            params, frozen, *teachers = (
                {path: whole_array(w, spec[path], mesh) for path, w in weights.items()}
                for spec, weights in zip(specs, [trained, *arrays[1:]], strict=True)
            )
            return function(alone, (params, frozen, teachers, weight), *rest)

        whole, rows = PartitionSpec(), PartitionSpec(None, *BATCH_SPEC)
        split = jax.shard_map(
            local, mesh=mesh, in_specs=(specs, whole, rows, whole), out_specs=outputs, check_vma=False
        )
        return lambda arrays, *rest: split([*arrays[:2], *arrays[2]], arrays[3], *rest)

    def _specs(self, mesh: Mesh, structure: ModelWeights, weights: Weights) -> dict[str, PartitionSpec]:
        """Specs of parameters as the mesh has them, projections included."""
        dims = structure.dims()
        if self.settings.matching is not None:
            dims = {**{path: one.dims for path, one in self.settings.matching.parameters().items()}, **dims}
        return {path: param_sharding(mesh, path, dims[path], w.shape).spec for path, w in weights.items()}

    def _gradient(self, arrays: Arrays, inputs: tuple[Batch, Keys], loss: AnyLoss) -> tuple[Weights, Passed]:
        def total(params: Weights) -> tuple[Array, Passed]:
            weights = {**frozen, **self._placed(params)}
            output, forward = self.loss_output(weights, batch, teacher_params, loss, keys, cotangents, backward=True)
            _, routers, vjp_sum, largest = forward
            value = jnp.asarray(output.loss.total if vjp_sum is None else vjp_sum)
            if self.router_loss is not None and routers is not None:
                value += router_weight * self.router_loss(routers)
            return value, Passed(output, routers, largest)

        (params, frozen, teacher_params, router_weight), (batch, keys) = arrays, inputs
        # The divergence of a token group spans several chunks.
        cotangents = known_cotangents(loss, batch) if self.settings.terms.unshared is None else None

        # Differentiate by float32 copies, so that sums over chunks and tokens are accumulated in float32.
        once, dtype = self._used_once, self.student.model.compute.dtype
        wide = {path: p if path in once and p.dtype == dtype else p.astype(jnp.float32) for path, p in params.items()}
        return jax.grad(total, has_aux=True)(wide)

    def _head(self, model: Decoder, weights: Weights) -> Decoder:
        """Model for its logits: on a mesh apart from the embedding's use of a tied table, which otherwise would be laid
        out as the head's gradient is."""
        return self._bound(self.student, self._placed(self._without_projections(weights))) if self._on_mesh else model

    def _bound(self, structure: ModelWeights, weights: Weights) -> Decoder:
        model = structure.bind(weights)
        model.compute = dataclasses.replace(model.compute, mesh=self.mesh)
        return model

    def _without_projections(self, weights: Weights) -> Weights:
        return {path: w for path, w in weights.items() if path not in self._projections}

    @property
    def _on_mesh(self) -> bool:
        return self.mesh is not None and self.mesh.size > 1

    def _placed(self, params: Weights) -> Weights:
        """Parameters, and thereby their gradients, where the mesh has them, whatever layout a kernel reads them in."""
        dims = self.student.dims()
        if self.mesh is None or not self._on_mesh:
            return params
        own = {path: param_sharding(self.mesh, path, dims[path], w.shape) for path, w in params.items() if path in dims}
        return {**params, **jax.lax.with_sharding_constraint({path: params[path] for path in own}, own)}

    def router_weight(self, micro: Batch, count: Array) -> Array:
        """Ratio of the weights of loss and router loss, which makes their totals comparable.

        Computed over the whole batch before the first backward pass, so that the gradient is exact for any split.
        """
        if self.router_loss is None:
            return jnp.zeros(())

        def weights(batch: Batch) -> tuple[Array, Array]:
            weight = weight_of(self.loss, batch, scores=self.student.model.config.scalar_head)
            return weight, num_tokens(batch) * len(self.student.model.config.mixtures)

        loss_weight, router_weight = sum_over(weights, micro, count)
        return jnp.where(router_weight > 0, loss_weight / jnp.maximum(router_weight, 1.0), 0.0)


def _stats_without_logps(model: Decoder, batch: Batch, hidden: Float[Array, "B T D"]) -> ScoreStats | DraftStats:
    """Statistics of a block drafter, or else scores of a reward model."""
    if model.drafter is None:
        return ScoreStats(scores=jnp.where(jnp.asarray(batch.segments) > 0, model.scores(hidden), 0.0))
    from posttrain.models.drafter import block_stats

    embedded = model.embed(jnp.asarray(batch.tokens), model.compute.dtype, model.compute.mesh)
    return block_stats(model.drafter, batch, hidden, embedded, model.logits)


def used_once(weights: ModelWeights) -> frozenset[str]:
    """Matrices of layers, which one product reads in the computation's type and gives a gradient of that type. Of those
    stored in it a float32 gradient of the whole stack would hold the same numbers in twice the memory."""
    return frozenset(path for path, parameter in weights.parameters().items() if parameter.is_hidden)


def num_tokens(batch: Batch) -> Float[Array, ""]:
    return jnp.sum(jnp.asarray(batch.segments) > 0, dtype=jnp.float32)
