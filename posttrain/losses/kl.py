"""Per-token estimators k1, k2, k3 of KL(policy || reference) from log-probabilities of sampled tokens, d = ref_logps -
logps. J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before `exp`, to avoid inf; beyond it the gradient is 0."""

KLEstimator = Callable[[Float[Array, "B T"], Float[Array, "B T"], Bool[Array, "B T"]], Float[Array, "B T"]]


def k1(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Unbiased estimator -d; 0 where masked out. Its expected gradient is 0, with bias correction that of the reverse
    KL."""
    return -_log_ratio(logps, ref_logps, mask)


def k2(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Biased estimator d^2 / 2; 0 where masked out. Its expected gradient is that of the reverse KL(policy ||
    reference)."""
    return 0.5 * jnp.square(_log_ratio(logps, ref_logps, mask))


def k3(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Unbiased, non-negative estimator exp(d) - 1 - d; 0 where masked out. Used by GRPO, arXiv:2402.03300 eq. 4.

    Its expected gradient is that of the forward KL(reference || policy); with bias correction that of the reverse KL.
    """
    d = jnp.clip(_log_ratio(logps, ref_logps, mask), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(d) - d


Gradient = Literal[
    "reverse KL",
    "forward KL",
    "half the squared log-ratio",
    "nothing",
    "reverse KL less forward KL",
    "half the squared log-ratio less reverse KL",
]
_GRADIENTS: dict[KLEstimator, tuple[Gradient, Gradient]] = {
    k1: ("nothing", "reverse KL"),
    k2: ("reverse KL", "half the squared log-ratio"),
    k3: ("forward KL", "reverse KL"),
}


def gradient_of(estimator: KLEstimator, *, bias_correction: bool) -> Gradient | None:
    """Name the quantity whose gradient an estimator has in expectation over samples of the policy; None: unknown.

    As a plain loss, differentiation ignores that the policy draws the samples; `bias_correction` multiplies the
    estimate by the policy's ratio pi / pi_old, whose derivative includes sampling: the gradient of the estimator's
    expectation.
    """
    return _GRADIENTS[estimator][bias_correction] if estimator in _GRADIENTS else None


_GRADIENTS_IN_REWARD: dict[KLEstimator, Gradient] = {
    k1: "reverse KL",
    k2: "half the squared log-ratio less reverse KL",
    k3: "reverse KL less forward KL",
}


def gradient_in_reward(estimator: KLEstimator) -> Gradient | None:
    """Name the quantity whose gradient an estimator has in expectation as a penalty in the reward, which only the
    sampling differentiates; None: unknown."""
    return _GRADIENTS_IN_REWARD.get(estimator)


def _log_ratio(logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Array:
    # Mask both first: inf or NaN at a masked token would otherwise reach the gradient as 0 * inf.
    return jnp.where(mask, ref_logps, 0.0) - jnp.where(mask, logps, 0.0)
