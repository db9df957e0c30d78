"""Log-probabilities, entropies and distances to teachers in chunks: no array of size B x T x V, forward or backward.

Of each row the tokens that count are brought together first, so that of the others no logits are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Bool, Float, Int

from posttrain.batch import HostArray, TokenStats, TopK
from posttrain.kernels.logits.chunk_stats import INNER, PLAIN, Found, Part, Terms, chunk_gradient, chunk_stats
from posttrain.kernels.logits.chunks import Plan, along, chunk_length, of_tokens, plan_of, predicting
from posttrain.kernels.logits.spans import NAMED, SPAN_TERMS, check_groups, span_divergence
from posttrain.kernels.platform import platform_of

CONSTANTS = ("log_squares", "sampling_logps")
"""Statistics without a gradient."""

Head = Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]]


class Teacher(NamedTuple):
    """A teacher inside of the step: its head, and its hidden states of the same rows."""

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
) -> TokenStats:
    """Log-probability and entropy of every token under softmax(logits / temperature), in float32.

    The only place of the package that shifts: `hidden[:, t - 1]` predicts `tokens[:, t]`. Position 0, the first token
    of each sequence, padding and what is not in `only` get 0; the head works on no more than a chunk of the latter.
    `logits_of` is the model's head; the backward pass makes its logits anew. What teachers say has no gradient.
    """
    problem = _problem(
        logits_of, hidden, tokens, segments, temperature, vocab_size, only, terms, teachers, teacher_weights
    )
    return problem.statistics(_compute(problem.static, *problem.arguments), teachers, vocab_size)


def pulled_stats(
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
) -> tuple[Float[Array, ""], TokenStats]:
    """sum(statistics * cotangents) over the statistics that are named, and all of `token_stats` without a gradient.

    The gradient of the sum is made with its value, chunk by chunk: logits are computed once, and not once more in a
    backward pass. Twin: the gradient through `token_stats`. ValueError for a teacher of groups, whose divergence is of
    tokens in several chunks.
    """
    if terms.unshared is not None:
        raise ValueError("pulled_stats: of groups of tokens there is no gradient chunk by chunk; use token_stats")
    problem = _problem(
        logits_of, hidden, tokens, segments, temperature, vocab_size, only, terms, teachers, teacher_weights
    )
    # A chunk may hold contexts that do not count.
    counts = jnp.pad(problem.counts, ((0, 0), (1, 0)))
    given = {name: _gathered(jnp.where(counts, ct, 0.0), problem.plan) for name, ct in cotangents.items()}
    total, found = _pulled(problem.static, *problem.arguments, given)
    return total, problem.statistics(jax.lax.stop_gradient(found), teachers, vocab_size)


class _Problem(NamedTuple):
    static: _Static
    arguments: tuple[Any, ...]
    plan: Plan
    counts: Bool[Array, "B Tc"]

    def statistics(self, found: Found, teachers: Sequence[Teacher | TopK], vocab_size: int) -> TokenStats:
        constants = {name: jax.lax.stop_gradient(found[name]) for name in CONSTANTS if name in found}
        stats = {name: of_tokens(x, self.plan, self.counts) for name, x in {**found, **constants}.items()}
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
) -> _Problem:
    rows, length = tokens.shape
    chunk = chunk_length(rows, length, vocab_size)
    counts = predicting(segments, only)
    plan = plan_of(counts, chunk)
    pad = plan.order.shape[1] - (length - 1)
    weights = _weights(teachers, teacher_weights, terms)
    given = _Given(
        targets=_gathered(tokens, plan),
        hidden=[_context(t.hidden, pad) if isinstance(t, Teacher) else None for t in teachers],
        best=[None if isinstance(t, Teacher) else jax.tree.map(lambda x: _gathered(x, plan), t) for t in teachers],
        weights=None if weights is None else _gathered(weights, plan),
    )
    head, parameters = jax.closure_convert(
        logits_of, jax.ShapeDtypeStruct((rows, chunk, hidden.shape[2]), hidden.dtype)
    )
    heads = tuple(t.logits_of if isinstance(t, Teacher) else None for t in teachers)
    static = _Static(chunk, head, heads, temperature, terms)
    return _Problem(static, (_context(hidden, pad), tuple(parameters), plan, given), plan, counts)


def _gathered(x: Any, plan: Plan) -> Array:
    """Of the tokens that the contexts predict, in order of the plan."""
    pad = plan.order.shape[1] - (x.shape[1] - 1)
    return along(jnp.pad(x[:, 1:], ((0, 0), (0, pad), *((0, 0) for _ in x.shape[2:]))), plan.order)


def token_stats_reference(
    logits: Float[Array, "B T V"],
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    temperature: float,
) -> TokenStats:
    """The slow twin of `token_stats`: whole logits at once, textbook formulas, gradients by the library."""
    log_probs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32) / temperature, axis=-1)
    logps = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    pad = ((0, 0), (1, 0))
    return TokenStats(
        logps=jnp.pad(jnp.where(same, logps, 0.0), pad), entropy=jnp.pad(jnp.where(same, entropy, 0.0), pad)
    )


class _Given(NamedTuple):
    """What has no gradient: teachers' hidden states by context, all else in the order of the plan."""

    targets: Int[Array, "B T"]
    hidden: list[Array | None]
    best: list[TopK | None]
    weights: Float[Array, "B T N"] | None


