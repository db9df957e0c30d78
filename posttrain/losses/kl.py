"""Per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. With d = ref_logps - logps and
samples of the policy all three estimate the same number: k1 without bias, k3 without bias and never negative, k2 with a
small bias. Their gradients differ, and none but that of k2 is the gradient of what is estimated: see `gradient_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this bound before `exp`, so that no token makes inf; beyond it the gradient is 0."""

KLEstimator = Callable[[Float[Array, "B T"], Float[Array, "B T"], Bool[Array, "B T"]], Float[Array, "B T"]]


def k1(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """-d; 0 where masked out. Its expected gradient is 0, but with bias correction that of KL(policy || reference)."""
    return -_log_ratio(logps, ref_logps, mask)


def k2(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """d^2 / 2; 0 where masked out. Its expected gradient is that of KL(policy || reference), the reverse KL."""
    return 0.5 * jnp.square(_log_ratio(logps, ref_logps, mask))


def k3(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """exp(d) - 1 - d; 0 where masked out. The estimator of GRPO, arXiv:2402.03300 eq. 4.

    Its expected gradient is that of KL(reference || policy), the forward KL; with bias correction that of the reverse.
    """
    d = jnp.clip(_log_ratio(logps, ref_logps, mask), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(d) - d


Gradient = Literal["reverse KL", "forward KL", "half the squared log-ratio", "nothing"]
_GRADIENTS: dict[KLEstimator, tuple[Gradient, Gradient]] = {
    k1: ("nothing", "reverse KL"),
    k2: ("reverse KL", "half the squared log-ratio"),
    k3: ("forward KL", "reverse KL"),
}


def gradient_of(estimator: KLEstimator, *, bias_correction: bool) -> Gradient | None:
    """Name the quantity whose gradient an estimator has in expectation over samples of the policy; None: unknown.

    As a loss by itself the derivative sees only the estimate; `bias_correction` multiplies it by the policy's ratio
    pi / pi_old, whose derivative sees the sampling too: then the gradient is that of the estimator's expectation.
    """
    return _GRADIENTS[estimator][bias_correction] if estimator in _GRADIENTS else None


def _log_ratio(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Array:
    # Both are masked before they meet: inf or NaN at a masked token would otherwise reach the gradient as 0 * inf.
    return jnp.where(mask, ref_logps, 0.0) - jnp.where(mask, logps, 0.0)
