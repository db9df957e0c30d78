"""The sampler against a full sort, Hugging Face's logits processors, and the distribution itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from posttrain.rollout.sampling import Drawn, Sampling, Tables, Tally, _inverse_cdf, guess, sample, score, uniforms
from posttrain.rollout.types import SamplingParams
from tests.often import often
from tests.oracles import process_reference, sample_reference
from tests.rollout.engines import log_softmax

GOLDENS = Path(__file__).parents[1] / "goldens" / "losses" / "sampling.npz"
NEUTRAL = {"logit_bias": {0: 0.0}}
"""Asks for the program with processors, and for nothing of it."""


@jax.jit
def compiled(logits: jax.Array, positions: jax.Array, sampling: Sampling) -> Drawn:
    return sample(logits, positions, sampling, sampling.tally(logits.shape[1]))


@jax.jit
def applied(sampling: Sampling, logits: jax.Array) -> jax.Array:
    return applied_to(sampling.tally(logits.shape[1]), logits)


@jax.jit
def applied_to(tally: Tally | None, logits: jax.Array) -> jax.Array:
    assert tally is not None
    return tally.apply(logits)


@jax.jit
def counted(tally: Tally, tokens: jax.Array, active: jax.Array) -> Tally:
    return tally.count(tokens[:, None], active[:, None])


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, "temperature": 1.0, "stop_token_ids": (), "key": (7, 11)} | settings)


def sampling_of(
    parameters: Sequence[SamplingParams], vocab: int, before: Sequence[tuple[Sequence[int], Sequence[int]]] = ()
) -> Sampling:
    """`before`: of each row its prompt and its sample so far; one entry is for all rows."""
    prompts, samples = zip(*(before or [((), ())]), strict=True)
    times = len(parameters) // len(prompts)
    histories = [[*prompt, *sample] for prompt, sample in zip(prompts, samples, strict=True)] * times
    lengths = [len(prompt) for prompt in prompts] * times
    return Sampling.of(parameters, histories, lengths, max_length=16, tables=Tables(vocab))


def draw(
    logits: np.ndarray,
    *,
    first_position: int = 0,
    before: Sequence[tuple[Sequence[int], Sequence[int]]] = (),
    **settings: Any,
) -> Drawn:
    """One token of each row, all under the same settings, row r at position first_position + r."""
    rows, vocab = logits.shape
    positions = first_position + jnp.arange(rows, dtype=jnp.int32)
    sampling = sampling_of([params(**settings)] * rows, vocab, before)
    return jax.device_get(compiled(jnp.asarray(logits), positions, sampling))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.5},
]

PROCESSED: list[dict[str, Any]] = [
    NEUTRAL,
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "temperature": 0.0},
    {"presence_penalty": 0.9},
    {"frequency_penalty": -0.7},
    {"logit_bias": {0: 3.0, 5: float("-inf"), 9: -2.5}},
    {"allowed_token_ids": (2, 3, 7, 8, 31)},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {1: 1.5, 4: -1.0},
        "allowed_token_ids": (*tuple(range(0, 40, 2)), 1, 3, 9),
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.02,
    },
]
BEFORE = ((1, 2, 3, 3, 4), (3, 7, 7, 9))
DRAWS = 20_000


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [1, 40, 515])
def test_equals_the_reference(settings: dict[str, Any], vocab: int) -> None:
    logits = np.random.default_rng(vocab + 1).normal(size=(64, vocab)).astype(np.float32) * 3
    assert_equal_to_the_reference(logits, draw(logits, **settings), params(**settings), ((), ()))


@pytest.mark.parametrize("settings", PROCESSED, ids=str)
def test_processors_equal_the_reference(settings: dict[str, Any]) -> None:
    logits = np.random.default_rng(1).normal(size=(64, 40)).astype(np.float32) * 3
    drawn = draw(logits, before=[BEFORE], **settings)
    assert_equal_to_the_reference(logits, drawn, params(**settings), BEFORE)


def assert_equal_to_the_reference(
    logits: np.ndarray, drawn: Drawn, p: SamplingParams, before: tuple[Sequence[int], Sequence[int]]
) -> None:
    keys = jnp.broadcast_to(jnp.asarray([7, 11], jnp.uint32), (64, 2))
    u = np.asarray(uniforms(keys, jnp.arange(64, dtype=jnp.int32)), np.float64)
    for row in range(64):
        token, logp, kept_logp, truncation_logp = sample_reference(logits[row], u[row], p, *before)
        assert drawn.tokens[row] == token
        np.testing.assert_allclose(drawn.logps[row], logp, atol=2e-6)
        np.testing.assert_allclose(drawn.kept_logps[row], kept_logp, atol=4e-6)
        np.testing.assert_allclose(drawn.truncation_logps[row], truncation_logp, atol=4e-6)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("topk5", {"top_k": 5}),
        ("topp06", {"top_p": 0.6}),
        ("topp095", {"top_p": 0.95}),
        ("minp01", {"min_p": 0.1}),
        ("temp_minp", {"temperature": 1.7, "min_p": 0.1}),
        ("temp_topk_topp_order_hf", {"temperature": 1.7, "top_k": 12, "top_p": 0.8}),
        ("rep13", {"repetition_penalty": 1.3}),
        ("rep_temp_topp", {"repetition_penalty": 1.2, "temperature": 0.8, "top_p": 0.7}),
    ],
)
def test_distributions_are_those_of_hugging_face(name: str, settings: dict[str, Any]) -> None:
    """What the processors leave of the logits is what tokens are drawn from, and exp(logp - kept_logp) says so."""
    with np.load(GOLDENS) as golden:
        logits, prompts, processed = golden["in/logits"], golden["in/input_ids"], golden[f"out/{name}"]
    for row in range(len(logits)):
        many = np.repeat(logits[row : row + 1], 4000, axis=0)
        drawn = draw(many, before=[(prompts[row].tolist(), ())], **settings)
        expected = np.exp(log_softmax(processed[row], 1.0))
        # What is likely enough to be seen in 4,000 draws is seen.
        assert set(np.flatnonzero(expected > 0.01)) <= set(drawn.tokens.tolist())
        np.testing.assert_allclose(np.exp(drawn.logps - drawn.kept_logps), expected[drawn.tokens], rtol=2e-5)
        model = log_softmax(logits[row], settings.get("temperature", 1.0))
        np.testing.assert_allclose(drawn.logps, model[drawn.tokens], atol=1e-5)


def test_processors_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch", reason="transformers' processors need torch")
    from transformers import generation

    logits = np.random.default_rng(5).normal(size=(3, 40)).astype(np.float32) * 4
    prompts = np.random.default_rng(6).integers(0, 40, (3, 12))
    bias = {3: 2.0, 5: float("-inf"), 30: -4.0}
    processors = generation.LogitsProcessorList(
        [
            generation.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
            generation.RepetitionPenaltyLogitsProcessor(1.7),
        ]
    )
    expected = processors(torch.tensor(prompts), torch.tensor(logits)).numpy()
    p = params(repetition_penalty=1.7, logit_bias=bias)
    before = [(row[:5].tolist(), row[5:].tolist()) for row in prompts]
    np.testing.assert_allclose(applied(sampling_of([p] * 3, 40, before), jnp.asarray(logits)), expected, rtol=1e-6)
    for row, (prompt, sampled) in enumerate(before):
        np.testing.assert_allclose(process_reference(logits[row], p, prompt, sampled), expected[row], rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = np.random.default_rng(1).normal(size=300).astype(np.float32) * 1.5
    drawn = draw(np.repeat(logits[None], DRAWS, axis=0), temperature=temperature)
    assert_frequencies(drawn.tokens, np.exp(log_softmax(logits, temperature)))


def test_frequencies_follow_the_returned_probabilities() -> None:
    """With every option on, tokens come as often as exp(logp - kept_logp) says, and weighting by the inverse of what
    the options did gives expectations under the model."""
    logits = np.random.default_rng(1).normal(size=40).astype(np.float32) * 1.5
    drawn = draw(np.repeat(logits[None], DRAWS, axis=0), before=[BEFORE], **PROCESSED[-1])
    probs = np.zeros(40)
    probs[drawn.tokens] = np.exp(drawn.logps - drawn.kept_logps)
    assert probs.sum() == pytest.approx(1, abs=1e-5)
    assert_frequencies(drawn.tokens, probs)
    model = np.exp(log_softmax(logits, PROCESSED[-1]["temperature"]))
    assert np.exp(drawn.kept_logps).mean() == pytest.approx(model[probs > 0].sum(), rel=0.03)


def assert_frequencies(tokens: np.ndarray, probs: np.ndarray) -> None:
    draws = len(tokens)
    counts = np.bincount(tokens, minlength=len(probs))
    often = probs * draws >= 5
    rest = [~often] if probs[~often].sum() > 0 else []
    observed = np.asarray([*counts[often], *(counts[r].sum() for r in rest)])
    expected = np.asarray([*probs[often], *(probs[r].sum() for r in rest)]) * observed.sum() / probs.sum()
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    assert 0.5 * np.abs(counts / draws - probs).sum() < 0.06


def test_never_a_token_of_probability_zero() -> None:
    logits = np.full((DRAWS, 300), -np.inf, np.float32)
    allowed = [3, 64, 130]
    logits[:, allowed] = [0.0, -1.0, -18.0]
    drawn = draw(logits)
    assert set(drawn.tokens.tolist()) <= set(allowed)
    assert np.isfinite(drawn.logps).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = np.random.default_rng(2).normal(size=(64, 40)).astype(np.float32)
    tokens = draw(logits, top_p=0.9).tokens
    for row in range(6):
        assert draw(logits[row : row + 1], first_position=row, top_p=0.9).tokens[0] == tokens[row]


def test_settings_stay_on_the_device_until_rows_change() -> None:
    rows, tables = [params(temperature=0.0), params(top_k=3)], Tables(40)
    first = tables.settings(rows)
    assert tables.settings(list(rows)) is first
    for changed in ([rows[0], params(top_k=5)], rows[::-1], rows[:1]):
        found, expected = tables.settings(changed), Tables(40).settings(changed)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_the_way_of_drawing_follows_from_the_rows_beside() -> None:
    """All greedy, some drawn, some from a part of the tokens: a row has the same token in all of them."""
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(3, 40)), jnp.float32)
    greedy, plain, cut = params(temperature=0.0), params(), params(top_k=3)
    positions, window = jnp.arange(3, dtype=jnp.int32), jnp.zeros(3)
    guessed = jax.jit(lambda sampling: guess(logits, positions, sampling, None, window))
    seen: dict[tuple[int, int], set[tuple[float, ...]]] = {}
    for rows in (
        [greedy] * 3,
        [plain] * 3,
        [cut] * 3,
        [greedy, plain, plain],
        [plain, greedy, cut],
        [cut, cut, greedy],
    ):
        sampling = sampling_of(rows, 40)
        drawn = jax.tree.map(np.asarray, (compiled(logits, positions, sampling), guessed(sampling)))
        for row, one in enumerate(rows):
            found = (drawn[0].tokens[row], drawn[0].logps[row], drawn[0].kept_logps[row], drawn[1][row])
            seen.setdefault((row, id(one)), set()).add(tuple(map(float, found)))
    assert all(len(found) == 1 for found in seen.values())
    greedily = [next(iter(seen[row, id(greedy)])) for row in range(3)]
    assert [found[0] for found in greedily] == [found[3] for found in greedily] == np.argmax(logits, axis=1).tolist()
    assert all(found[2] == 0.0 for found in greedily)


def test_plain_rows_beside_unusual_ones_are_unchanged() -> None:
    """The two programs give the same bits for a row that asks for nothing."""
    logits = np.random.default_rng(3).normal(size=(64, 40)).astype(np.float32)
    plain = draw(logits, top_p=0.9)
    beside = draw(logits, top_p=0.9, before=[BEFORE], **NEUTRAL)
    np.testing.assert_array_equal(plain.tokens, beside.tokens)
    np.testing.assert_array_equal(plain.logps, beside.logps)
    np.testing.assert_array_equal(plain.kept_logps, beside.kept_logps)
    assert plain.top is None
    assert beside.top is not None


def test_a_tally_kept_up_to_date_is_one_made_anew() -> None:
    rng = np.random.default_rng(4)
    requests = [params(**settings) for settings in PROCESSED]
    prompts = [rng.integers(0, 40, 5).tolist() for _ in requests]
    samples: list[list[int]] = [[] for _ in requests]
    tally = jax.jit(Sampling.tally, static_argnums=1)(
        sampling_of(requests, 40, list(zip(prompts, samples, strict=True))), 40
    )
    logits = jnp.asarray(rng.normal(size=(len(requests), 40)), jnp.float32)
    for _ in range(4):
        assert tally is not None
        tokens, active = rng.integers(0, 40, len(requests)), rng.random(len(requests)) < 0.7
        tally = counted(tally, jnp.asarray(tokens, jnp.int32), jnp.asarray(active))
        samples = [[*s, int(t)] if a else s for s, t, a in zip(samples, tokens, active, strict=True)]
        anew = sampling_of(requests, 40, list(zip(prompts, samples, strict=True)))
        np.testing.assert_array_equal(applied_to(tally, logits), applied(anew, logits))


@pytest.mark.parametrize("vocab", [12, 40])
def test_top_log_probabilities(vocab: int) -> None:
    logits = np.random.default_rng(7).normal(size=(64, vocab)).astype(np.float32)
    top = draw(logits, temperature=0.7, top_logps=4, allowed_token_ids=(1, 2)).top
    assert top is not None
    expected = np.stack([log_softmax(row, 0.7) for row in logits])
    order = np.argsort(-expected, axis=-1)[:, :20]
    np.testing.assert_array_equal(top.tokens, order)
    np.testing.assert_allclose(top.logps, np.take_along_axis(expected, order, axis=-1), atol=1e-6)


@pytest.mark.parametrize("length", [1, 7])
def test_scores_of_given_tokens(length: int) -> None:
    rng = np.random.default_rng(length)
    hidden, head = rng.normal(size=(length, 6)), rng.normal(size=(6, 40))
    targets, temperature = rng.integers(0, 40, length), rng.choice([0.0, 0.6, 1.0], length)
    scored = jax.jit(partial(score, lambda h: h @ head.astype(np.float32), vocab_size=40, top=True, mesh=None))
    logps, top = scored(hidden.astype(np.float32), targets.astype(np.int32), temperature.astype(np.float32))
    every = np.stack([log_softmax(h @ head, t) for h, t in zip(hidden, temperature, strict=True)])
    assert top is not None
    np.testing.assert_array_equal(top.tokens, np.argsort(-every, axis=-1)[:, :20])
    np.testing.assert_allclose(top.logps, -np.sort(-every, axis=-1)[:, :20], atol=1e-4)
    expected = [log_softmax(h @ head, t)[token] for h, t, token in zip(hidden, temperature, targets, strict=True)]
    np.testing.assert_allclose(logps, expected, atol=1e-4)


def test_uniforms_are_uniform_over_keys_and_positions() -> None:
    keys = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (100, 2), np.uint64).astype(np.uint32))
    u = np.stack([np.asarray(jax.jit(uniforms)(keys, jnp.full(100, p, jnp.int32))) for p in range(100)])
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.05
    assert len(np.unique(u)) > 0.99 * u.size


GREEDY = {"temperature": 0.0} | NEUTRAL


@pytest.mark.thorough
@pytest.mark.optimized
@pytest.mark.parametrize(
    "settings",
    often([{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-50}, {"min_p": 0.99999999}, GREEDY], GREEDY),
    ids=str,
)
def test_logits_from_a_product_in_the_same_program(settings: dict[str, Any]) -> None:
    """XLA rounds a product once for its maximum and otherwise where it is subtracted: nothing equals its maximum."""
    rows, vocab = 16, 131
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(rows, vocab)) * 3, jnp.float32)
    sampling = sampling_of([params(**settings)] * rows, vocab)

    @jax.jit
    def program(x: jax.Array, sampling: Sampling) -> tuple[jax.Array, Drawn]:
        capped = 0.37 * (30.0 * jnp.tanh(x / 30.0))
        return capped, sample(capped, jnp.arange(rows, dtype=jnp.int32), sampling, sampling.tally(vocab))

    capped, drawn = jax.device_get(program(logits, sampling))
    np.testing.assert_array_equal(drawn.tokens, capped.argmax(axis=-1))
    expected = [log_softmax(row, 1.0).max() for row in capped]
    np.testing.assert_allclose(drawn.logps, expected, atol=1e-5)


def test_where_rounding_leaves_no_entry_the_largest_is_drawn() -> None:
    """A target that no cumulated mass exceeds, here for its number is 1, must not give an improbable last token."""
    probs = np.full((1, 40), 1e-30, np.float32)
    probs[0, [7, 21]] = 0.3, 1.0
    assert jax.jit(_inverse_cdf)(probs, np.ones(1, np.float32)).tolist() == [21]
