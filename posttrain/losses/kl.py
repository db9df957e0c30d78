"""Per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. With d = ref_logps - logps and
samples of the policy all three estimate the same number: k1 without bias, k3 without bias and never negative, k2 with a
small bias. Their gradients differ: that of k2 is right in expectation, that of k1 is 0 in expectation.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this bound before `exp`, so that no token makes inf; beyond it the gradient is 0."""

KLEstimator = Callable[[Float[Array, "B T"], Float[Array, "B T"], Bool[Array, "B T"]], Float[Array, "B T"]]


def k1(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """-d; 0 where masked out."""
    return -_log_ratio(logps, ref_logps, mask)


def k2(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """d^2 / 2; 0 where masked out."""
    return 0.5 * jnp.square(_log_ratio(logps, ref_logps, mask))


def k3(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """exp(d) - 1 - d; 0 where masked out. The estimator of GRPO, arXiv:2402.03300 eq. 4."""
    d = jnp.clip(_log_ratio(logps, ref_logps, mask), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(d) - d


def _log_ratio(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Array:
    # Both are masked before they meet: inf or NaN at a masked token would otherwise reach the gradient as 0 * inf.
    return jnp.where(mask, ref_logps, 0.0) - jnp.where(mask, logps, 0.0)
