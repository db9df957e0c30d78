"""A teacher with other tokens against its student, on groups of tokens that have one text: GOLD, with ULD for the rest.

General Online Logit Distillation is in TRL, Universal Logit Distillation in arXiv:2402.12030. The outcomes of a group
are the tokens that both vocabularies have, one by one; the text of the group itself, whose log-probability is by the
chain rule the sum over its tokens on either side; and all else together: they are compared as other distributions are.
Of what only one vocabulary has it is the L1 distance of the probabilities, sorted on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.batch import TopK
from posttrain.kernels.logits.divergence import NOTHING_LEFT, outcome_terms
from posttrain.kernels.logits.softmax import NO_LOGIT

SPAN_TERMS = ("named", "named_kl", "left", "sorted")
NAMED, NAMED_KL, LEFT, SORTED = SPAN_TERMS
SURE = -1e-6
"""Of later tokens with a log-probability above this one, nothing is left for other ends of the text."""


def check_groups(teachers: Sequence[Any], unshared: bytes | None) -> None:
    """ValueError where a teacher speaks of groups and not `unshared` as well, or beside others."""
    merged = [isinstance(teacher, TopK) and teacher.back is not None for teacher in teachers]
    if teachers and (any(merged) or unshared is not None) and (unshared is None or merged != [True]):
        raise ValueError("token_stats: groups of tokens are of one teacher that speaks of them, and terms.unshared")


def span_terms(
    logits: Float[Array, "B C V"], targets: Int[Array, "B C"], said: TopK, beta: float, unshared: bytes
) -> dict[str, Float[Array, "B C"]]:
    """What of a divergence needs the logits, of first tokens of groups; `span_divergence` adds the other outcomes.

    `said`: ids of the student's are of tokens that both have, of which none is the group's first; others, of which only
    the probability counts, are the teacher's alone.
    """
    # What is impossible for the student stays so: there is no gradient.
    log_p = jax.nn.log_softmax(jnp.where(logits > NO_LOGIT, logits, NO_LOGIT), axis=-1)
    ids, vocab = jnp.asarray(said.ids), logits.shape[-1]
    named, logps = ids < vocab, jnp.asarray(said.logps)
    log_t = jnp.where(named, logps - _norm(said, vocab)[..., None], NO_LOGIT)
    log_s = jnp.take_along_axis(log_p, ids, axis=-1, mode="fill", fill_value=NO_LOGIT)
    rows, places = (x[..., None] for x in jnp.indices(targets.shape))
    first = targets[..., None]
    others = log_p.at[rows, places, ids].set(NO_LOGIT, mode="drop").at[rows, places, first].set(NO_LOGIT)
    found = {
        NAMED: jnp.sum(outcome_terms(log_s, log_t, beta), axis=-1),
        LEFT: jax.nn.logsumexp(others, axis=-1),
        SORTED: _sorted_distance(log_p, first, jnp.where(named, NO_LOGIT, logps), unpacked(unshared, vocab)),
    }
    if beta != 0:
        found[NAMED_KL] = jnp.sum(outcome_terms(log_s, log_t, 0.0), axis=-1)
    return found


def span_divergence(
    found: Mapping[str, Float[Array, "B T"]], said: TopK, beta: float, vocab_size: int
) -> dict[str, Float[Array, "B T"]]:
    """`divergence`, `teacher_kl`, `teacher_logps` and `sorted_distance` at the first token of each group, else 0.

    `found`: of `span_terms`, and the student's `logps` of all tokens.
    """
    assert said.back is not None
    back, logps = jnp.asarray(said.back), found["logps"]
    begins, norm = back == 0, _norm(said, vocab_size)
    later, several = _later(logps, back)
    span_s, span_t = logps + later, jnp.asarray(said.token_logps) - norm
    # What begins as the group does and ends otherwise is of no outcome with a name.
    ends_otherwise = logps + jnp.log(-jnp.expm1(jnp.minimum(later, SURE)))
    left = jnp.where(several & (later < SURE), jnp.logaddexp(found[LEFT], ends_otherwise), found[LEFT])
    # Where the student has no other outcome, what the teacher has of them is rounding.
    tail = jnp.where(left < NOTHING_LEFT, left, jnp.asarray(said.tail) - norm)

    def total(named: Float[Array, "B T"], beta: float) -> Float[Array, "B T"]:
        return jnp.where(begins, named + outcome_terms(span_s, span_t, beta) + outcome_terms(left, tail, beta), 0.0)

    return {
        "divergence": total(found[NAMED], beta),
        "teacher_kl": jax.lax.stop_gradient(total(found[NAMED if beta == 0 else NAMED_KL], 0.0)),
        "teacher_logps": jnp.where(begins, said.token_logps, 0.0),
        "sorted_distance": jnp.where(begins, found[SORTED], 0.0),
    }


def packed(ids: Bool[np.ndarray, " V"]) -> bytes:
    """Which ids of a vocabulary, to hold in what is static."""
    return np.packbits(ids).tobytes()


def unpacked(ids: bytes, vocab_size: int) -> Bool[np.ndarray, " V"]:
    """Rows of a model that stand for no token come after those that do."""
    known = np.unpackbits(np.frombuffer(ids, np.uint8)).astype(bool)[:vocab_size]
    return np.pad(known, (0, vocab_size - len(known)))


def _norm(said: TopK, vocab_size: int) -> Float[Array, "*B"]:
    """Log of what the probabilities of the teacher's outcomes sum to: 0 but for rounding."""
    named = jnp.where(jnp.asarray(said.ids) < vocab_size, said.logps, NO_LOGIT)
    other = jnp.stack([jnp.asarray(said.tail), jnp.asarray(said.token_logps)], axis=-1)
    return jax.nn.logsumexp(jnp.concatenate([named, other], axis=-1), axis=-1)


def _sorted_distance(
    log_p: Float[Array, "B C V"],
    first: Int[Array, "B C 1"],
    theirs: Float[Array, "B C K"],
    unshared: Bool[np.ndarray, " V"],
) -> Float[Array, "B C"]:
    """Of as many of the student's own tokens as the teacher says, the most probable; without the group's first."""
    count, vocab = theirs.shape[-1], log_p.shape[-1]
    if not unshared.any():
        mine = jnp.zeros_like(theirs)
    else:
        own = jnp.asarray(unshared)[None, None] & (jax.lax.broadcasted_iota(first.dtype, log_p.shape, 2) != first)
        mine = jnp.exp(jax.lax.top_k(jnp.where(own, log_p, NO_LOGIT), min(count, vocab))[0])
        mine = jnp.pad(mine, ((0, 0), (0, 0), (0, count - mine.shape[-1])))
    return jnp.sum(jnp.abs(mine - jnp.exp(jax.lax.top_k(theirs, count)[0])), axis=-1)


def _later(logps: Float[Array, "B T"], back: Int[Array, "B T"]) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """At the first token of each group the sum over its later ones, and whether there are any."""
    length = back.shape[1]
    first = jnp.arange(length)[None] - jnp.maximum(back, 0)
    sums = jax.vmap(lambda x, at: jax.ops.segment_sum(x, at, num_segments=length))
    return sums(jnp.where(back > 0, logps, 0.0), first), sums(jnp.where(back > 0, 1.0, 0.0), first) > 0
