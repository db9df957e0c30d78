"""Token statistics in chunks: log-probabilities, entropies, divergences and top-k, without a B x T x V array."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from posttrain.batch import HostArray, TokenStats, TopK
from posttrain.kernels.logits.chunk_stats import INNER, PLAIN, Chunk, Stats, Terms, chunk_gradient, chunk_stats
from posttrain.kernels.logits.divergence import NAMED, SPAN_TERMS, check_token_groups, span_divergence
from posttrain.kernels.logits.layout import (
    ChunkPlan,
    HeadFunction,
    Parameters,
    VocabSharding,
    chunk_length,
    chunk_plan,
    head_function,
    predicting,
    scatter_to_tokens,
    take_tokens,
)
from posttrain.kernels.logits.softmax import NO_LOGIT
from posttrain.kernels.platform import platform_of

CONSTANTS = ("log_squares", "sampling_logps")
"""Statistics without a gradient."""

Head = Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]]


class Teacher(NamedTuple):
    """In-step teacher: its head, and its hidden states of the same rows."""

    logits_of: Head
    hidden: Float[Array, "B T D"]


def token_stats(
    logits_of: Head,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array | HostArray, "B T"],
    segments: Int[Array | HostArray, "B T"],
    *,
    temperature: float,
    vocab_size: int,
    only: Bool[Array, "B T"] | None = None,
    terms: Terms = PLAIN,
    teachers: Sequence[Teacher | TopK] = (),
    teacher_weights: Float[Array | HostArray, "B T N"] | None = None,
    mesh: Mesh | None = None,
) -> TokenStats:
    """Log-probability and entropy of every token under softmax(logits / temperature), in float32.

    The only place that shifts targets: `hidden[:, t - 1]` predicts `tokens[:, t]`. Position 0, the first token of each
    sequence, padding and tokens outside `only` get 0; the head runs on at most one chunk of the others at a time.
    `logits_of` is the model's head; the backward pass recomputes its logits. Teacher outputs have no gradient.
    """
    problem = _problem(
        logits_of, hidden, tokens, segments, temperature, vocab_size, only, terms, teachers, teacher_weights, mesh
    )
    return problem.statistics(_compute(problem.static, *problem.arguments), teachers, vocab_size)


def stats_vjp(
    logits_of: Head,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array | HostArray, "B T"],
    segments: Int[Array | HostArray, "B T"],
    *,
    cotangents: Mapping[str, Float[Array, "B T"]],
    temperature: float,
    vocab_size: int,
    only: Bool[Array, "B T"] | None = None,
    terms: Terms = PLAIN,
    teachers: Sequence[Teacher | TopK] = (),
    teacher_weights: Float[Array | HostArray, "B T N"] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], TokenStats]:
    """sum(statistics * cotangents) over the named statistics, and all of `token_stats` without a gradient.

    The gradient of the sum is computed with its value, chunk by chunk: logits are computed once, not again in a
    backward pass. Reference: the gradient through `token_stats`. Raises ValueError for a teacher with token groups,
    whose divergence spans chunks.
    """
    if terms.unshared is not None:
        raise ValueError("stats_vjp: token groups have no per-chunk gradient; use token_stats")
    problem = _problem(
        logits_of, hidden, tokens, segments, temperature, vocab_size, only, terms, teachers, teacher_weights, mesh
    )
    # A chunk may hold contexts without a target.
    counts = jnp.pad(problem.counts, ((0, 0), (1, 0)))
    ordered = {name: _in_plan_order(jnp.where(counts, ct, 0.0), problem.plan) for name, ct in cotangents.items()}
    total, stats = _stats_vjp(problem.static, *problem.arguments, ordered)
    return total, problem.statistics(jax.lax.stop_gradient(stats), teachers, vocab_size)


class _Problem(NamedTuple):
    static: _Static
    arguments: tuple[Any, ...]
    plan: ChunkPlan
    counts: Bool[Array, "B Tc"]

    def statistics(self, stats: Stats, teachers: Sequence[Teacher | TopK], vocab_size: int) -> TokenStats:
        constants = {name: jax.lax.stop_gradient(stats[name]) for name in CONSTANTS if name in stats}
        stats = {name: scatter_to_tokens(x, self.plan, self.counts) for name, x in {**stats, **constants}.items()}
        kind = self.static.terms.divergence
        if NAMED in stats and kind is not None and isinstance(teachers[0], TopK):
            stats |= span_divergence(stats, teachers[0], kind.beta, vocab_size)
        return TokenStats(**{name: x for name, x in stats.items() if name not in SPAN_TERMS})


def _problem(
    logits_of: Head,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array | HostArray, "B T"],
    segments: Int[Array | HostArray, "B T"],
    temperature: float,
    vocab_size: int,
    only: Bool[Array, "B T"] | None,
    terms: Terms,
    teachers: Sequence[Teacher | TopK],
    teacher_weights: Float[Array | HostArray, "B T N"] | None,
    mesh: Mesh | None,
) -> _Problem:
    rows, length = tokens.shape
    sharding = VocabSharding.of(mesh)
    chunk = chunk_length(rows, length, vocab_size, sharding)
    counts = predicting(segments, only)
    plan = chunk_plan(counts, chunk)
    pad = plan.order.shape[1] - (length - 1)
    weights = _weights(teachers, teacher_weights, terms)
    constants = _Constants(
        targets=_in_plan_order(tokens, plan),
        hidden=[_context(t.hidden, pad) if isinstance(t, Teacher) else None for t in teachers],
        best=[None if isinstance(t, Teacher) else jax.tree.map(lambda x: _in_plan_order(x, plan), t) for t in teachers],
        weights=None if weights is None else _in_plan_order(weights, plan),
    )

    def head_of(logits_of: Head, hidden: Array) -> tuple[HeadFunction, tuple[Array, ...]]:
        return head_function(logits_of, jax.ShapeDtypeStruct((rows, chunk, hidden.shape[2]), hidden.dtype), sharding)

    def teacher_head(teacher: Teacher) -> Head:
        head, parameters = head_of(*teacher)
        return lambda hidden: head.logits(hidden, parameters)

    head, parameters = head_of(logits_of, hidden)
    heads = tuple(teacher_head(t) if isinstance(t, Teacher) else None for t in teachers)
    static = _Static(chunk, head, heads, temperature, terms)
    return _Problem(static, (_context(hidden, pad), parameters, plan, constants), plan, counts)


def _in_plan_order(x: Any, plan: ChunkPlan) -> Array:
    """Values at the tokens that the contexts predict, in plan order."""
    pad = plan.order.shape[1] - (x.shape[1] - 1)
    return take_tokens(jnp.pad(x[:, 1:], ((0, 0), (0, pad), *((0, 0) for _ in x.shape[2:]))), plan.order)


class _Constants(NamedTuple):
    """Inputs without a gradient: teachers' hidden states by context, everything else in plan order."""

    targets: Int[Array, "B T"]
    hidden: list[Array | None]
    best: list[TopK | None]
    weights: Float[Array, "B T N"] | None


