"""Divergence of a student from a teacher on a chunk of logits: whole vocabulary, top-k, or groups of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.batch import TopK
from posttrain.kernels.logits.layout import ONE_DEVICE, VocabSharding
from posttrain.kernels.logits.softmax import NO_LOGIT, Softmax


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
        outcomes = _outcomes(sharding.equal_parts(jnp.maximum(logits, NO_LOGIT)), teacher, kind.temperature)
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
        outcomes = _outcomes(sharding.equal_parts(jnp.maximum(logits, NO_LOGIT)), teacher, kind.temperature)
        by_outcome = _logit_gradient(outcomes.log_s, outcomes.log_t, kind.beta)
        rows, places = (x[..., None] for x in jnp.indices(outcomes.ids.shape[:2]))
        gradient = jnp.exp(outcomes.others - outcomes.rest) * by_outcome[..., -1:]
        gradient = gradient.at[rows, places, outcomes.ids].set(by_outcome[..., :-1], mode="drop")
        gradient = gradient[..., : logits.shape[-1]]
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


# General Online Logit Distillation (GOLD) is in TRL, Universal Logit Distillation (ULD) is arXiv:2402.12030. Outcomes
# of a token group are the tokens in both vocabularies, one by one; the text of the group itself, whose log-probability
# is by the chain rule the sum over its tokens on either side; and everything else as one outcome. Outcomes are compared
# by `Divergence`; tokens of only one vocabulary by the L1 distance of their probabilities, sorted on both sides.
SPAN_TERMS = ("named", "named_kl", "left", "sorted")
NAMED, NAMED_KL, LEFT, SORTED = SPAN_TERMS
CERTAIN = -1e-6
"""Log-probability above which later tokens of a group leave no mass for other continuations."""


def check_token_groups(teachers: Sequence[Any], unshared: bytes | None) -> None:
    """Raises ValueError if one of at least one teacher has token groups without `unshared`, or is not the only one."""
    merged = [isinstance(teacher, TopK) and teacher.back is not None for teacher in teachers]
    if (any(merged) or unshared is not None) and (unshared is None or merged != [True]):
        raise ValueError("token_stats: token groups need exactly one teacher with groups, and terms.unshared")


def span_terms(
    logits: Float[Array, "B C V"],
    targets: Int[Array, "B C"],
    teacher_topk: TopK,
    beta: float,
    unshared: bytes,
    sharding: VocabSharding,
) -> dict[str, Float[Array, "B C"]]:
    """Logit-dependent terms of the divergence at the first token of each group; `span_divergence` adds the rest.

    `teacher_topk`: ids below the student's vocabulary are tokens of both vocabularies, none of them the group's first
    token; other ids are tokens of the teacher only, of which only the probability matters.
    """
    # Impossible ids of the student get no gradient.
    log_p = jax.nn.log_softmax(jnp.where(logits > NO_LOGIT, logits, NO_LOGIT), axis=-1)
    ids, vocab = jnp.asarray(teacher_topk.ids), logits.shape[-1]
    named, logps = ids < vocab, jnp.asarray(teacher_topk.logps)
    log_t = jnp.where(named, logps - _norm(teacher_topk, vocab)[..., None], NO_LOGIT)
    log_s = jnp.take_along_axis(log_p, ids, axis=-1, mode="fill", fill_value=NO_LOGIT)
    rows, places = (x[..., None] for x in jnp.indices(targets.shape))
    first = targets[..., None]
    others = log_p.at[rows, places, ids].set(NO_LOGIT, mode="drop").at[rows, places, first].set(NO_LOGIT)
    terms = {
        NAMED: jnp.sum(outcome_terms(log_s, log_t, beta), axis=-1),
        LEFT: jax.nn.logsumexp(others, axis=-1),
        SORTED: _sorted_distance(
            log_p, first, jnp.where(named, NO_LOGIT, logps), unpack_ids(unshared, vocab), sharding
        ),
    }
    if beta != 0:
        terms[NAMED_KL] = jnp.sum(outcome_terms(log_s, log_t, 0.0), axis=-1)
    return terms


def span_divergence(
    terms: Mapping[str, Float[Array, "B T"]], teacher_topk: TopK, beta: float, vocab_size: int
) -> dict[str, Float[Array, "B T"]]:
    """`divergence`, `teacher_kl`, `teacher_logps` and `sorted_distance` at the first token of each group, else 0.

    `terms`: outputs of `span_terms` with the student's `logps` of all tokens.
    """
    assert teacher_topk.back is not None
    back, logps = jnp.asarray(teacher_topk.back), terms["logps"]
    begins, norm = back == 0, _norm(teacher_topk, vocab_size)
    later, several = _sum_later(logps, back)
    span_s, span_t = logps + later, jnp.asarray(teacher_topk.token_logps) - norm
    # Continuations with the same first token but another ending belong to no named outcome.
    ends_otherwise = logps + jnp.log(-jnp.expm1(jnp.minimum(later, CERTAIN)))
    left = jnp.where(several & (later < CERTAIN), jnp.logaddexp(terms[LEFT], ends_otherwise), terms[LEFT])
    # If the student has no other outcome, the teacher's tail is rounding error.
    tail = jnp.where(left < NO_MASS, left, jnp.asarray(teacher_topk.tail) - norm)

    def total(named: Float[Array, "B T"], beta: float) -> Float[Array, "B T"]:
        return jnp.where(begins, named + outcome_terms(span_s, span_t, beta) + outcome_terms(left, tail, beta), 0.0)

    return {
        "divergence": total(terms[NAMED], beta),
        "teacher_kl": jax.lax.stop_gradient(total(terms[NAMED if beta == 0 else NAMED_KL], 0.0)),
        "teacher_logps": jnp.where(begins, teacher_topk.token_logps, 0.0),
        "sorted_distance": jnp.where(begins, terms[SORTED], 0.0),
    }


def pack_ids(ids: Bool[np.ndarray, " V"]) -> bytes:
    """Pack a mask over vocabulary ids into bytes, to be a static (hashable) argument."""
    return np.packbits(ids).tobytes()


def unpack_ids(ids: bytes, vocab_size: int) -> Bool[np.ndarray, " V"]:
    """Unpack a mask over ids; model rows without a token come after those with one."""
    known = np.unpackbits(np.frombuffer(ids, np.uint8)).astype(bool)[:vocab_size]
    return np.pad(known, (0, vocab_size - len(known)))


def _norm(teacher_topk: TopK, vocab_size: int) -> Float[Array, "*B"]:
    """Log-sum of the teacher's outcome probabilities: 0 up to rounding."""
    named = jnp.where(jnp.asarray(teacher_topk.ids) < vocab_size, teacher_topk.logps, NO_LOGIT)
    other = jnp.stack([jnp.asarray(teacher_topk.tail), jnp.asarray(teacher_topk.token_logps)], axis=-1)
    return jax.nn.logsumexp(jnp.concatenate([named, other], axis=-1), axis=-1)


