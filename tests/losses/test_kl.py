"""KL estimators: by formula, in expectation, blind to masked tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.losses.kl import KLEstimator, k1, k2, k3

LOGPS = jnp.array([[-0.5, -1.0, -2.0, -3.0]])
REF = jnp.array([[-0.7, -0.4, -2.0, -5.0]])
MASK = jnp.array([[True, True, True, False]])


def test_by_formula() -> None:
    d = np.array([-0.2, 0.6, 0.0])
    np.testing.assert_allclose(k1(LOGPS, REF, MASK)[0], [*-d, 0], atol=1e-7)
    np.testing.assert_allclose(k2(LOGPS, REF, MASK)[0], [*(d**2 / 2), 0], atol=1e-7)
    np.testing.assert_allclose(k3(LOGPS, REF, MASK)[0], [*(np.exp(d) - 1 - d), 0], atol=1e-7)


def test_expectation_is_the_kl() -> None:
    """Over the whole distribution k1 and k3 are exact; k2 is near where the policies are near."""
    policy = jax.nn.log_softmax(jnp.array([0.3, -0.4, 1.0, 0.1]))
    reference = jax.nn.log_softmax(jnp.array([0.2, -0.3, 0.9, 0.3]))
    exact = float(jnp.sum(jnp.exp(policy) * (policy - reference)))
    everywhere = jnp.ones((1, 4), bool)

    def expected(estimator: KLEstimator) -> float:
        return float(jnp.sum(jnp.exp(policy) * estimator(policy[None], reference[None], everywhere)[0]))

    np.testing.assert_allclose(expected(k1), exact, rtol=1e-5)
    np.testing.assert_allclose(expected(k3), exact, rtol=1e-4)
    np.testing.assert_allclose(expected(k2), exact, rtol=0.2)


@pytest.mark.parametrize("estimator", [k1, k2, k3])
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf, -jnp.inf, 1e30])
def test_masked_tokens_poison_nothing(estimator: KLEstimator, poison: float) -> None:
    def total(logps: jax.Array, ref: jax.Array) -> jax.Array:
        return estimator(logps, ref, MASK).sum()

    clean = jax.value_and_grad(total)(LOGPS, REF)
    for logps, ref in [(LOGPS.at[0, 3].set(poison), REF), (LOGPS, REF.at[0, 3].set(poison))]:
        dirty = jax.value_and_grad(total)(logps, ref)
        np.testing.assert_array_equal(clean[0], dirty[0])
        np.testing.assert_array_equal(clean[1], dirty[1])


def test_k3_stays_finite() -> None:
    grad = jax.grad(lambda logps: k3(logps, jnp.zeros((1, 1)), jnp.ones((1, 1), bool)).sum())(jnp.full((1, 1), -500.0))
    assert np.isfinite(grad).all()
