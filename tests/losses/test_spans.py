"""GOLD: groups of tokens with one text, against textbook formulas over whole distributions."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import NO_ID, Batch, TopK
from posttrain.distill.cross_tokenizer import SharedTokens, back_of
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.divergence import Divergence, divergence, pack_ids
from posttrain.kernels.logits.token_stats import token_stats
from posttrain.losses.distill import DistillLoss
from posttrain.tree import replace
from tests.often import often

OWN, OTHERS = 7, 9
GROUPS = ((1, 1), (2, 1), (1, 3), (3, 2), (1, 1), (2, 2))
"""Tokens of the student and of the teacher in each."""


class Case(NamedTuple):
    student: np.ndarray
    """Logits in the place of each of the student's tokens."""
    tokens: np.ndarray
    teacher: np.ndarray
    theirs: np.ndarray
    shared: SharedTokens
    groups: tuple[tuple[int, int], ...]


def case(groups: tuple[tuple[int, int], ...] = GROUPS) -> Case:
    """Student ids 0..3 are the teacher's 8, 2, 5 and 0."""
    draw = np.random.default_rng(0)
    one, other = (sum(sizes) for sizes in zip(*groups, strict=True))
    table = np.full(OTHERS, NO_ID, np.int64)
    table[[8, 2, 5, 0]] = range(4)
    tokens, theirs = draw.integers(0, OWN, one), draw.integers(0, OTHERS, other)
    # The groups of one token each are of a token that both have.
    tokens[0], theirs[0] = 2, 5
    shared = SharedTokens(table, ~np.isin(np.arange(OWN), table))
    return Case(draw.normal(size=(one, OWN)) * 2, tokens, draw.normal(size=(other, OTHERS)) * 2, theirs, shared, groups)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def said_of(c: Case, k: int) -> TopK:
    """In a row whose first two tokens are of no group, with one between the groups, as the aligner makes it."""
    log_p = log_softmax(c.teacher)
    best = np.argsort(-log_p, axis=-1, kind="stable")[:, :k]
    others = log_p.copy()
    np.put_along_axis(others, best, -np.inf, axis=-1)
    tail = np.log(np.maximum(np.exp(others).sum(axis=-1), 1e-30)).astype(np.float32)
    said = TopK(
        ids=best.astype(np.int32),
        logps=np.take_along_axis(log_p, best, -1).astype(np.float32),
        tail=tail,
        scaled_tail=tail,
        token_logps=np.take_along_axis(log_p, c.theirs[:, None], -1)[:, 0].astype(np.float32),
    )
    firsts = [np.cumsum([0, *sizes])[:-1] for sizes in zip(*c.groups, strict=True)]
    none = np.full(len(c.groups), NO_ID - 1)
    made = c.shared.top_k(said, firsts[1], (c.tokens[firsts[0]], c.theirs[firsts[1]]), (none, none))
    taught = np.full(len(c.tokens), -1)
    taught[firsts[0]] = 1
    row = np.concatenate([[0, 0], taught])
    spread = jax.tree.map(lambda x: np.zeros((1, len(row), *x.shape[1:]), x.dtype), made)
    for whole, part in zip(jax.tree.leaves(spread), jax.tree.leaves(made), strict=True):
        whole[0, row > 0] = part
    return replace(spread, back=back_of(row)[None])


def stats_of(c: Case, logits: Any, beta: float, k: int = OTHERS) -> Any:
    """Whole hidden states are logits; those in the place of a token stand before it."""
    tokens = np.concatenate([[0, 1], c.tokens])[None].astype(np.int32)
    hidden = jnp.zeros((1, tokens.shape[1], OWN), jnp.float32).at[0, 1:-1].set(logits)
    terms = Terms(divergence=Divergence(beta=beta, temperature=1.0), unshared=pack_ids(c.shared.unshared))
    ones = np.ones_like(tokens)
    return token_stats(
        lambda x: x, hidden, tokens, ones, temperature=1.0, vocab_size=OWN, terms=terms, teachers=[said_of(c, k)]
    )


