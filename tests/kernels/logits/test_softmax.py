"""The parts of a softmax against float64, with impossible and nearly certain outcomes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.kernels.logits.divergence import Divergence, divergence
from posttrain.kernels.logits.softmax import NO_LOGIT, Softmax

LOGITS = np.random.default_rng(0).normal(size=(2, 3, 40), scale=3).astype(np.float32)
LOGITS[0, 0, 5:9] = -np.inf
LOGITS[0, 1, 7] = 30.0
LOGITS[1, 2, 0] = 1e4
TEMPERATURES = [0.3, 1.0, 2.0]


def expected(temperature: float) -> np.ndarray:
    """Log-probabilities."""
    scaled = LOGITS.astype(np.float64) / temperature
    relative = scaled - scaled.max(axis=-1, keepdims=True)
    return relative - np.log(np.exp(relative).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_parts_against_float64(temperature: float) -> None:
    found, logs = Softmax.of(jnp.asarray(LOGITS), temperature), expected(temperature)
    assert_allclose(found.log_of(jnp.asarray(LOGITS)), logs, rtol=2e-6, atol=2e-6)
    assert_allclose(found.probs, np.exp(logs), rtol=2e-5, atol=1e-12)
    possible = np.isfinite(logs)
    assert_allclose(np.asarray(found.logs)[possible], logs[possible], rtol=2e-6, atol=2e-6)
    # Of what is impossible the probability is 0, and its product with the logarithm no NaN.
    assert_array_equal(np.asarray(found.probs * found.logs)[~possible], 0.0)
    assert np.all(np.asarray(found.logs)[~possible] <= NO_LOGIT / 2)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_again_is_the_same(temperature: float) -> None:
    logits = jnp.asarray(LOGITS)
    found = Softmax.of(logits, temperature)
    jax.tree.map(assert_array_equal, found, Softmax.with_norm(logits, temperature, found.top, found.norm))


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_divergence_of_what_is_nearly_the_same(temperature: float, beta: float) -> None:
    """Sums before logarithms lose nothing of it, and of the same nothing is left."""
    student = np.where(np.isfinite(LOGITS), LOGITS, -50.0)
    kind = Divergence(beta=beta, temperature=temperature)
    assert_array_equal(divergence(jnp.asarray(student), jnp.asarray(student), kind), np.zeros((2, 3)))
    teacher = student + np.random.default_rng(1).normal(size=student.shape, scale=0.05).astype(np.float32)
    wide = [x.astype(np.float64) / temperature for x in (student, teacher)]
    log_s, log_t = (
        x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True) for x in wide
    )
    want = np.sum(np.exp(log_t) * (log_t - log_s) if beta == 0 else np.exp(log_s) * (log_s - log_t), axis=-1)
    assert_allclose(divergence(jnp.asarray(student), jnp.asarray(teacher), kind), want, rtol=1e-3, atol=2e-6)
