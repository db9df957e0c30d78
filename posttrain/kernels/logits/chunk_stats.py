"""Statistics of one chunk of logits, and their gradient by the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.batch import TopK
from posttrain.kernels.logits.divergence import FORWARD_KL, Divergence, divergence, divergence_gradient, token_logps
from posttrain.kernels.logits.softmax import Softmax
from posttrain.kernels.logits.spans import NAMED, span_terms


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is computed beside log-probabilities and entropies."""

    mean_over: int | None = None
    """`mean_logps` over the ids below this one: those that have a token."""
    squares: bool = False
    """`log_squares`."""
    sampling_temperature: float | None = None
    """`sampling_logps`."""
    divergence: Divergence | None = None
    """`divergence` from teachers, with `teacher_kl` and `teacher_logps`."""
    unshared: bytes | None = None
    """Of one teacher whose tokens are merged in groups: bits of the student's ids that it has no token for."""


PLAIN = Terms()

Found = dict[str, Array]
INNER = TOP, NORM = "top", "norm"
"""Beside the statistics, those of `Softmax`, for the backward pass."""


class Part(NamedTuple):
    """One chunk of the plan."""

    start: Array
    order: Int[Array, "B C"]
    targets: Int[Array, "B C"]
    teachers: list[tuple[Array | TopK, Array | float]]
    """Unscaled logits or best ids, and what each counts."""


def chunk_stats(logits: Float[Array, "B C V"], part: Part, temperature: float, terms: Terms) -> Found:
    own, chosen = Softmax.of(logits, temperature), jnp.take_along_axis(logits, part.targets[..., None], axis=-1)
    relative, log_norm, norm = own.centred / temperature, own.log_norm[..., 0], own.norm[..., 0]
    found = {
        "logps": own.log_of(chosen)[..., 0],
        "entropy": log_norm - jnp.sum(own.exps * relative, axis=-1) / norm,
        TOP: own.top[..., 0],
        NORM: norm,
    }
    if terms.mean_over is not None:
        known = _is_below(terms.mean_over, logits)
        found["mean_logps"] = jnp.sum(jnp.where(known, relative, 0.0), axis=-1) / terms.mean_over - log_norm
    if terms.squares:
        found["log_squares"] = jnp.log(jnp.sum(jnp.square(own.exps), axis=-1)) - 2 * log_norm
    if terms.sampling_temperature is not None:
        found["sampling_logps"] = Softmax.of(logits, terms.sampling_temperature).log_of(chosen)[..., 0]
    if terms.unshared is not None and terms.divergence is not None:
        found |= _span_terms(logits, part, terms)
    elif terms.divergence is not None:
        found["divergence"] = _divergence(logits, part, terms.divergence)
        same = terms.divergence == FORWARD_KL
        found["teacher_kl"] = found["divergence"] if same else _divergence(logits, part, FORWARD_KL)
        found["teacher_logps"] = _sum_of(part, lambda said: token_logps(said, part.targets))
    return found


def _span_terms(logits: Float[Array, "B C V"], part: Part, terms: Terms) -> Found:
    ((said, _),) = part.teachers
    assert isinstance(said, TopK) and terms.divergence is not None and terms.unshared is not None
    return span_terms(logits, part.targets, said, terms.divergence.beta, terms.unshared)


def _divergence(logits: Float[Array, "B C V"], part: Part, kind: Divergence) -> Float[Array, "B C"]:
    return _sum_of(part, lambda said: divergence(logits, said, kind))


def _sum_of(part: Part, function: Callable[[Any], Float[Array, "B C"]]) -> Float[Array, "B C"]:
    """Over teachers, each as much as it counts."""
    terms = [weight * function(said) for said, weight in part.teachers]
    return sum(terms[1:], terms[0])


def chunk_gradient(
    logits: Float[Array, "B C V"],
    part: Part,
    temperature: float,
    terms: Terms,
    cotangents: Mapping[str, Array],
    found: Found,
) -> Float[Array, "B C V"]:
    """Of sum(statistics * cotangents). What has no cotangent costs nothing.

    `found`: of `chunk_stats` the entropy and what is `INNER`.
    """
    grad = jnp.zeros((1, 1, 1), jnp.float32)
    if not cotangents.keys().isdisjoint(("logps", "mean_logps", "entropy")):
        grad = _of_own(logits, part, temperature, terms, cotangents, found)
    if NAMED in cotangents:
        of_groups, pull_groups = jax.vjp(lambda x: _span_terms(x, part, terms), logits)
        none = jax.tree.map(jnp.zeros_like, of_groups)
        grad += pull_groups({name: cotangents.get(name, zero) for name, zero in none.items()})[0]
    if "divergence" in cotangents:
        assert terms.divergence is not None
        for said, weight in part.teachers:
            pull = divergence_gradient(logits, said, terms.divergence)
            grad += (weight * cotangents["divergence"])[..., None] * pull
    return jnp.broadcast_to(grad, logits.shape)


def _of_own(
    logits: Float[Array, "B C V"],
    part: Part,
    temperature: float,
    terms: Terms,
    cotangents: Mapping[str, Array],
    found: Found,
) -> Float[Array, "B C V"]:
    """d logp = onehot - p; d mean = 1/n - p, over n ids; d entropy = -p (log p + entropy)."""
    zero = jnp.zeros((1, 1, 1), jnp.float32)
    d_logps, d_mean, d_entropy = (
        cotangents[name][..., None] if name in cotangents else zero for name in ("logps", "mean_logps", "entropy")
    )
    own = Softmax.again(logits, temperature, found[TOP][..., None], found[NORM][..., None])
    probs = own.probs
    onehot = part.targets[..., None] == jax.lax.broadcasted_iota(part.targets.dtype, logits.shape, 2)
    grad = d_logps * onehot - probs * (d_logps + d_mean)
    if "mean_logps" in cotangents:
        assert terms.mean_over is not None
        grad += d_mean * _is_below(terms.mean_over, logits) / terms.mean_over
    if "entropy" in cotangents:
        grad -= d_entropy * probs * (own.logs + found["entropy"][..., None])
    return grad / temperature


def _is_below(count: int, logits: Float[Array, "B C V"]) -> Bool[Array, "1 1 V"]:
    return jnp.arange(logits.shape[-1])[None, None] < count
