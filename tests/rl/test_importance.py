"""Importance weights by enumeration: over what a sampler draws, the surrogate's gradient is that over the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from posttrain.batch import Batch, TokenStats
from posttrain.losses.policy import DAPO, GSPO, RLOO, VESPO, PolicyLoss
from posttrain.losses.ratios import ImportanceSampling
from posttrain.losses.reduce import sequence_sums
from posttrain.models.quant import dequantized, quantized
from posttrain.rl.assemble import assemble
from posttrain.rollout.sampling import Sampling, Tables, sample
from posttrain.rollout.types import SamplingParams, samples_of
from posttrain.tree import added
from tests.often import often
from tests.rl.helpers import trajectory

VOCAB, DRAWS, PROMPT = 5, 1024, (1,)
DRAW = np.random.default_rng(0)
HIDDEN, HEAD = DRAW.normal(size=(1, 16)), DRAW.normal(size=(16, VOCAB))
LOGITS = jnp.asarray((HIDDEN @ HEAD)[0] * 0.4, jnp.float32)
ADVANTAGES = np.asarray([1.0, -0.7, 0.3, 2.0, -1.5], np.float32)

Drawn = Mapping[int, tuple[float, float]]
"""By token that can be drawn: its log-probability, and `kept_logps`."""


@jax.jit
def drawn(logits: jax.Array, sampling: Sampling) -> Any:
    rows = jnp.broadcast_to(logits, (DRAWS, VOCAB))
    return sample(rows, jnp.full(DRAWS, len(PROMPT)), sampling, sampling.tally(VOCAB))


def engine_draws(**settings: Any) -> Drawn:
    """What the engine's sampler says of all tokens that it draws."""
    params = samples_of(
        SamplingParams(max_tokens=1, temperature=1.0, stop_token_ids=(), key=(0, 0), top_logps=1, **settings),
        n=DRAWS,
        seed=0,
    )
    lengths = [len(PROMPT)] * DRAWS
    found = drawn(LOGITS, Sampling.of(params, [PROMPT] * DRAWS, lengths, max_length=4, tables=Tables(VOCAB)))
    arrays = zip(*map(np.asarray, (found.tokens, found.logps, found.kept_logps)), strict=True)
    return {int(token): (float(logp), float(kept)) for token, logp, kept in arrays}


def copy_draws(logits: jax.Array) -> Drawn:
    """Draws of other weights, which sample from their whole distribution."""
    return {token: (float(logp), 0.0) for token, logp in enumerate(jax.nn.log_softmax(logits))}


def int8_logits() -> jax.Array:
    head = dequantized(*quantized(jnp.asarray(HEAD, jnp.float32), "int8"), "int8", jnp.float32)
    return jnp.asarray(HIDDEN, jnp.float32)[0] @ head * 0.4


CASES: dict[str, Any] = {
    "top_k": lambda: engine_draws(top_k=3),
    "top_p": lambda: engine_draws(top_p=0.8),
    "min_p": lambda: engine_draws(min_p=0.4),
    "repetition_penalty": lambda: engine_draws(repetition_penalty=1.8),
    "logit_bias": lambda: engine_draws(logit_bias={0: 1.0, 2: -1.0}),
    "allowed_token_ids": lambda: engine_draws(allowed_token_ids=(0, 3, 4)),
    "together": lambda: engine_draws(top_k=3, logit_bias={0: 1.0}, repetition_penalty=1.3),
    "int8": lambda: copy_draws(int8_logits()),
    "older_weights": lambda: copy_draws(LOGITS + jnp.asarray([0.5, -0.2, 0.0, 0.3, -0.6])),
}


def rows_of(draws: Drawn) -> Batch:
    """One sample of each token that can be drawn, in a row of its own."""
    group = [
        replace(trajectory(tokens=[*PROMPT, token]), logps=[0.0, logp], kept_logps=[0.0, kept])
        for token, (logp, kept) in draws.items()
    ]
    advantages = np.asarray([[ADVANTAGES[token] for token in draws]])
    batch = assemble(
        [group],
        advantages,
        np.ones_like(advantages, bool),
        like=group[0],
        row_tokens=2,
        num_rows=len(group),
        version=None,
    )
    order = np.argsort([list(draws).index(int(token)) for token in batch.tokens[:, 1]])
    return jax.tree.map(lambda x: x[order], batch)


def expected_gradient(loss: PolicyLoss, draws: Drawn) -> np.ndarray:
    """The gradient of the loss by the policy's logits, over what the sampler draws."""
    batch, policy = rows_of(draws), np.asarray(jax.nn.softmax(LOGITS), np.float64)
    logps = jax.nn.log_softmax(LOGITS)[jnp.asarray(batch.tokens)] * (batch.loss_weight > 0)
    # The total is a sum over the samples; d log p(t) = onehot(t) - p.
    by_logps = jax.grad(lambda x: jnp.asarray(loss(TokenStats(logps=x), batch).loss.total))(logps)
    behaviour = np.exp([logp - kept for logp, kept in draws.values()])
    return (behaviour * np.asarray(by_logps)[:, 1]) @ (np.eye(VOCAB)[list(draws)] - policy)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", often(CASES, "together", "older_weights"))
