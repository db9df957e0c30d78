"""Token statistics of one chunk of logits, and their gradient with respect to the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.batch import TopK
from posttrain.kernels.logits.divergence import (
    FORWARD_KL,
    NAMED,
    Divergence,
    divergence,
    divergence_gradient,
    span_terms,
    token_logps,
)
from posttrain.kernels.logits.layout import VocabSharding
from posttrain.kernels.logits.softmax import Softmax


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Optional statistics beyond log-probability and entropy."""

    mean_over: int | None = None
    """Compute `mean_logps` over ids below this number (ids that have a token)."""
    squares: bool = False
    """Compute `log_squares`."""
    sampling_temperature: float | None = None
    """Compute `sampling_logps` at this temperature."""
    divergence: Divergence | None = None
    """Compute `divergence` to the teachers, with `teacher_kl` and `teacher_logps`."""
    unshared: bytes | None = None
    """Packed mask of student ids without a teacher token, for a cross-tokenizer teacher with merged token groups."""


PLAIN = Terms()

Stats = dict[str, Array]
INNER = TOP, NORM = "top", "norm"
"""Softmax terms saved with the statistics for the backward pass."""


class Chunk(NamedTuple):
    """Chunk of the plan: contexts, targets and teacher outputs."""

    start: Array
    order: Int[Array, "B C"]
    targets: Int[Array, "B C"]
    teachers: list[tuple[Array | TopK, Array | float]]
    """Unscaled teacher logits or top-k, with the teacher's weight."""
    sharding: VocabSharding


def chunk_stats(logits: Float[Array, "B C V"], chunk: Chunk, temperature: float, terms: Terms) -> Stats:
    own, chosen = Softmax.of(logits, temperature), chunk.sharding.chosen(logits, chunk.targets)
    relative, log_norm, norm = own.centred / temperature, own.log_norm[..., 0], own.norm[..., 0]
    stats = {
        "logps": own.log_of(chosen)[..., 0],
        "entropy": log_norm - jnp.sum(own.exps * relative, axis=-1) / norm,
        TOP: own.top[..., 0],
        NORM: norm,
    }
    if terms.mean_over is not None:
        known = _is_below(terms.mean_over, logits)
        stats["mean_logps"] = jnp.sum(jnp.where(known, relative, 0.0), axis=-1) / terms.mean_over - log_norm
    if terms.squares:
        stats["log_squares"] = jnp.log(jnp.sum(jnp.square(own.exps), axis=-1)) - 2 * log_norm
    if terms.sampling_temperature is not None:
        stats["sampling_logps"] = Softmax.of(logits, terms.sampling_temperature).log_of(chosen)[..., 0]
    if terms.unshared is not None and terms.divergence is not None:
        stats |= _span_terms(logits, chunk, terms)
    elif terms.divergence is not None:
        stats["divergence"] = _divergence(logits, chunk, terms.divergence)
        same = terms.divergence == FORWARD_KL
        stats["teacher_kl"] = stats["divergence"] if same else _divergence(logits, chunk, FORWARD_KL)
        stats["teacher_logps"] = _teacher_sum(
            chunk, lambda teacher: token_logps(teacher, chunk.targets, chunk.sharding)
        )
    return stats


def _span_terms(logits: Float[Array, "B C V"], chunk: Chunk, terms: Terms) -> Stats:
    ((teacher, _),) = chunk.teachers
    assert isinstance(teacher, TopK) and terms.divergence is not None and terms.unshared is not None
    return span_terms(logits, chunk.targets, teacher, terms.divergence.beta, terms.unshared, chunk.sharding)


def _divergence(logits: Float[Array, "B C V"], chunk: Chunk, kind: Divergence) -> Float[Array, "B C"]:
    return _teacher_sum(chunk, lambda teacher: divergence(logits, teacher, kind, chunk.sharding))


def _teacher_sum(chunk: Chunk, function: Callable[[Any], Float[Array, "B C"]]) -> Float[Array, "B C"]:
    """Weighted sum over teachers."""
    terms = [weight * function(teacher) for teacher, weight in chunk.teachers]
    return sum(terms[1:], terms[0])


def chunk_gradient(
    logits: Float[Array, "B C V"],
    chunk: Chunk,
    temperature: float,
    terms: Terms,
    cotangents: Mapping[str, Array],
    stats: Stats,
) -> Float[Array, "B C V"]:
    """Gradient of sum(statistics * cotangents) by the logits. Statistics without a cotangent cost nothing.

    `stats`: the entropy and the `INNER` terms of `chunk_stats`.
    """
    grad = jnp.zeros((1, 1, 1), jnp.float32)
    if not cotangents.keys().isdisjoint(("logps", "mean_logps", "entropy")):
        grad = _student_gradient(logits, chunk, temperature, terms, cotangents, stats)
    if NAMED in cotangents:
        group_terms, group_vjp = jax.vjp(lambda x: _span_terms(x, chunk, terms), logits)
        none = jax.tree.map(jnp.zeros_like, group_terms)
        grad += group_vjp({name: cotangents.get(name, zero) for name, zero in none.items()})[0]
    if "divergence" in cotangents:
        assert terms.divergence is not None
        for teacher, weight in chunk.teachers:
            gradient = divergence_gradient(logits, teacher, terms.divergence, chunk.sharding)
            grad += (weight * cotangents["divergence"])[..., None] * gradient
    return jnp.broadcast_to(grad, logits.shape)


def _student_gradient(
    logits: Float[Array, "B C V"],
    chunk: Chunk,
    temperature: float,
    terms: Terms,
    cotangents: Mapping[str, Array],
    stats: Stats,
) -> Float[Array, "B C V"]:
    """Gradient of the student's own statistics: d logp = onehot - p; d mean = 1/n - p over n ids; d entropy = -p (log p
    + entropy)."""
    zero = jnp.zeros((1, 1, 1), jnp.float32)
    d_logps, d_mean, d_entropy = (
        cotangents[name][..., None] if name in cotangents else zero for name in ("logps", "mean_logps", "entropy")
    )
    own = Softmax.with_norm(logits, temperature, stats[TOP][..., None], stats[NORM][..., None])
    probs = own.probs
    onehot = chunk.targets[..., None] == jax.lax.broadcasted_iota(chunk.targets.dtype, logits.shape, 2)
    grad = d_logps * onehot - probs * (d_logps + d_mean)
    if "mean_logps" in cotangents:
        assert terms.mean_over is not None
        grad += d_mean * _is_below(terms.mean_over, logits) / terms.mean_over
    if "entropy" in cotangents:
        grad -= d_entropy * probs * (own.logs + stats["entropy"][..., None])
    return grad / temperature


def _is_below(count: int, logits: Float[Array, "B C V"]) -> Bool[Array, "1 1 V"]:
    return jnp.arange(logits.shape[-1])[None, None] < count
