"""Guards of online training: sampler and trainer agree (a veto inside the step), and samples have rewards."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array

from posttrain.errors import RunError
from posttrain.losses.policy import OUTLIER_NATS
from posttrain.rl.types import Rewards
from posttrain.tree import Max, Mean

LIMITS = {
    "sampling/logp_difference/mean": 0.1,
    "sampling/logp_difference/outliers": 0.01,
    "sampling/logp_difference/max": 10.0,
}
"""Maximum difference of sampler and trainer log-probabilities over tokens sampled with the current weights: mean in
nats, share of tokens beyond `OUTLIER_NATS` (bounds the 99th percentile), and maximum in nats. Typical means: 1e-6 in
float32, 5e-3 to 1.3e-2 in bfloat16; with 260,000 parameters 0.02 in int8 and 0.06 in fp8."""


def sampler_disagrees(metrics: Mapping[str, object]) -> Array:
    """Compare a loss's metrics with `LIMITS`. NaN exceeds every limit; missing metrics pass.

    Traceable, for `Trainer(refuse=sampler_disagrees)`: such a step changes no weights.
    """
    within = jnp.ones((), bool)
    for name, limit in LIMITS.items():
        if name in metrics:
            within &= _value(metrics[name]) <= limit
    return ~within


def check_agreement(metrics: Mapping[str, object], step: int) -> None:
    """Raise RunError with the measured differences if `sampler_disagrees`. Reads from the device."""
    if not bool(sampler_disagrees(metrics)):
        return
    mean, outliers, largest = (float(_value(metrics[name])) for name in LIMITS)
    raise RunError(
        f"step {step}: sampler and trainer disagree by {mean:.3f} nats per token on average, by more than "
        f"{OUTLIER_NATS} on {outliers:.1%} of the tokens, by {largest:.1f} at most (limits: "
        f"{', '.join(f'{limit:g}' for limit in LIMITS.values())}); the weights are those before the step. Look for "
        "stale weights, another temperature, or another precision in the engine"
    )


def _value(metric: object) -> Array:
    """Value of a metric; 0 without any counted token."""
    if isinstance(metric, Mean):
        return jnp.asarray(metric.total) / jnp.where(jnp.asarray(metric.weight) > 0, metric.weight, 1.0)
    assert isinstance(metric, Max)
    return jnp.asarray(metric.largest)


class NoRewardGuard:
    """Raises RunError after `limit` consecutive steps with no valid reward.

    A single such step may be chance if functions apply to some rows only. Runs without reward functions learn from
    teachers and are not guarded.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._steps = 0

    def check(self, step: int, rewards: Rewards) -> None:
        none_PG = np.isnan(rewards.total_PG)
        for error in rewards.errors:
            none_PG[error.prompt, error.sample] = True  # including samples whose reward comes from `on_error`
        self._steps = self._steps + 1 if rewards.parts_PG and none_PG.all() else 0
        if self._steps >= self._limit:
            first = next(iter(rewards.errors), None)
            why = "the functions return None: they do not apply"
            if first is not None:
                why = f"reward {first.function}: {first.error}"
            raise RunError(
                f"step {step}: no sample has a reward for {self._steps} consecutive steps, so there is no training "
                f"signal ({why}); check that the rewards apply to the rows of dataset"
            )