def _sorted_distance(
    log_p: Float[Array, "B C V"],
    first: Int[Array, "B C 1"],
    teacher_logps: Float[Array, "B C K"],
    unshared: Bool[np.ndarray, " V"],
    sharding: VocabSharding,
) -> Float[Array, "B C"]:
    """L1 distance of sorted probabilities: teacher-only tokens against the most probable student-only tokens.

    The group's first token is excluded.
    """
    count, vocab = teacher_logps.shape[-1], log_p.shape[-1]
    if not unshared.any():
        student_probs = jnp.zeros_like(teacher_logps)
    else:
        student_only = jnp.asarray(unshared)[None, None] & (
            jax.lax.broadcasted_iota(first.dtype, log_p.shape, 2) != first
        )
        best, _ = sharding.top_k(jnp.where(student_only, log_p, NO_LOGIT), min(count, vocab))
        student_probs = jnp.exp(best)
        student_probs = jnp.pad(student_probs, ((0, 0), (0, 0), (0, count - student_probs.shape[-1])))
    return jnp.sum(jnp.abs(student_probs - jnp.exp(jax.lax.top_k(teacher_logps, count)[0])), axis=-1)


def _sum_later(logps: Float[Array, "B T"], back: Int[Array, "B T"]) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Sum of log-probabilities over later tokens of each group, at its first token; and a mask of groups with any."""
    length = back.shape[1]
    first = jnp.arange(length)[None] - jnp.maximum(back, 0)
    sums = jax.vmap(lambda x, at: jax.ops.segment_sum(x, at, num_segments=length))
    return sums(jnp.where(back > 0, logps, 0.0), first), sums(jnp.where(back > 0, 1.0, 0.0), first) > 0