class _Static(NamedTuple):
    chunk: int
    head: HeadFunction
    teachers: tuple[Head | None, ...]
    temperature: float
    terms: Terms


def _weights(
    teachers: Sequence[Teacher | TopK], weights: Float[Array | HostArray, "B T N"] | None, terms: Terms
) -> Float[Array, "B T N"] | None:
    if (terms.divergence is None) != (not teachers):
        raise ValueError(f"token_stats: terms.divergence={terms.divergence} with {len(teachers)} teachers; give both")
    num_weights = 1 if weights is None else weights.shape[2]
    if teachers and len(teachers) != num_weights:
        raise ValueError(
            f"token_stats: {len(teachers)} teachers, but teacher_weights of {num_weights}; give one for each"
        )
    if teachers:
        check_token_groups(teachers, terms.unshared)
    return None if weights is None else jnp.asarray(weights)


def _context(hidden: Float[Array, "B T D"], pad: int) -> Float[Array, "B Tp D"]:
    return jnp.pad(hidden[:, :-1], ((0, 0), (0, pad), (0, 0)))


def _chunk(static: _Static, plan: ChunkPlan, constants: _Constants, index: Array) -> Chunk:
    start, sharding = index * static.chunk, static.head.sharding

    def cut(x: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, start, static.chunk, axis=1)

    def gathered(x: Array) -> Array:
        return sharding.gathered(cut(x))

    order = cut(plan.order)
    weights = None if constants.weights is None else gathered(constants.weights)
    teachers: list[tuple[Array | TopK, Array | float]] = []
    for n, (head, hidden, best) in enumerate(zip(static.teachers, constants.hidden, constants.best, strict=True)):
        outputs: Any = jax.tree.map(gathered, best)
        if head is not None and hidden is not None:
            outputs = head(sharding.gathered(take_tokens(hidden, order)))
        weight: Array | float = 1.0
        if weights is not None:
            weight = weights[..., n]
            # A teacher with weight 0 may return NaN; mask it before multiplying.
            outputs = jax.tree.map(
                lambda x, w=weight: jnp.where(w.reshape(*w.shape, *(1,) * (x.ndim - 2)) > 0, x, 0), outputs
            )
        teachers.append((jax.lax.stop_gradient(outputs), weight))
    return Chunk(start, order, gathered(constants.targets), teachers, sharding)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compute(
    static: _Static,
    hidden: Float[Array, "B Tp D"],
    parameters: tuple[Array, ...],
    plan: ChunkPlan,
    constants: _Constants,
) -> Stats:
    return _outer(_computed(static, hidden, parameters, plan, constants))


