"""Chunked token statistics: equal to their slow twin and to the golden, and without any array of size B x T x V."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import TopK
from posttrain.kernels.logits import layout as module
from posttrain.kernels.logits.chunk_stats import PLAIN, Terms
from posttrain.kernels.logits.divergence import Divergence
from posttrain.kernels.logits.layout import chunk_length
from posttrain.kernels.logits.token_stats import Teacher, stats_vjp, token_stats
from tests.often import often
from tests.oracles import token_stats_reference

GOLDEN = Path(__file__).parents[2] / "goldens" / "losses" / "logprobs_entropy"
DIM, VOCAB = 8, 19


def problem(length: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Hidden states, a head, tokens, and segments: one row of several sequences, one with padding, one whole."""
    rng = np.random.default_rng(length)
    segments = np.ones((3, length), np.int32)
    segments[0] = 1 + np.arange(length) // 3
    segments[1, length // 2 :] = 0
    return (
        jnp.asarray(rng.normal(size=(3, length, DIM)), jnp.float32),
        jnp.asarray(rng.normal(size=(DIM, VOCAB)), jnp.float32),
        jnp.asarray(rng.integers(0, VOCAB, (3, length)), jnp.int32),
        jnp.asarray(segments),
    )


def chunked(hidden: Any, head: Any, tokens: Any, segments: Any, temperature: float) -> Any:
    return token_stats(lambda x: x @ head, hidden, tokens, segments, temperature=temperature, vocab_size=head.shape[1])


def whole(hidden: Any, head: Any, tokens: Any, segments: Any, temperature: float) -> Any:
    return token_stats_reference(hidden @ head, tokens, segments, temperature=temperature)


def mixed_loss(function: Any) -> Any:
    """A scalar with another weight for each log-prob and entropy, so that no error cancels."""

    def loss(hidden: jax.Array, head: jax.Array, tokens: jax.Array, segments: jax.Array, temperature: float) -> Any:
        stats = function(hidden, head, tokens, segments, temperature)
        weight = jnp.cos(jnp.arange(stats.logps.size, dtype=jnp.float32)).reshape(stats.logps.shape)
        return jnp.sum(weight * stats.logps + jnp.square(weight) * stats.entropy), stats

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=4)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("length", "temperature", "chunk_tokens"),
    [(1, 1.0, 1), (2, 0.7, 1000), (7, 0.7, 1), (7, 1.0, 1000), (12, 0.7, 12), (12, 1.0, 15)],
)
def test_equals_the_slow_twin(
    monkeypatch: pytest.MonkeyPatch, length: int, temperature: float, chunk_tokens: int
) -> None:
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_tokens * VOCAB)
    args = problem(length)
    (value, stats), grads = mixed_loss(chunked)(*args, temperature)
    (expected, expected_stats), expected_grads = mixed_loss(whole)(*args, temperature)
    assert stats.logps.dtype == stats.entropy.dtype == jnp.float32
    np.testing.assert_allclose(stats.logps, expected_stats.logps, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stats.entropy, expected_stats.entropy, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "pulled"),
    often([("cpu", False), ("cpu", True), ("tpu", False), ("tpu", True)], ("cpu", True), ("tpu", False)),
)
def test_a_table_of_tokens_has_the_gradient_of_a_head(
    monkeypatch: pytest.MonkeyPatch, platform: str, pulled: bool
) -> None:
    """On a CPU it is added up transposed; the embedding's own use of the table is beside it."""
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 9 * VOCAB)
    monkeypatch.setattr("posttrain.kernels.logits.token_stats.platform_of", lambda mesh: platform)
    hidden, head, tokens, segments = problem(12)
    weight = jnp.cos(jnp.arange(tokens.size, dtype=jnp.float32)).reshape(tokens.shape)
    given = {"temperature": 0.7, "vocab_size": VOCAB}

    def loss(table: jax.Array, hidden: jax.Array) -> jax.Array:
        hidden, logits_of = hidden + jnp.take(table, tokens, axis=0), lambda x: x @ table.T
        if pulled:
            return stats_vjp(logits_of, hidden, tokens, segments, cotangents={"logps": weight}, **given)[0]
        return jnp.sum(weight * token_stats(logits_of, hidden, tokens, segments, **given).logps)

    def slow(table: jax.Array, hidden: jax.Array) -> jax.Array:
        hidden = hidden + jnp.take(table, tokens, axis=0)
        return jnp.sum(weight * whole(hidden, table.T, tokens, segments, 0.7).logps)

    found, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(head.T, hidden) for f in (loss, slow))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_zero_where_nothing_is_predicted() -> None:
    hidden, head, tokens, segments = problem(7)
    stats = chunked(hidden, head, tokens, segments, 1.0)
    ids = np.asarray(segments)
    first = np.concatenate([np.ones((3, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    unpredicted = first | (ids == 0)
    for values in (stats.logps, stats.entropy):
        assert not np.asarray(values)[unpredicted].any()
        assert (np.asarray(values)[~unpredicted] != 0).all()


def test_packed_is_apart() -> None:
    hidden, head, tokens, segments = problem(12)
    packed = chunked(hidden, head, tokens, segments, 0.7)
    for start in (0, 3, 6, 9):
        place = slice(start, start + 3)
        apart = chunked(hidden[:1, place], head, tokens[:1, place], jnp.ones((1, 3), jnp.int32), 0.7)
        np.testing.assert_allclose(packed.logps[:1, place], apart.logps, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(packed.entropy[:1, place], apart.entropy, rtol=1e-6, atol=1e-6)


def test_bfloat16_logits_are_upcast() -> None:
    hidden, head, tokens, segments = problem(12)
    hidden, head = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    stats = chunked(hidden, head, tokens, segments, 1.0)
    exact = token_stats_reference((hidden @ head).astype(jnp.float32), tokens, segments, temperature=1.0)
    np.testing.assert_allclose(stats.logps, exact.logps, rtol=1e-5, atol=1e-5)


def test_logits_masked_to_minus_infinity() -> None:
    """A head may mask padded rows of its vocabulary; values and gradients are those of the smaller vocabulary."""
    hidden, head, tokens, segments = problem(7)
    tokens = tokens % (VOCAB - 4)

    def masked(hidden: Any, head: Any, tokens: Any, segments: Any, temperature: float) -> Any:
        def logits_of(x: jax.Array) -> jax.Array:
            return jnp.where(jnp.arange(VOCAB) < VOCAB - 4, x @ head, -jnp.inf)

        return token_stats(logits_of, hidden, tokens, segments, temperature=temperature, vocab_size=VOCAB)

    (value, _), grads = mixed_loss(masked)(hidden, head, tokens, segments, 0.7)
    (expected, _), expected_grads = mixed_loss(chunked)(hidden, head[:, :-4], tokens, segments, 0.7)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grads[0], expected_grads[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grads[1][:, :-4], expected_grads[1], rtol=1e-5, atol=1e-5)
    assert not np.asarray(grads[1][:, -4:]).any()


@pytest.mark.parametrize("name", ["T1.0", "T0.7"])
def test_golden(name: str) -> None:
    """TRL's log-probs and entropies; the third case of the golden is about bfloat16 arithmetic that we do not do."""
    cases = json.loads(GOLDEN.with_suffix(".json").read_text())["cases"]
    assert {case["name"] for case in cases} == {"T1.0", "T0.7", "bf16"}
    temperature = next(case for case in cases if case["name"] == name)["args"]["temperature"]
    with np.load(GOLDEN.with_suffix(".npz")) as file:
        arrays = dict(file)
    index = arrays["in/index"]
    # Here logits[t] predict tokens[t + 1], hence a token in front and a position behind.
    logits = jnp.pad(jnp.asarray(arrays["in/logits"], jnp.float32), ((0, 0), (0, 1), (0, 0)))
    tokens = jnp.pad(jnp.asarray(index, jnp.int32), ((0, 0), (1, 0)))

    def stats(logits: jax.Array) -> Any:
        return token_stats(
            lambda x: x, logits, tokens, jnp.ones_like(tokens), temperature=temperature, vocab_size=logits.shape[-1]
        )

    for field, total in (("logps", "dsumlogps"), ("entropy", "dsumentropy")):
        values = vars(stats(logits))[field]
        np.testing.assert_allclose(values[:, 1:], arrays[f"out/{name}/{field}"], rtol=1e-5, atol=1e-6)
        grad = jax.jit(jax.grad(lambda x, field=field: vars(stats(x))[field].sum()))(logits)
        np.testing.assert_allclose(grad[:, :-1], arrays[f"out/{name}/{total}"], rtol=1e-5, atol=1e-6)


@pytest.mark.optimized
def test_no_array_of_rows_tokens_and_vocabulary() -> None:
    """Half of B x T x V in float32 bounds all temporaries of value and gradient; the slow twin breaks that bound."""
    rows, length, vocab, dim = 4, 512, 8192, 32
    shapes = (
        jax.ShapeDtypeStruct((rows, length, dim), jnp.float32),
        jax.ShapeDtypeStruct((dim, vocab), jnp.float32),
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
    )

    def compiled(function: Any) -> Any:
        return mixed_loss(function).lower(*shapes, 1.0).compile()

    bound = rows * length * vocab * 4 // 2
    ours, twin = compiled(chunked), compiled(whole)
    assert ours.memory_analysis().temp_size_in_bytes < bound
    assert twin.memory_analysis().temp_size_in_bytes > bound
    # One position less is predicted than there are tokens, so the twin's arrays are that much smaller.
    size = rows * (length - 1) * vocab
    assert largest_array(ours.as_text()) < size // 2
    assert largest_array(twin.as_text()) >= size


def largest_array(hlo: str) -> int:
    """Elements of the largest array that a compiled program names."""
    shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", hlo)
    return max(math.prod(int(n) for n in shape.split(",")) for shape in shapes)


def test_chunk_length() -> None:
    """(rows, length, vocabulary): bounded by elements, by tokens where the vocabulary is large, and by half a row."""
    assert chunk_length(1, 4096, 1024) == module.CHUNK_ELEMENTS // 1024
    assert chunk_length(8, 4096, 262144) == module.MIN_CHUNK_TOKENS // 8
    assert chunk_length(1024, 4096, 262144) == 1
    assert chunk_length(2, 9, 5) == 5
    assert chunk_length(1, 1, 10) == 1


def test_only_some_tokens() -> None:
    """The others get 0, and their logits, which would be NaN here, are not even computed."""
    hidden, head, tokens, segments = problem(12)
    only = jnp.asarray(np.random.default_rng(0).random(tokens.shape) < 0.4)
    all_of_them = chunked(hidden, head, tokens, segments, 0.7)

    def some(hidden: jax.Array, head: jax.Array) -> Any:
        stats = token_stats(lambda x: x @ head, hidden, tokens, segments, temperature=0.7, vocab_size=VOCAB, only=only)
        return jnp.sum(jnp.cos(stats.logps) + stats.entropy), stats

    def masked(hidden: jax.Array, head: jax.Array) -> Any:
        stats = whole(hidden, head, tokens, segments, 0.7)
        return jnp.sum(jnp.where(only, jnp.cos(stats.logps) + stats.entropy, jnp.cos(0.0)))

    (_, stats), grads = jax.jit(jax.value_and_grad(some, argnums=(0, 1), has_aux=True))(hidden, head)
    np.testing.assert_allclose(stats.logps, np.where(only, all_of_them.logps, 0.0), rtol=1e-5, atol=1e-6)
    for grad, expected in zip(grads, jax.jit(jax.grad(masked, argnums=(0, 1)))(hidden, head), strict=True):
        np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)


def test_prompts_cost_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is called once for each chunk of what counts: prompts of 9 tokens before answers of 3, in any place."""
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * VOCAB)
    hidden, head, tokens, _ = problem(12)
    only = jnp.asarray([[t >= start and t < start + 3 for t in range(12)] for start in (9, 4, 1)])
    calls: list[int] = []

    def logits_of(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return x @ head

    def loss(hidden: jax.Array, only: Any) -> Any:
        ones = jnp.ones_like(tokens)
        return token_stats(logits_of, hidden, tokens, ones, temperature=1.0, vocab_size=VOCAB, only=only).logps.sum()

    for wanted, chunks in ((only, 3), (jnp.ones_like(only), 11)):
        calls.clear()
        jax.block_until_ready(jax.jit(loss)(hidden, wanted))
        jax.effects_barrier()
        assert len(calls) == chunks


@pytest.mark.thorough
@pytest.mark.optimized
@pytest.mark.parametrize("kind", often(("live", "best ids", "groups"), "groups"))
def test_no_array_of_a_teacher_either(kind: str) -> None:
    """As above, with a divergence from a live teacher of another width, from its best ids, and from merged tokens."""
    rows, length, vocab, dim, k = 4, 1024, 8192, 32, 64

    def loss(hidden: Any, head: Any, taught: Any, teacher_head: Any, tokens: Any, segments: Any, said: Any) -> Any:
        groups = kind == "groups"
        divergence = Divergence(beta=0.5, temperature=1.0 if groups else 2.0)
        stats = token_stats(
            lambda x: x @ head,
            hidden,
            tokens,
            segments,
            temperature=1.0,
            vocab_size=vocab,
            terms=Terms(divergence=divergence, unshared=bytes([0b10101010] * (vocab // 8)) if groups else None),
            teachers=[Teacher(lambda x: x @ teacher_head, taught) if kind == "live" else said],
        )
        total = jnp.sum(stats.divergence)
        return total + jnp.sum(stats.sorted_distance) if groups else total, (stats.teacher_kl, stats.logps)

    floats = [(rows, length, dim), (dim, vocab), (rows, length, 2 * dim), (2 * dim, vocab)]
    shapes: list[Any] = [jax.ShapeDtypeStruct(s, jnp.float32) for s in floats]
    shapes += [jax.ShapeDtypeStruct((rows, length), jnp.int32)] * 2
    of_ids, of_tokens = np.zeros((rows, length, k), np.float32), np.zeros((rows, length), np.float32)
    said = TopK(
        ids=of_ids.astype(np.int32),
        logps=of_ids,
        tail=of_tokens,
        scaled_tail=of_tokens,
        token_logps=of_tokens,
        back=of_tokens.astype(np.int32) if kind == "groups" else None,
    )
    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)).lower(*shapes, said).compile()
    assert program.memory_analysis().temp_size_in_bytes < rows * length * vocab * 4 // 2
    assert largest_array(program.as_text()) < rows * (length - 1) * vocab // 2


PULLED = {
    "logps": PLAIN,
    "logps mean_logps": Terms(mean_over=VOCAB - 2),
    "logps entropy": PLAIN,
    "divergence": Terms(divergence=Divergence(beta=0.0, temperature=2.0)),
    "divergence logps": Terms(divergence=Divergence(beta=0.5, temperature=1.0)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("names", PULLED)
@pytest.mark.parametrize("frozen", often([False, True], False))
def test_a_gradient_with_the_value_is_that_of_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch, names: str, frozen: bool
) -> None:
    """For any cotangents, several chunks, tokens that do not count, and a factor on the sum; the head is called once
    for each chunk, where the backward pass calls it again."""
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 9 * VOCAB)
    hidden, head, tokens, segments = problem(12)
    rng = np.random.default_rng(3)
    taught, teacher_head = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 12, 5), (5, VOCAB)))
    only = jnp.asarray(rng.random((3, 12)) < 0.7)
    cotangents = {name: jnp.asarray(rng.normal(size=(3, 12)), jnp.float32) for name in names.split()}
    calls: list[int] = []

    def logits_of(x: jax.Array, head: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return x @ head

    def found(function: Any, hidden: jax.Array, head: jax.Array, **more: Any) -> Any:
        return function(
            lambda x: logits_of(x, head),
            hidden,
            tokens,
            segments,
            temperature=0.7,
            vocab_size=VOCAB,
            only=only,
            terms=PULLED[names],
            teachers=[Teacher(lambda x: x @ teacher_head, taught)] if PULLED[names].divergence else [],
            **more,
        )

    def slow(hidden: jax.Array, head: jax.Array) -> Any:
        stats = found(token_stats, hidden, head)
        return 3.0 * sum(jnp.sum(getattr(stats, name) * ct) for name, ct in cotangents.items()), stats

    def fast(hidden: jax.Array, head: jax.Array) -> Any:
        total, stats = found(stats_vjp, hidden, head, cotangents=cotangents)
        return 3.0 * total, stats

    arguments = (0,) if frozen else (0, 1)
    counts = []
    results = []
    for function in (slow, fast):
        calls.clear()
        results.append(jax.jit(jax.value_and_grad(function, arguments, has_aux=True))(hidden, head))
        jax.block_until_ready(results[-1])
        jax.effects_barrier()
        counts.append(len(calls))
    ((expected, expected_stats), expected_grads), ((value, stats), grads) = results
    assert counts[0] == 2 * counts[1] > 2
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(stats), jax.tree.leaves(expected_stats), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-5)


def test_statistics_beside_a_pulled_sum_have_no_gradient() -> None:
    hidden, head, tokens, segments = problem(7)
    ones = {"logps": jnp.ones((3, 7))}

    def other(hidden: jax.Array) -> jax.Array:
        _, stats = stats_vjp(
            lambda x: x @ head, hidden, tokens, segments, cotangents=ones, temperature=1.0, vocab_size=VOCAB
        )
        return jnp.sum(stats.logps + stats.entropy)

    assert not np.asarray(jax.grad(other)(hidden)).any()


def test_groups_of_tokens_have_no_gradient_chunk_by_chunk() -> None:
    hidden, head, tokens, segments = problem(7)
    with pytest.raises(ValueError, match="token groups have no per-chunk gradient"):
        stats_vjp(
            lambda x: x @ head,
            hidden,
            tokens,
            segments,
            cotangents={},
            temperature=1.0,
            vocab_size=VOCAB,
            terms=Terms(unshared=b""),
        )
