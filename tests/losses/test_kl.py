"""KL estimators: by formula, in expectation, blind to masked tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import Batch, TokenStats
from posttrain.losses.policy import DAPO
from posttrain.losses.ratios import KLEstimator, gradient_of, k1, k2, k3
from posttrain.tree import replace

pytestmark = pytest.mark.fast

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


CLAIMS = {
    "reverse KL": lambda p, ref: jnp.sum(jnp.exp(p) * (p - ref)),
    "forward KL": lambda p, ref: jnp.sum(jnp.exp(ref) * (ref - p)),
    "half the squared log-ratio": lambda p, ref: jnp.sum(jnp.exp(p) * (p - ref) ** 2) / 2,
    "nothing": lambda p, ref: 0.0 * jnp.sum(p),
}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_each_estimator_has_the_gradient_that_it_claims(estimator: KLEstimator, corrected: bool) -> None:
    """The expected gradient of a loss with the penalty, enumerated over the samples of a policy of three tokens."""
    logits = jnp.asarray([0.3, -0.4, 1.0])
    reference = jax.nn.log_softmax(jnp.asarray([1.2, -0.9, 0.1]))
    mask = jnp.ones((3, 1))
    batch = Batch(
        tokens=jnp.zeros((3, 1), jnp.int32),
        positions=jnp.zeros((3, 1), jnp.int32),
        segments=jnp.ones((3, 1), jnp.int32),
        loss_weight=mask,
        ref_logps=reference[:, None],
        advantages=jnp.zeros((3, 1)),
    )
    claim = gradient_of(estimator, bias_correction=corrected)
    assert claim is not None
    loss = replace(DAPO, kl_coef=0.0, kl_estimator=estimator, kl_bias_correction=corrected)
    if claim == "nothing":
        with pytest.raises(ValueError, match="the gradient of k1 is 0 in expectation"):
            replace(loss, kl_coef=1.0)
        object.__setattr__(loss, "kl_coef", 1.0)
    else:
        loss = replace(loss, kl_coef=1.0)

    def expected_loss(logits: jax.Array) -> jax.Array:
        logps = jax.nn.log_softmax(logits)
        probs = jax.lax.stop_gradient(jnp.exp(logps))
        parts = [
            jnp.asarray(loss(TokenStats(logps=logps[:, None]), replace(batch, loss_weight=mask * one)).loss.total)
            for one in jnp.eye(3)[:, :, None]
        ]
        return jnp.sum(probs * jnp.stack(parts))

    analytic = jax.grad(lambda x: CLAIMS[claim](jax.nn.log_softmax(x), reference))(logits)
    np.testing.assert_allclose(jax.grad(expected_loss)(logits), analytic, atol=1e-6)
    assert claim == "nothing" or np.abs(analytic).max() > 0.1