def _computed(
    static: _Static,
    hidden: Float[Array, "B Tp D"],
    parameters: tuple[Array, ...],
    plan: ChunkPlan,
    constants: _Constants,
) -> Stats:
    """All statistics in plan order, with the `INNER` terms; 0 beyond the computed chunks."""

    def chunk_result(index: Array) -> tuple[Chunk, Stats]:
        chunk = _chunk(static, plan, constants, index)
        logits = static.head.logits(_gathered(static, hidden, chunk), parameters)
        return chunk, chunk_stats(logits, chunk, static.temperature, static.terms)

    def body(index: Array, stats: Stats) -> Stats:
        chunk, new = chunk_result(index)
        return _written(stats, new, chunk)

    names = jax.eval_shape(lambda index: chunk_result(index)[1], jnp.int32(0))
    return jax.lax.fori_loop(0, plan.num_chunks, body, {n: jnp.zeros(plan.order.shape, jnp.float32) for n in names})


def _compute_forward(static: _Static, *arguments: Any) -> tuple[Stats, Any]:
    values, trained, frozen = _partition(arguments)
    hidden, _, plan, constants = values
    stats = _computed(static, *values)
    saved = {name: stats[name] for name in (*INNER, "entropy")}
    return _outer(stats), (hidden, trained, frozen, plan, constants, saved)


def _compute_backward(static: _Static, residuals: Any, cotangents: Mapping[str, Any]) -> tuple[Any, ...]:
    hidden, trained, frozen, plan, constants, saved = residuals
    trained = static.head.by_group(trained)
    known = {name: ct for name, ct in cotangents.items() if not isinstance(ct, SymbolicZero)}

    def body(index: Array, sums: _Sums) -> _Sums:
        chunk = _chunk(static, plan, constants, index)
        logits, vjp = _logits_and_vjp(static, _gathered(static, hidden, chunk), trained, frozen)
        known_of, saved_of = _cut((known, saved), chunk)
        gradient = chunk_gradient(logits, chunk, static.temperature, static.terms, known_of, saved_of)
        return sums.plus(static.head, chunk, vjp(gradient))

    sums = jax.lax.fori_loop(0, plan.num_chunks, body, _Sums.zeros(static.head, hidden, trained))
    return take_tokens(sums.hidden, plan.back), tuple(sums.parameter_gradients(static.head, trained)), None, None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stats_vjp(
    static: _Static,
    hidden: Float[Array, "B Tp D"],
    parameters: tuple[Array, ...],
    plan: ChunkPlan,
    constants: _Constants,
    cotangents: Mapping[str, Array],
) -> tuple[Array, Stats]:
    stats = _compute(static, hidden, parameters, plan, constants)
    return _inner(stats, cotangents), stats


