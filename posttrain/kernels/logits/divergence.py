"""How far a student's distribution is from a teacher's, on a chunk of logits: whole, or from the teacher's best ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from posttrain.batch import TopK
from posttrain.kernels.logits.softmax import NO_LOGIT, Softmax


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Of softmax(logits / temperature) of teacher T and student S, per token in nats, arXiv:2306.13649 eq. 1.

    beta 0: KL(T || S), forward; beta 1: KL(S || T), reverse; between them, with M = beta T + (1 - beta) S,
    beta KL(T || M) + (1 - beta) KL(S || M). There is no factor temperature^2.
    """

    beta: float
    temperature: float

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"Divergence.beta={self.beta} must be from 0 (forward KL) to 1 (reverse KL)")
        if self.temperature <= 0:
            raise ValueError(f"Divergence.temperature={self.temperature} must be positive")


NOTHING_LEFT = -1e20
"""A sum of exponentials below exp of this one is of impossible ids only."""

FORWARD_KL = Divergence(beta=0.0, temperature=1.0)


def divergence(
    logits: Float[Array, "B C V"], teacher: Float[Array, "B C W"] | TopK, kind: Divergence
) -> Float[Array, "B C"]:
    """Between unscaled logits of the student and a teacher. A vocabulary with fewer rows is padded with impossible ids.

    Of a `TopK` the ids beyond the best are one outcome: by the data-processing inequality the result is a lower bound,
    and it is exact where the student divides that mass as the teacher does.
    """
    if isinstance(teacher, TopK):
        found = _outcomes(jnp.maximum(logits, NO_LOGIT), teacher, kind.temperature)
        return jnp.sum(outcome_terms(found.log_s, found.log_t, kind.beta), axis=-1)
    student, theirs = _both(logits, teacher, kind.temperature)
    if kind.beta == 0:
        return _kl(theirs, student)
    if kind.beta == 1:
        return _kl(student, theirs)
    return jnp.sum(outcome_terms(student.logs, theirs.logs, kind.beta), axis=-1)


def divergence_gradient(
    logits: Float[Array, "B C V"], teacher: Float[Array, "B C W"] | TopK, kind: Divergence
) -> Float[Array, "B C V"]:
    """Of `divergence` by the student's logits, s (g - sum(s g)) / temperature with g = d divergence / d s.

    beta 0: s - t. Else g = (1 - beta) log(s / m), with log(s / t) for beta 1. The ids beyond a teacher's best share the
    pull on their sum as the student divides it. Twin: the gradient of `divergence` by the library.
    """
    if isinstance(teacher, TopK):
        found = _outcomes(jnp.maximum(logits, NO_LOGIT), teacher, kind.temperature)
        pull = _pull(found.log_s, found.log_t, kind.beta)
        rows, places = (x[..., None] for x in jnp.indices(found.ids.shape[:2]))
        gradient = jnp.exp(found.others - found.rest) * pull[..., -1:]
        gradient = gradient.at[rows, places, found.ids].set(pull[..., :-1], mode="drop")
    else:
        student, theirs = _both(logits, teacher, kind.temperature)
        if kind.beta == 0:
            gradient = student.probs - theirs.probs
        elif kind.beta == 1:
            gradient = student.probs * (student.logs - theirs.logs - _kl(student, theirs)[..., None])
        else:
            gradient = _pull(student.logs, theirs.logs, kind.beta)
    # What is impossible for the student stays so.
    return jnp.where(logits > NO_LOGIT, gradient / kind.temperature, 0.0)


def token_logps(teacher: Float[Array, "B C W"] | TopK, targets: Int[Array, "B C"]) -> Float[Array, "B C"]:
    """The teacher's log-probability of the tokens themselves, at temperature 1."""
    if isinstance(teacher, TopK):
        return jnp.asarray(teacher.token_logps)
    chosen = jnp.take_along_axis(teacher, targets[..., None], axis=-1)
    return Softmax.of(teacher, 1.0).log_of(chosen)[..., 0]


