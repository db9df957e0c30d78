"""Divergence of a student's distribution from a teacher's on a chunk of logits: full vocabulary or teacher top-k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from posttrain.batch import TopK
from posttrain.kernels.logits.softmax import NO_LOGIT, Softmax
from posttrain.kernels.logits.vocab_sharding import ONE_DEVICE, VocabSharding


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Divergence of softmax(logits / temperature), teacher T and student S, in nats per token; arXiv:2306.13649 eq. 1.

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


NO_MASS = -1e20
"""Log-sum-exp threshold below which a sum contains impossible ids only."""

FORWARD_KL = Divergence(beta=0.0, temperature=1.0)


def divergence(
    logits: Float[Array, "B C V"],
    teacher: Float[Array, "B C W"] | TopK,
    kind: Divergence,
    sharding: VocabSharding = ONE_DEVICE,
) -> Float[Array, "B C"]:
    """Divergence between unscaled logits of student and teacher; a smaller vocabulary is padded with impossible ids.

    With a `TopK` teacher all other ids are one outcome: by the data-processing inequality the result is a lower bound,
    exact where the student distributes that mass as the teacher does.
    """
    if isinstance(teacher, TopK):
        outcomes = _outcomes(jnp.maximum(logits, NO_LOGIT), teacher, kind.temperature)
        return jnp.sum(outcome_terms(outcomes.log_s, outcomes.log_t, kind.beta), axis=-1)
    student, target = _softmaxes(logits, teacher, kind.temperature, sharding)
    if kind.beta == 0:
        return _kl(target, student)
    if kind.beta == 1:
        return _kl(student, target)
    return jnp.sum(outcome_terms(student.logs, target.logs, kind.beta), axis=-1)


def divergence_gradient(
    logits: Float[Array, "B C V"],
    teacher: Float[Array, "B C W"] | TopK,
    kind: Divergence,
    sharding: VocabSharding = ONE_DEVICE,
) -> Float[Array, "B C V"]:
    """Gradient of `divergence` by student logits: s (g - sum(s g)) / temperature with g = d divergence / d s.

    beta 0: s - t. Otherwise g = (1 - beta) log(s / m), with log(s / t) for beta 1. Ids outside the teacher's top-k
    share the gradient of their sum in proportion to the student's probabilities. Reference: autodiff of `divergence`.
    """
    if isinstance(teacher, TopK):
        outcomes = _outcomes(jnp.maximum(logits, NO_LOGIT), teacher, kind.temperature)
        by_outcome = _logit_gradient(outcomes.log_s, outcomes.log_t, kind.beta)
        rows, places = (x[..., None] for x in jnp.indices(outcomes.ids.shape[:2]))
        gradient = jnp.exp(outcomes.others - outcomes.rest) * by_outcome[..., -1:]
        gradient = gradient.at[rows, places, outcomes.ids].set(by_outcome[..., :-1], mode="drop")
    else:
        student, target = _softmaxes(logits, teacher, kind.temperature, sharding)
        if kind.beta == 0:
            gradient = student.probs - target.probs
        elif kind.beta == 1:
            gradient = student.probs * (student.logs - target.logs - _kl(student, target)[..., None])
        else:
            gradient = _logit_gradient(student.logs, target.logs, kind.beta)
    # Impossible ids of the student get no gradient.
    return jnp.where(logits > NO_LOGIT, gradient / kind.temperature, 0.0)


def token_logps(
    teacher: Float[Array, "B C W"] | TopK, targets: Int[Array, "B C"], sharding: VocabSharding = ONE_DEVICE
) -> Float[Array, "B C"]:
    """Teacher log-probability of the target tokens at temperature 1."""
    if isinstance(teacher, TopK):
        return jnp.asarray(teacher.token_logps)
    return Softmax.of(teacher, 1.0).log_of(sharding.chosen(teacher, targets))[..., 0]


def _kl(p: Softmax, q: Softmax) -> Float[Array, "B C"]:
    """KL(p || q) = sum(p log(p / q)) of two softmaxes of the same temperature."""
    relative = jnp.sum(p.exps * (p.centred - q.centred), axis=-1, keepdims=True) / p.temperature
    return (relative / p.norm - (p.log_norm - q.log_norm))[..., 0]


def outcome_terms(log_s: Float[Array, "*B"], log_t: Float[Array, "*B"], beta: float) -> Float[Array, "*B"]:
    """Contribution of each outcome to the divergence."""
    if beta == 0:
        return jnp.exp(log_t) * (log_t - log_s)
    if beta == 1:
        return jnp.exp(log_s) * (log_s - log_t)
    log_m = jnp.logaddexp(log_t + jnp.log(beta), log_s + jnp.log1p(-beta))
    return beta * jnp.exp(log_t) * (log_t - log_m) + (1 - beta) * jnp.exp(log_s) * (log_s - log_m)


def _logit_gradient(log_s: Float[Array, "B C V"], log_t: Float[Array, "B C V"], beta: float) -> Float[Array, "B C V"]:
    """Gradient of the divergence by the student's unnormalized log-probabilities."""
    s = jnp.exp(log_s)
    if beta == 0:
        return s - jnp.exp(log_t)
    if beta == 1:
        g = log_s - log_t
    else:
        g = (1 - beta) * (log_s - jnp.logaddexp(log_t + jnp.log(beta), log_s + jnp.log1p(-beta)))
    return s * (g - jnp.sum(s * g, axis=-1, keepdims=True))


def _softmaxes(
    logits: Float[Array, "B C V"], teacher: Float[Array, "B C W"], temperature: float, sharding: VocabSharding
) -> tuple[Softmax, Softmax]:
    """Softmaxes of student and teacher over the student's vocabulary; surplus rows of either hold no tokens."""
    resized = sharding.resized(teacher, logits.shape[-1])
    return Softmax.of(logits, temperature), Softmax.of(resized, temperature)


class _Outcomes(NamedTuple):
    """Log-probabilities of student and teacher: the teacher's top-k ids one by one, then all others as one outcome."""

    log_s: Float[Array, "B C K1"]
    log_t: Float[Array, "B C K1"]
    ids: Int[Array, "B C K"]
    others: Float[Array, "B C V"]
    """Student's scaled logits with the top-k ids masked."""
    rest: Float[Array, "B C 1"]
    """Log-sum-exp of `others`."""


def _outcomes(logits: Float[Array, "B C V"], teacher: TopK, temperature: float) -> _Outcomes:
    scaled, ids = logits / temperature, jnp.asarray(teacher.ids)
    best = jnp.take_along_axis(scaled, ids, axis=-1, mode="fill", fill_value=NO_LOGIT)
    rows, places = (x[..., None] for x in jnp.indices(ids.shape[:2]))
    # Log-sum-exp without the top-k ids: a difference of sums would cancel a small rest.
    others = scaled.at[rows, places, ids].set(NO_LOGIT, mode="drop")
    rest = jax.nn.logsumexp(others, axis=-1, keepdims=True)
    log_s = jnp.concatenate([best, rest], axis=-1) - jax.nn.logsumexp(scaled, axis=-1, keepdims=True)
    tail = jnp.asarray(teacher.tail if temperature == 1.0 else teacher.scaled_tail)[..., None]
    # If the top-k ids are the student's whole vocabulary, the teacher's tail is rounding error.
    tail = jnp.where(rest < NO_MASS, NO_LOGIT, tail)
    log_t = jnp.concatenate([teacher.logps / temperature, tail], axis=-1)
    return _Outcomes(log_s, jax.nn.log_softmax(log_t, axis=-1), ids, others, rest)