def _stats_vjp_forward(static: _Static, *arguments: Any) -> tuple[tuple[Array, Stats], Any]:
    (hidden, _, plan, constants, cotangents), trained, frozen = _partition(arguments)
    trained = static.head.by_group(trained)

    def chunk_result(index: Array) -> tuple[Chunk, Stats, Any]:
        chunk = _chunk(static, plan, constants, index)
        logits, vjp = _logits_and_vjp(static, _gathered(static, hidden, chunk), trained, frozen)
        new = chunk_stats(logits, chunk, static.temperature, static.terms)
        gradient = chunk_gradient(logits, chunk, static.temperature, static.terms, _cut(cotangents, chunk), new)
        return chunk, _outer(new), vjp(gradient)

    def body(index: Array, carry: tuple[Stats, _Sums]) -> tuple[Stats, _Sums]:
        chunk, new, gradients = chunk_result(index)
        return _written(carry[0], new, chunk), carry[1].plus(static.head, chunk, gradients)

    names = jax.eval_shape(lambda index: chunk_result(index)[1], jnp.int32(0))
    zeros = {name: jnp.zeros(plan.order.shape, jnp.float32) for name in names}
    start = (zeros, _Sums.zeros(static.head, hidden, trained))
    stats, sums = jax.lax.fori_loop(0, plan.num_chunks, body, start)
    parameter_gradients = sums.parameter_gradients(static.head, trained)
    return (_inner(stats, cotangents), stats), (take_tokens(sums.hidden, plan.back), parameter_gradients)


def _stats_vjp_backward(
    static: _Static, residuals: Any, cotangents: tuple[Array | SymbolicZero, Any]
) -> tuple[Any, ...]:
    """Backward pass: only the sum has a cotangent, since `stats_vjp` stops the gradient of the statistics."""
    factor = jnp.zeros(()) if isinstance(cotangents[0], SymbolicZero) else cotangents[0]
    hidden_gradient, parameter_gradients = jax.tree.map(lambda x: x * factor.astype(x.dtype), residuals)
    return hidden_gradient, tuple(parameter_gradients), None, None, None


class _Sums(NamedTuple):
    """Accumulated gradients."""

    hidden: Float[Array, "B Tp D"]
    """Gradient by hidden states, in plan order."""
    parameters: Parameters

    @classmethod
    def zeros(cls, head: HeadFunction, hidden: Array, trained: Parameters) -> _Sums:
        return cls(jnp.zeros_like(hidden), _summed(head, jax.tree.map(jnp.zeros_like, trained)))

    def plus(self, head: HeadFunction, chunk: Chunk, gradients: tuple[Array, Parameters]) -> _Sums:
        new = head.sharding.rows(gradients[0])
        return _Sums(
            jax.lax.dynamic_update_slice_in_dim(self.hidden, new, chunk.start, axis=1),
            head.laid_out(jax.tree.map(jnp.add, self.parameters, _summed(head, gradients[1]))),
        )

    def parameter_gradients(self, head: HeadFunction, trained: Parameters) -> Parameters:
        if head.sharding.splits:
            return head.over_groups(self.parameters)
        return jax.tree.map(lambda x, like: x if x.shape == like.shape else x.T, self.parameters, trained)


def _summed(head: HeadFunction, gradients: Parameters) -> Parameters:
    """Parameter gradients in the layout of their sums."""
    if head.sharding.splits or platform_of(head.sharding.mesh) != "cpu":
        return head.laid_out(gradients)
    return jax.tree.map(_narrow_first, gradients)


def _narrow_first(x: Array) -> Array:
    """Transpose a tall token table: XLA:CPU accumulates its gradient fastest with the narrow operand first."""
    return x.T if x.ndim == 2 and x.shape[0] > x.shape[1] else x


def _partition(arguments: Any) -> tuple[Any, Parameters, Parameters]:
    """Argument values; the head's trained parameters; its frozen parameters.

    Frozen parameters get no gradient: accumulating one would cost as much as the head itself.
    """
    values = jax.tree.map(lambda leaf: leaf.value, arguments, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    trained = [p.value if p.perturbed else None for p in arguments[1]]
    return values, trained, [None if p.perturbed else p.value for p in arguments[1]]


def _gathered(static: _Static, hidden: Float[Array, "B Tp D"], chunk: Chunk) -> Float[Array, "B C D"]:
    return static.head.sharding.gathered(take_tokens(hidden, chunk.order))


def _logits_and_vjp(
    static: _Static, hidden: Float[Array, "B C D"], trained: Parameters, frozen: Parameters
) -> tuple[Float[Array, "B C V"], Callable[[Array], tuple[Array, Parameters]]]:
    """Logits and their vjp. `trained`: parameters per group, for gradients that are summed over groups only once."""

    def logits(x: Array, trained: Parameters) -> Array:
        parameters = [f if t is None else t for t, f in zip(trained, frozen, strict=True)]
        return static.head.logits(x, parameters, [t is not None for t in trained])

    return jax.vjp(logits, hidden, trained)


def _cut(tree: Any, chunk: Chunk) -> Any:
    size = chunk.order.shape[1]
    parts = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, chunk.start, size, axis=1), tree)
    return jax.tree.map(chunk.sharding.gathered, parts)