def like_student(logits: Float[Array, "B C W"], vocab_size: int) -> Float[Array, "B C V"]:
    """A teacher's logits over the rows of the student's vocabulary; both families' surplus rows hold no tokens."""
    cut = logits[..., :vocab_size]
    missing = vocab_size - cut.shape[-1]
    return jnp.pad(cut, ((0, 0), (0, 0), (0, missing)), constant_values=NO_LOGIT) if missing else cut


def _kl(p: Softmax, q: Softmax) -> Float[Array, "B C"]:
    """sum(p log(p / q)), of two of the same temperature."""
    apart = jnp.sum(p.exps * (p.centred - q.centred), axis=-1, keepdims=True) / p.temperature
    return (apart / p.norm - (p.log_norm - q.log_norm))[..., 0]


def outcome_terms(log_s: Float[Array, "*B"], log_t: Float[Array, "*B"], beta: float) -> Float[Array, "*B"]:
    """What each outcome adds to the divergence."""
    if beta == 0:
        return jnp.exp(log_t) * (log_t - log_s)
    if beta == 1:
        return jnp.exp(log_s) * (log_s - log_t)
    log_m = jnp.logaddexp(log_t + jnp.log(beta), log_s + jnp.log1p(-beta))
    return beta * jnp.exp(log_t) * (log_t - log_m) + (1 - beta) * jnp.exp(log_s) * (log_s - log_m)


def _pull(log_s: Float[Array, "B C V"], log_t: Float[Array, "B C V"], beta: float) -> Float[Array, "B C V"]:
    """Gradient of the divergence by the logarithms of the student's unnormalised probabilities."""
    s = jnp.exp(log_s)
    if beta == 0:
        return s - jnp.exp(log_t)
    if beta == 1:
        g = log_s - log_t
    else:
        g = (1 - beta) * (log_s - jnp.logaddexp(log_t + jnp.log(beta), log_s + jnp.log1p(-beta)))
    return s * (g - jnp.sum(s * g, axis=-1, keepdims=True))


def _both(logits: Float[Array, "B C V"], teacher: Float[Array, "B C W"], temperature: float) -> tuple[Softmax, Softmax]:
    return Softmax.of(logits, temperature), Softmax.of(like_student(teacher, logits.shape[-1]), temperature)


class _Outcomes(NamedTuple):
    """Log-probabilities of student and teacher: the teacher's best ids one by one, then all others together."""

    log_s: Float[Array, "B C K1"]
    log_t: Float[Array, "B C K1"]
    ids: Int[Array, "B C K"]
    others: Float[Array, "B C V"]
    """The student's scaled logits without those ids."""
    rest: Float[Array, "B C 1"]
    """Log of the sum of their exponentials."""


def _outcomes(logits: Float[Array, "B C V"], teacher: TopK, temperature: float) -> _Outcomes:
    scaled, ids = logits / temperature, jnp.asarray(teacher.ids)
    best = jnp.take_along_axis(scaled, ids, axis=-1, mode="fill", fill_value=NO_LOGIT)
    rows, places = (x[..., None] for x in jnp.indices(ids.shape[:2]))
    # Summed without the best ids: a difference of sums would leave nothing of a small rest.
    others = scaled.at[rows, places, ids].set(NO_LOGIT, mode="drop")
    rest = jax.nn.logsumexp(others, axis=-1, keepdims=True)
    log_s = jnp.concatenate([best, rest], axis=-1) - jax.nn.logsumexp(scaled, axis=-1, keepdims=True)
    tail = jnp.asarray(teacher.tail if temperature == 1.0 else teacher.scaled_tail)[..., None]
    # Where the best ids are all that the student has, what was written of others is rounding.
    tail = jnp.where(rest < NOTHING_LEFT, NO_LOGIT, tail)
    log_t = jnp.concatenate([teacher.logps / temperature, tail], axis=-1)
    return _Outcomes(log_s, jax.nn.log_softmax(log_t, axis=-1), ids, others, rest)
