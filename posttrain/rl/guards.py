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
"""Largest differences of sampler and trainer, over tokens that the weights of now have sampled: nats on average; the
share of tokens that may be `OUTLIER_NATS` apart, which bounds the 99th percentile; nats of a single token. The mean is
1e-6 in float32, 5e-3 to 1.3e-2 in bfloat16, with 260,000 parameters 0.02 in int8 and 0.06 in fp8."""


def sampler_disagrees(metrics: Mapping[str, object]) -> Array:
    """Compare the metrics of a loss with `LIMITS`. NaN is beyond every limit; metrics that are not there are within.

    Works inside a program, as `Trainer(refuse=sampler_disagrees)`: a step with such samples changes no weights.
    """
    within = jnp.ones((), bool)
    for name, limit in LIMITS.items():
        if name in metrics:
            within &= _value(metrics[name]) <= limit
    return ~within


def check_agreement(metrics: Mapping[str, object], step: int) -> None:
    """RunError where `sampler_disagrees`, with what was found. Reads the device."""
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
    """The value of a metric, 0 where nothing was counted."""
    if isinstance(metric, Mean):
        return jnp.asarray(metric.total) / jnp.where(jnp.asarray(metric.weight) > 0, metric.weight, 1.0)
    assert isinstance(metric, Max)
    return jnp.asarray(metric.largest)


class NoRewardGuard:
    """Raises RunError after `limit` consecutive steps without any valid reward.

    A single such step may be chance, if functions apply to some rows only. Runs without reward functions learn from
    teachers and are not guarded.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._steps = 0

    def check(self, step: int, rewards: Rewards) -> None:
        none_PG = np.isnan(rewards.total_PG)
        for error in rewards.errors:
            none_PG[error.prompt, error.sample] = True  # also where `on_error` gives it a value
        self._steps = self._steps + 1 if rewards.parts_PG and none_PG.all() else 0
        if self._steps >= self._limit:
            first = next(iter(rewards.errors), None)
            why = "the functions return None: they do not apply"
            if first is not None:
                why = f"reward {first.function}: {first.error}"
            raise RunError(
                f"step {step}: no sample has a reward, in {self._steps} steps in a row, and so nothing is learned "
                f"({why}); see that the rewards apply to the rows of dataset"
            )