def test_expectation_over_the_samples_is_that_over_the_policy(case: str) -> None:
    draws = CASES[case]()
    behaviour = np.exp([logp - kept for logp, kept in draws.values()])
    assert_allclose(behaviour.sum(), 1.0, rtol=2e-6, err_msg="the sampler's probabilities of all that it draws")
    policy = np.asarray(jax.nn.softmax(LOGITS), np.float64)
    expected = -sum(policy[t] * ADVANTAGES[t] * (np.eye(VOCAB)[t] - policy) for t in draws)
    for loss in (DAPO, GSPO, RLOO):
        weighted = replace(loss, kl_coef=0.0, importance=ImportanceSampling(high=None))
        assert_allclose(expected_gradient(weighted, draws), expected, atol=1e-6)
        biased = expected_gradient(replace(weighted, importance=None), draws)
        assert np.abs(biased - expected).max() > 5e-5, "without weights it is another"


@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize(("low", "high"), [(None, 1.3), (0.8, None), (0.8, 1.3)])
def test_bounds(level: Any, low: float | None, high: float | None) -> None:
    """By formula, with the metrics: the mean and largest ratio before the bounds, and the share that they change."""
    proximal = np.asarray([[0.9, 0.5, 0.1, -0.6, -0.2, 0.4], [-0.9, 0.3, 0.1, 0.2, -0.1, 0.0]], np.float32)
    behaviour = np.asarray([[-0.9, 0.1, -0.2, -0.1, 0.2, 0.9], [0.9, 0.9, 0.2, 0.1, -0.1, 0.0]], np.float32)
    segments = np.asarray([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)
    mask = np.asarray([[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]], bool)
    difference = np.where(mask, proximal - behaviour, 0.0)
    if level != "token":
        sums = np.asarray(sequence_sums(jnp.asarray(difference), jnp.asarray(segments)))
        counts = np.asarray(sequence_sums(jnp.asarray(mask, jnp.float32), jnp.asarray(segments)))
        sums = sums / np.maximum(counts, 1) if level == "sequence_mean" else sums
        difference = np.take_along_axis(sums, segments, axis=1)
    ratio = np.exp(difference)
    outside = (ratio < (low or 0)) | (ratio > (high or np.inf))
    assert outside[mask].any() and not outside[mask].all()
    for bound in ("truncate", "mask"):
        importance = ImportanceSampling(level=level, bound=bound, low=low, high=high)
        weights, metrics = importance(*map(jnp.asarray, (proximal, behaviour, mask, segments)))
        expected = np.clip(ratio, low, high) if bound == "truncate" else np.where(outside, 0.0, ratio)
        assert_allclose(np.asarray(weights)[mask], expected[mask], rtol=1e-5)
        name = "sampling/importance_sampling_ratio"
        assert_allclose(metrics[f"{name}/mean"].value(), ratio[mask].mean(), rtol=1e-5)
        assert_allclose(metrics[f"{name}/max"].value(), ratio[mask].max(), rtol=1e-5)
        assert_allclose(metrics[f"{name}/out_of_bounds"].value(), outside[mask].mean(), rtol=1e-5)
        assert_allclose(metrics[f"{name}/chi_square"].value(), (ratio[mask].astype(np.float64) ** 2).mean() - 1, 1e-4)
        own = expected[mask].astype(np.float64)
        size = metrics[f"{name}/effective_sample_size"]
        assert_allclose(size.value(), own.sum() ** 2 / (own**2).sum() / own.size, rtol=1e-5)
        # Micro-batches of a row each add up to the whole.
        parts = [
            importance(*(jnp.asarray(x[row : row + 1]) for x in (proximal, behaviour, mask, segments)))
            for row in range(2)
        ]
        halves = [part[1][f"{name}/effective_sample_size"] for part in parts]
        assert_allclose(added(*halves).value(), size.value(), rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_sum"])
def test_weight_of_a_sequence_enters_once(level: Any) -> None:
    """VESPO over 10 tokens with log w = 0.02 each: phi(w) of w = e^0.2 at every level."""
    loss = replace(VESPO, importance=ImportanceSampling(level=level, high=None))
    weight = np.asarray([[0.0] * 2 + [1.0] * 10])
    ones = np.ones(weight.shape, np.int32)
    batch = Batch(
        tokens=ones,
        positions=ones,
        segments=ones,
        loss_weight=weight,
        old_logps=-weight,
        behaviour_logps=-1.02 * weight,
        advantages=weight,
    )
    found = loss(TokenStats(logps=jnp.asarray(-weight)), batch).loss
    assert_allclose(found.value(), np.exp(3 + 2 * 0.2 - 3 * np.exp(0.2)), rtol=1e-5)


def test_one_token_out_of_bounds_rejects_its_sequence() -> None:
    """Only that: not the other sequence of the row, and not for a masked token."""
    difference = np.log(np.asarray([[9.0, 1.1, 1.5, 1.0, 0.9, 9.0], [9.0, 1.0, 1.2, 0.5, 1.0, 0.8]], np.float32))
    segments = np.asarray([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 2, 2]], np.int32)
    mask = np.asarray([[0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]], bool)
    importance = ImportanceSampling(bound="reject", low=0.6, high=1.3)
    arrays = map(jnp.asarray, (difference, np.zeros_like(difference), mask, segments))
    weights, metrics = importance(*arrays)
    expected = np.asarray([[0, 0, 0, 1.0, 0.9, 0], [0, 0, 0, 0, 1.0, 0.8]])
    assert_allclose(np.where(mask, weights, 0.0), expected, rtol=1e-6)
    name = "sampling/importance_sampling_ratio/out_of_bounds"
    assert_allclose(metrics[name].value(), 5 / 9, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"low": 1.0}, "low=1.0 must be at least 0 and below 1"),
        ({"high": 0.5}, "high=0.5 above 1"),
        ({"bound": "mask", "high": None}, "masks nothing"),
        ({"bound": "reject", "level": "sequence_mean"}, "use bound: mask"),
    ],
)
def test_bad_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImportanceSampling(**fields)