def generalized(p: np.ndarray, q: np.ndarray, beta: float) -> float:
    """Of student p and teacher q."""
    if beta in (0, 1):
        a, b = (q, p) if beta == 0 else (p, q)
        return float(np.sum(a * np.log(a / b)))
    m = beta * q + (1 - beta) * p
    return float(beta * np.sum(q * np.log(q / m)) + (1 - beta) * np.sum(p * np.log(p / m)))


def twin(c: Case, student: np.ndarray, beta: float) -> list[tuple[float, float]]:
    """Of each group the divergence and the sorted L1 distance, from whole distributions."""
    found, i, j = [], 0, 0
    p_all, q_all = np.exp(log_softmax(student)), np.exp(log_softmax(c.teacher))
    for n, m in c.groups:
        p, q, own, its = p_all[i], q_all[j], c.tokens[i : i + n], c.theirs[j : j + m]
        span = [np.prod([p_all[i + t, own[t]] for t in range(n)]), np.prod([q_all[j + t, its[t]] for t in range(m)])]
        both = [(v, w) for w, v in enumerate(c.shared.table) if v != NO_ID and v != own[0] and w != its[0]]
        outcomes = [np.asarray([x[one[side]] for one in both] + [span[side]]) for side, x in enumerate((p, q))]
        whole = [np.append(x, 1 - x.sum()) for x in outcomes]
        alone = [p[[v for v in range(OWN) if v not in c.shared.table and v != own[0]]]]
        alone.append(q[[w for w in range(OTHERS) if c.shared.table[w] == NO_ID and w != its[0]]])
        ranked = [np.append(-np.sort(-x), np.zeros(OTHERS - len(x))) for x in alone]
        found.append((generalized(whole[0], whole[1], beta), float(np.abs(ranked[0] - ranked[1]).sum())))
        i, j = i + n, j + m
    return found


@pytest.mark.parametrize("beta", often([0.0, 0.4, 1.0], 0.4))
def test_the_slow_twin(beta: float) -> None:
    """Values, and the derivative in a random direction by differences."""
    c = case()
    direction = np.random.default_rng(1).normal(size=c.student.shape)

    def total(logits: jax.Array) -> Any:
        stats = stats_of(c, logits, beta)
        return jnp.sum(stats.divergence) + 0.5 * jnp.sum(stats.sorted_distance), stats

    (_, stats), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(jnp.asarray(c.student, jnp.float32))
    firsts = 2 + np.cumsum([0, *(n for n, _ in GROUPS)])[:-1]
    expected = np.asarray(twin(c, c.student, beta))
    np.testing.assert_allclose(stats.divergence[0, firsts], expected[:, 0], rtol=1e-4)
    np.testing.assert_allclose(stats.sorted_distance[0, firsts], expected[:, 1], rtol=1e-4)
    np.testing.assert_allclose(stats.teacher_kl[0, firsts], np.asarray(twin(c, c.student, 0.0))[:, 0], rtol=1e-4)
    assert np.count_nonzero(stats.divergence) == len(GROUPS), "it stands at the first token of each group"
    ahead, behind = (np.asarray(twin(c, c.student + e * direction, beta)) for e in (1e-5, -1e-5))
    by_differences = ((ahead - behind) / 2e-5).sum(axis=0) @ [1.0, 0.5]
    np.testing.assert_allclose(np.sum(np.asarray(grad, np.float64) * direction), by_differences, rtol=1e-3)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("beta", often([0.0, 0.4], 0.4))