class _Static(NamedTuple):
    chunk: int
    head: Callable[..., Array]
    """Of hidden states and the parameters that `jax.closure_convert` found."""
    teachers: tuple[Head | None, ...]
    temperature: float
    terms: Terms


def _weights(
    teachers: Sequence[Teacher | TopK], weights: Float[Array | HostArray, "B T N"] | None, terms: Terms
) -> Float[Array, "B T N"] | None:
    if (terms.divergence is None) != (not teachers):
        raise ValueError(f"token_stats: terms.divergence={terms.divergence} with {len(teachers)} teachers; give both")
    given = 1 if weights is None else weights.shape[2]
    if teachers and len(teachers) != given:
        raise ValueError(f"token_stats: {len(teachers)} teachers, but teacher_weights of {given}; give one for each")
    check_groups(teachers, terms.unshared)
    return None if weights is None else jnp.asarray(weights)


def _context(hidden: Float[Array, "B T D"], pad: int) -> Float[Array, "B Tp D"]:
    return jnp.pad(hidden[:, :-1], ((0, 0), (0, pad), (0, 0)))


def _part(static: _Static, plan: Plan, given: _Given, index: Array) -> Part:
    start = index * static.chunk

    def cut(x: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, start, static.chunk, axis=1)

    order = cut(plan.order)
    weights = None if given.weights is None else cut(given.weights)
    teachers: list[tuple[Array | TopK, Array | float]] = []
    for n, (head, hidden, best) in enumerate(zip(static.teachers, given.hidden, given.best, strict=True)):
        said: Any = jax.tree.map(cut, best)
        if head is not None and hidden is not None:
            said = head(along(hidden, order)).astype(jnp.float32)
        weight: Array | float = 1.0
        if weights is not None:
            weight = weights[..., n]
            # One that has no say may say anything, and 0 * NaN would reach the gradient.
            said = jax.tree.map(
                lambda x, w=weight: jnp.where(w.reshape(*w.shape, *(1,) * (x.ndim - 2)) > 0, x, 0), said
            )
        teachers.append((jax.lax.stop_gradient(said), weight))
    return Part(start, order, cut(given.targets), teachers)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compute(
    static: _Static, hidden: Float[Array, "B Tp D"], parameters: tuple[Array, ...], plan: Plan, given: _Given
) -> Found:
    return _outer(_computed(static, hidden, parameters, plan, given))


def _computed(
    static: _Static, hidden: Float[Array, "B Tp D"], parameters: tuple[Array, ...], plan: Plan, given: _Given
) -> Found:
    """All statistics in the order of the plan, with those that are `INNER`; 0 beyond the chunks that count."""

    def of_chunk(index: Array) -> tuple[Array, Found]:
        part = _part(static, plan, given, index)
        logits = static.head(along(hidden, part.order), *parameters).astype(jnp.float32)
        return part.start, chunk_stats(logits, part, static.temperature, static.terms)

    def body(index: Array, found: Found) -> Found:
        start, new = of_chunk(index)
        return _written(found, new, start)

    names = jax.eval_shape(of_chunk, jnp.int32(0))[1]
    return jax.lax.fori_loop(0, plan.num_chunks, body, {n: jnp.zeros(plan.order.shape, jnp.float32) for n in names})


def _compute_forward(static: _Static, *arguments: Any) -> tuple[Found, Any]:
    values, trained, frozen = _partition(arguments)
    hidden, _, plan, given = values
    found = _computed(static, *values)
    saved = {name: found[name] for name in (*INNER, "entropy")}
    return _outer(found), (hidden, trained, frozen, plan, given, saved)


def _compute_backward(static: _Static, residuals: Any, cotangents: Mapping[str, Any]) -> tuple[Any, ...]:
    hidden, trained, frozen, plan, given, saved = residuals
    known = {name: ct for name, ct in cotangents.items() if not isinstance(ct, SymbolicZero)}

    def body(index: Array, sums: _Sums) -> _Sums:
        part = _part(static, plan, given, index)
        logits, pull = _with_pull(static, along(hidden, part.order), trained, frozen)
        known_of, saved_of = _cut((known, saved), part)
        return sums.plus(part, pull(chunk_gradient(logits, part, static.temperature, static.terms, known_of, saved_of)))

    sums = jax.lax.fori_loop(0, plan.num_chunks, body, _Sums.zeros(hidden, trained))
    return along(sums.hidden, plan.back), tuple(sums.of_parameters(trained)), None, None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pulled(
    static: _Static,
    hidden: Float[Array, "B Tp D"],
    parameters: tuple[Array, ...],
    plan: Plan,
    given: _Given,
    cotangents: Mapping[str, Array],
) -> tuple[Array, Found]:
    found = _compute(static, hidden, parameters, plan, given)
    return _inner(found, cotangents), found