def _written(stats: Stats, new: Stats, chunk: Chunk) -> Stats:
    rows = {name: chunk.sharding.rows(new[name]) for name in stats}
    return {n: jax.lax.dynamic_update_slice_in_dim(x, rows[n], chunk.start, axis=1) for n, x in stats.items()}


def _outer(stats: Stats) -> Stats:
    return {name: x for name, x in stats.items() if name not in INNER}


def _inner(stats: Stats, cotangents: Mapping[str, Array]) -> Array:
    """sum(stats * cotangents), skipping entries with cotangent 0 even if they are not finite."""
    return sum((jnp.sum(jnp.where(ct != 0, stats[name] * ct, 0.0)) for name, ct in cotangents.items()), jnp.zeros(()))


_compute.defvjp(_compute_forward, _compute_backward, symbolic_zeros=True)
_stats_vjp.defvjp(_stats_vjp_forward, _stats_vjp_backward, symbolic_zeros=True)


def top_k(
    logits_of: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]],
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    *,
    k: int,
    temperature: float,
    vocab_size: int,
    only: Bool[Array, "B T"] | None = None,
    mesh: Mesh | None = None,
) -> TopK:
    """Top-k of the distribution of each token; zeros for the first token of a row and tokens outside `only`.

    `temperature`: of `scaled_tail`, that of the divergence that the result is used for. The head runs on at most one
    chunk of the tokens in `only` at a time.
    """
    rows, length = tokens.shape
    sharding = VocabSharding.of(mesh)
    chunk = chunk_length(rows, length, vocab_size, sharding)
    counts = jnp.ones((rows, length - 1), bool) if only is None else jnp.asarray(only[:, 1:])
    plan = chunk_plan(counts, chunk)
    pad = plan.order.shape[1] - (length - 1)
    contexts, targets = (
        jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2))) for x in (hidden[:, :-1], tokens[:, 1:])
    )

    shape = jax.ShapeDtypeStruct((rows, chunk, hidden.shape[2]), hidden.dtype)
    head, parameters = head_function(logits_of, shape, sharding)

    def chunk_top_k(index: Array) -> TopK:
        order = jax.lax.dynamic_slice_in_dim(plan.order, index * chunk, chunk, axis=1)
        logits = head.logits(sharding.gathered(take_tokens(contexts, order)), parameters)
        return _best(logits, sharding.gathered(take_tokens(targets, order)), k, temperature, sharding)

    def body(index: Array, result: TopK) -> TopK:
        def write(total: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(total, sharding.rows(new), index * chunk, axis=1)

        return jax.tree.map(write, result, chunk_top_k(index))

    shapes = jax.eval_shape(chunk_top_k, jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros((rows, plan.order.shape[1], *s.shape[2:]), s.dtype), shapes)
    result = jax.lax.fori_loop(0, plan.num_chunks, body, zeros)
    return jax.tree.map(lambda x: scatter_to_tokens(x, plan, counts), result)


def _best(
    logits: Float[Array, "B C V"], targets: Int[Array, "B C"], k: int, temperature: float, sharding: VocabSharding
) -> TopK:
    log_p = jax.nn.log_softmax(jnp.maximum(logits, NO_LOGIT), axis=-1)
    best, ids = sharding.top_k(log_p, k)
    rows, places = (x[..., None] for x in jnp.indices(targets.shape))
    others = log_p.at[rows, places, ids].set(NO_LOGIT)
    tail = jax.nn.logsumexp(others, axis=-1)
    return TopK(
        ids=ids,
        logps=best,
        tail=tail,
        scaled_tail=tail if temperature == 1.0 else jax.nn.logsumexp(others / temperature, axis=-1),
        token_logps=jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0],
    )