def test_equal_vocabularies_are_the_ordinary_divergence(permuted: bool, beta: float) -> None:
    """Whatever the order of their ids."""
    c = case(((1, 1),) * 5)
    order = np.random.default_rng(2).permutation(OWN) if permuted else np.arange(OWN)
    same = c._replace(
        teacher=c.teacher[:, :OWN],
        theirs=np.argsort(order)[c.tokens],
        shared=SharedTokens(order, np.zeros(OWN, bool)),
    )
    kind = Divergence(beta=beta, temperature=1.0)
    named = jnp.asarray(same.teacher[:, np.argsort(order)], jnp.float32)[None]

    def ordinary(logits: jax.Array) -> jax.Array:
        return divergence(logits[None], named, kind).sum()

    def of_groups(logits: jax.Array) -> Any:
        stats = stats_of(same, logits, beta, OWN)
        return stats.divergence.sum() + stats.sorted_distance.sum(), stats.sorted_distance

    logits = jnp.asarray(c.student, jnp.float32)
    expected, pull = jax.jit(jax.value_and_grad(ordinary))(logits)
    (found, distance), grad = jax.jit(jax.value_and_grad(of_groups, has_aux=True))(logits)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, pull, rtol=1e-4, atol=1e-6)
    assert not np.asarray(distance).any()


def test_equal_probabilities_without_names_are_no_distance() -> None:
    """Of vocabularies that share nothing, the teacher's is the student's with other ids: nothing pulls."""
    c = case(((1, 1),) * 4)
    order = np.random.default_rng(3).permutation(OWN)
    shared = SharedTokens(np.full(OWN, NO_ID, np.int64), np.ones(OWN, bool))
    c = c._replace(teacher=c.student[:, order], theirs=np.argsort(order)[c.tokens], shared=shared)
    found = jax.jit(lambda logits: stats_of(c, logits, 0.5, OWN))
    stats = found(jnp.asarray(c.student, jnp.float32))
    np.testing.assert_allclose(stats.sorted_distance, 0.0, atol=1e-6)
    np.testing.assert_allclose(stats.divergence, 0.0, atol=1e-6)
    other = found(jnp.asarray(c.student[::-1].copy(), jnp.float32))
    assert float(other.sorted_distance.sum()) > 0.1


def test_few_ids_are_near_and_the_loss_weighs_the_distance() -> None:
    c = case()
    logits = jnp.asarray(c.student, jnp.float32)
    whole, few = jax.jit(lambda x: [stats_of(c, x, 0.0, k) for k in (OTHERS, OTHERS - 2)])(logits)
    apart = np.abs(np.asarray(whole.divergence - few.divergence))
    assert (np.asarray(few.divergence) <= np.asarray(whole.divergence) + 1e-5).all() and 1e-4 < apart.sum() < 0.5
    ones = np.ones(whole.logps.shape, np.float32)
    weight = np.where(np.arange(ones.shape[1]) > 1, ones, 0)
    zeros = np.zeros(ones.shape, np.int32)
    batch = Batch(
        tokens=zeros, positions=zeros, segments=zeros + 1, loss_weight=weight, teacher_weights=weight[..., None]
    )
    plain, weighted = (DistillLoss(0.0, uld=uld)(whole, batch) for uld in (0.0, 2.0))
    more = 2 * float(whole.sorted_distance.sum())
    np.testing.assert_allclose(weighted.loss.total, plain.loss.total + more, rtol=1e-5)
    nlls = [plain.metrics[f"distill/{who}_nll"] for who in ("student", "teacher")]
    expected = [-whole.logps[0, 2:].sum(), -np.take_along_axis(log_softmax(c.teacher), c.theirs[:, None], -1).sum()]
    np.testing.assert_allclose([nll.total for nll in nlls], expected, rtol=1e-5)
    assert [nll.weight for nll in nlls] == [len(c.tokens)] * 2 and plain.metrics["distill/covered_tokens"].value() == 1
    with pytest.raises(ValueError, match="give the trainer a cross-tokenizer teacher"):
        DistillLoss(0.0, uld=1.0)(replace(whole, sorted_distance=None), batch)
    with pytest.raises(ValueError, match="token groups need exactly one teacher"):
        token_stats(
            lambda x: x,
            jnp.zeros((*zeros.shape, OWN)),
            zeros,
            zeros + 1,
            temperature=1.0,
            vocab_size=OWN,
            terms=Terms(divergence=Divergence(beta=0.0, temperature=1.0)),
            teachers=[said_of(c, 3)],
        )