def _pulled_forward(static: _Static, *arguments: Any) -> tuple[tuple[Array, Found], Any]:
    (hidden, _, plan, given, cotangents), trained, frozen = _partition(arguments)

    def of_chunk(index: Array) -> tuple[Part, Found, Any]:
        part = _part(static, plan, given, index)
        logits, pull = _with_pull(static, along(hidden, part.order), trained, frozen)
        new = chunk_stats(logits, part, static.temperature, static.terms)
        gradient = chunk_gradient(logits, part, static.temperature, static.terms, _cut(cotangents, part), new)
        return part, _outer(new), pull(gradient)

    def body(index: Array, carry: tuple[Found, _Sums]) -> tuple[Found, _Sums]:
        part, new, pulls = of_chunk(index)
        return _written(carry[0], new, part.start), carry[1].plus(part, pulls)

    names = jax.eval_shape(lambda index: of_chunk(index)[1], jnp.int32(0))
    start = ({name: jnp.zeros(plan.order.shape, jnp.float32) for name in names}, _Sums.zeros(hidden, trained))
    found, sums = jax.lax.fori_loop(0, plan.num_chunks, body, start)
    of_parameters = sums.of_parameters(trained)
    return (_inner(found, cotangents), found), (along(sums.hidden, plan.back), of_parameters)


def _pulled_backward(static: _Static, residuals: Any, cotangents: tuple[Array | SymbolicZero, Any]) -> tuple[Any, ...]:
    """The statistics are cut off by `pulled_stats`: only the sum has a cotangent."""
    factor = jnp.zeros(()) if isinstance(cotangents[0], SymbolicZero) else cotangents[0]
    of_hidden, of_parameters = jax.tree.map(lambda x: x * factor.astype(x.dtype), residuals)
    return of_hidden, tuple(of_parameters), None, None, None


class _Sums(NamedTuple):
    """Gradients so far."""

    hidden: Float[Array, "B Tp D"]
    """In the order of the plan."""
    parameters: list[Array | None]

    @classmethod
    def zeros(cls, hidden: Array, trained: list[Array | None]) -> _Sums:
        return cls(jnp.zeros_like(hidden), jax.tree.map(lambda x: jnp.zeros_like(_lying(x)), trained))

    def plus(self, part: Part, pulls: tuple[Array, list[Array | None]]) -> _Sums:
        of_hidden = jax.lax.dynamic_update_slice_in_dim(self.hidden, pulls[0], part.start, axis=1)
        return _Sums(of_hidden, jax.tree.map(lambda x, new: x + _lying(new), self.parameters, pulls[1]))

    def of_parameters(self, trained: list[Array | None]) -> list[Array | None]:
        return jax.tree.map(lambda x, like: x if x.shape == like.shape else x.T, self.parameters, trained)


def _lying(x: Array) -> Array:
    """A table of tokens as XLA:CPU adds up its gradient: by the product whose first operand is the narrow one."""
    tall = x.ndim == 2 and x.shape[0] > x.shape[1]
    return x.T if tall and platform_of(None) == "cpu" else x


def _partition(arguments: Any) -> tuple[Any, list[Array | None], list[Array | None]]:
    """Values; and of the head's parameters those that are trained, and the others.

    Most of a frozen model's parameters get no gradient; to add one up would cost as much as to use it.
    """
    values = jax.tree.map(lambda leaf: leaf.value, arguments, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    trained = [p.value if p.perturbed else None for p in arguments[1]]
    return values, trained, [None if p.perturbed else p.value for p in arguments[1]]


def _with_pull(
    static: _Static, hidden: Float[Array, "B C D"], trained: list[Array | None], frozen: list[Array | None]
) -> tuple[Float[Array, "B C V"], Callable[[Array], tuple[Array, list[Array | None]]]]:
    def head(x: Array, trained: list[Array | None]) -> Array:
        parameters = [f if t is None else t for t, f in zip(trained, frozen, strict=True)]
        return static.head(x, *parameters).astype(jnp.float32)

    return jax.vjp(head, hidden, trained)


def _cut(tree: Any, part: Part) -> Any:
    size = part.order.shape[1]
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, part.start, size, axis=1), tree)


def _written(found: Found, new: Found, start: Array) -> Found:
    return {name: jax.lax.dynamic_update_slice_in_dim(x, new[name], start, axis=1) for name, x in found.items()}


def _outer(found: Found) -> Found:
    return {name: x for name, x in found.items() if name not in INNER}


def _inner(found: Found, cotangents: Mapping[str, Array]) -> Array:
    """sum(found * cotangents). Where a cotangent is 0 nothing counts, whatever was found."""
    return sum((jnp.sum(jnp.where(ct != 0, found[name] * ct, 0.0)) for name, ct in cotangents.items()), jnp.zeros(()))


_compute.defvjp(_compute_forward, _compute_backward, symbolic_zeros=True)
_pulled.defvjp(_pulled_forward, _pulled_backward, symbolic_zeros=True)
