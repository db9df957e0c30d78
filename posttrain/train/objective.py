"""What a trainer minimises, and its gradient over all micro-batches, as pure functions of arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from posttrain.batch import (
    DIFFERENTIABLE,
    Batch,
    BatchLoss,
    LinearLoss,
    LossOutput,
    RouterStats,
    ScoreStats,
    TokenStats,
    TopK,
)
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.token_stats import Teacher, pulled_stats, token_stats
from posttrain.kernels.platform import platform_of
from posttrain.losses.reduce import sequence_sums, to_tokens
from posttrain.losses.router import RouterLoss, router_means, weight_of
from posttrain.models.adapter import drop, has_dropout
from posttrain.models.taps import Features
from posttrain.train.accumulate import Pulled, as_one, num_micro, stack_over, sum_over
from posttrain.train.layer_matching import Matching
from posttrain.tree import replace
from posttrain.weights.state import ModelWeights, Weights

UNROLLED_LAYERS_ON_CPU = 8
"""Up to this depth XLA:CPU computes a gradient sooner through layers one after the other than through a loop, which
must lay all that the backward pass wants into stacks, and compiles them soon enough."""

AnyLoss = Callable[[Any, Batch], LossOutput]
"""On the statistics that the model gives: a `TokenLoss` or a `ScoreLoss`."""


class Keys(NamedTuple):
    """Random keys of a micro-batch."""

    dropout: Array | None
    noise: Array | None
    """One for each row."""


class Passed(NamedTuple):
    """What a forward pass found."""

    stats: TokenStats | ScoreStats
    routers: RouterStats | None
    pulled: Array | None = None
    """sum(statistics * cotangents)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Of the structures of a student and its teachers; all arrays are arguments, so that programs may donate them."""

    student: ModelWeights
    teachers: Sequence[ModelWeights]
    loss: AnyLoss
    temperature: float
    terms: Terms
    router_loss: RouterLoss | None
    matching: Matching | None
    noise_alpha: float
    dropout_seed: int | None

    def __post_init__(self) -> None:
        if self.matching is not None and len(self.teachers) != 1:
            raise ValueError(f"Trainer: matching is of one teacher in the step, and there are {len(self.teachers)}")
        if (self._dropout or self.noise_alpha) and self.dropout_seed is None:
            raise ValueError("Trainer: dropout of an adapter and noise_alpha draw random numbers; give dropout_seed")

    @property
    def needs_whole_batch(self) -> bool:
        loss: object = self.loss
        return isinstance(loss, BatchLoss) and loss.needs_whole_batch

    @functools.cached_property
    def _dropout(self) -> bool:
        return has_dropout(self.student.model)

    @functools.cached_property
    def _projections(self) -> frozenset[str]:
        return frozenset(() if self.matching is None else self.matching.shapes())

    @functools.cached_property
    def _unrolled(self) -> bool:
        config, compute = self.student.model.config, self.student.model.compute
        # XLA:CPU joins what is computed again with the first computation, but not across a loop.
        few = config.num_layers <= UNROLLED_LAYERS_ON_CPU and compute.remat == "none"
        return few and platform_of(compute.mesh) == "cpu"

    def keys(self, step: Array, micro: Batch) -> Keys:
        """Random keys of the step's micro-batches; those of the noise belong to rows, whatever the split."""
        if self.dropout_seed is None:
            return Keys(None, None)
        key, (num_micro, rows) = jax.random.fold_in(jax.random.key(self.dropout_seed), step), micro.tokens.shape[:2]
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_micro * rows)).reshape(num_micro, rows)
        return Keys(keys[:, 0] if self._dropout else None, keys if self.noise_alpha else None)

    def forward(
        self,
        weights: Weights,
        batch: Batch,
        taught: list[Weights] | None = None,
        keys: Keys | None = None,
        cotangents: Mapping[str, Array] | None = None,
        *,
        backward: bool = False,
    ) -> Passed:
        """Statistics of the tokens that have a weight; without `taught` those of the student alone.

        With the statistics' `cotangents` their sum of products, which alone then has a gradient. `backward`: for a
        gradient, which changes the program and, but for rounding, not the result.
        """
        model = self.student.bind({path: w for path, w in weights.items() if path not in self._projections})
        model.unroll = backward and self._unrolled
        matching = None if taught is None else self.matching
        if keys is not None and keys.dropout is not None:
            drop(model, keys.dropout)
        tokens, positions, segments = map(jnp.asarray, (batch.tokens, batch.positions, batch.segments))
        experts = None if batch.experts is None else jnp.moveaxis(jnp.asarray(batch.experts, jnp.int32), 2, 0)
        parents = None if batch.parents is None else jnp.asarray(batch.parents)
        noise = None if keys is None or keys.noise is None else self._noise(keys.noise, segments)
        assert matching is None or parents is None, "sequences that go on from others have no features to match"
        inputs, taps = (tokens, positions, segments), None if matching is None else matching.student
        hidden, routing, own = model.features(*inputs, taps, experts=experts, noise=noise, parents=parents)
        if model.config.scalar_head:
            scores = jnp.where(segments > 0, model.scores(hidden), 0.0)
            return Passed(ScoreStats(scores=scores), None if routing is None else routing.stats)
        teachers: list[Teacher | TopK] = []
        only, theirs = jnp.asarray(batch.loss_weight) != 0, Features()
        for structure, arrays in zip(self.teachers, taught or [], strict=taught is not None):
            teacher = structure.bind(jax.lax.stop_gradient(arrays))
            taps = None if matching is None else matching.teacher
            final, _, theirs = teacher.features(*inputs, taps, parents=parents)
            teachers.append(Teacher(teacher.logits, final))
        teachers += (batch.teachers or ()) if taught is not None else ()
        others = {} if matching is None else matching(own, theirs, weights, segments, only)
        terms = self.terms if taught is not None else dataclasses.replace(self.terms, divergence=None)
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "vocab_size": model.config.vocab_size,
            "only": only,
            "terms": terms,
            "teachers": teachers,
            "teacher_weights": batch.teacher_weights if teachers else None,
        }
        problem, pulled = (model.logits, hidden, tokens, segments), None
        if cotangents is None:
            stats = token_stats(*problem, **given)
        else:
            own_part = {name: ct for name, ct in cotangents.items() if name not in others}
            pulled, stats = pulled_stats(*problem, cotangents=own_part, **given)
            pulled += sum(jnp.sum(x * cotangents[name]) for name, x in others.items() if name in cotangents)
        return Passed(replace(stats, **others), None if routing is None else routing.stats, pulled)

    def _noise(self, keys: Array, segments: Array) -> Float[Array, "B T D"]:
        """Of NEFTune: the shorter a sequence, the more of it."""
        shape = (segments.shape[1], self.student.model.config.embed_dim)
        lengths = to_tokens(sequence_sums(jnp.ones(segments.shape), segments), segments)
        scale = self.noise_alpha / jnp.sqrt(jnp.maximum(lengths, 1.0) * shape[1])
        return jax.vmap(lambda key: jax.random.uniform(key, shape, minval=-1.0, maxval=1.0))(keys) * scale[..., None]

    def loss_output(
        self,
        weights: Weights,
        batch: Batch,
        taught: list[Weights],
        loss: AnyLoss,
        keys: Keys | None = None,
        cotangents: Mapping[str, Array] | None = None,
        *,
        backward: bool = False,
    ) -> tuple[LossOutput, Passed]:
        passed = self.forward(weights, batch, taught, keys, cotangents, backward=backward)
        output = loss(passed.stats, batch)
        if passed.routers is None:
            return output, passed
        metrics = {**output.metrics, **router_means(passed.routers, num_tokens(batch))}
        return LossOutput(loss=output.loss, metrics=metrics), passed

    def gradients(
        self,
        params: Weights,
        frozen: Weights,
        taught: list[Weights],
        router_weight: Array,
        inputs: tuple[Batch, Keys],
        count: Array,
    ) -> tuple[Weights, tuple[LossOutput, RouterStats | None]]:
        """Of all micro-batches. A loss over the whole batch takes another forward pass where there are several."""
        gradient_of = functools.partial(self._gradient, params, frozen, taught, router_weight)
        if not self.needs_whole_batch or num_micro(inputs) == 1:
            return sum_over(lambda one: gradient_of(one, self.loss), inputs, count)
        stats = stack_over(lambda one: self.forward({**frozen, **params}, one[0], taught, one[1]).stats, inputs, count)

        def whole(stats: Any) -> tuple[Array, LossOutput]:
            output = self.loss(as_one(stats), as_one(inputs[0]))
            return jnp.asarray(output.loss.total), output

        cotangents, output = jax.grad(whole, has_aux=True)(stats)
        gradient, (of_routers, routers) = sum_over(
            lambda one: gradient_of(one[0], Pulled(one[1])), (inputs, cotangents), count
        )
        metrics = {**output.metrics, **of_routers.metrics}
        return gradient, (LossOutput(loss=output.loss, metrics=metrics), routers)

    def _gradient(
        self,
        params: Weights,
        frozen: Weights,
        taught: list[Weights],
        router_weight: Array,
        inputs: tuple[Batch, Keys],
        loss: AnyLoss,
    ) -> tuple[Weights, tuple[LossOutput, RouterStats | None]]:
        def total(params: Weights) -> tuple[Array, tuple[LossOutput, RouterStats | None]]:
            weights = {**frozen, **params}
            output, passed = self.loss_output(weights, batch, taught, loss, keys, cotangents, backward=True)
            _, routers, pulled = passed
            value = jnp.asarray(output.loss.total if pulled is None else pulled)
            if self.router_loss is not None and routers is not None:
                value += router_weight * self.router_loss(routers)
            return value, (output, routers)

        batch, keys = inputs
        # The divergence of a group of tokens is of several chunks.
        cotangents = known_cotangents(loss, batch) if self.terms.unshared is None else None

        # With respect to float32 copies, so that what is added up over chunks and tokens is added up in float32.
        return jax.grad(total, has_aux=True)(jax.tree.map(lambda p: p.astype(jnp.float32), params))

    def router_weight(self, micro: Batch, count: Array) -> Array:
        """What makes totals of the router's loss comparable to those of the loss: the quotient of their weights.

        Of the whole batch, and so before the first backward pass: then the gradient is exact for any split.
        """
        if self.router_loss is None:
            return jnp.zeros(())

        def weights(batch: Batch) -> tuple[Array, Array]:
            weight = weight_of(self.loss, batch, scores=self.student.model.config.scalar_head)
            return weight, num_tokens(batch) * len(self.student.model.config.mixtures)

        of_loss, of_router = sum_over(weights, micro, count)
        return jnp.where(of_router > 0, of_loss / jnp.maximum(of_router, 1.0), 0.0)


def known_cotangents(loss: AnyLoss, batch: Batch) -> dict[str, Array] | None:
    """The gradient of the loss by the statistics of tokens, by name; None where it depends on them."""
    if isinstance(loss, Pulled):
        given = loss.cotangents
        named = {name: getattr(given, name) for name in DIFFERENTIABLE} if isinstance(given, TokenStats) else {}
        return {name: ct for name, ct in named.items() if ct is not None} or None
    linear: object = loss
    if not isinstance(linear, LinearLoss):
        return None
    zeros = jnp.zeros(batch.shape, jnp.float32)
    nothing = TokenStats(**{field.name: zeros for field in dataclasses.fields(TokenStats)})
    gradient = jax.grad(lambda stats: jnp.asarray(loss(stats, batch).loss.total))(nothing)
    return {name: getattr(gradient, name) for name in linear.linear_in}


def num_tokens(batch: Batch) -> Float[Array, ""]:
    return jnp.sum(jnp.asarray(batch.segments) > 0, dtype=jnp.float32)
