"""What the monitor of reward hacking measures of a step."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from posttrain.reward.types import RewardError, Rewards
from posttrain.rl.metrics import rollout_metrics
from posttrain.rl.monitor import Monitor
from tests.rl.helpers import groups
from tests.rl.streams import HACKS

pytestmark = pytest.mark.fast


def scored(values: list[list[float]]) -> Rewards:
    array = np.asarray(values, np.float32)
    return Rewards(total_PG=array, parts_PG={"correct": array}, errors=[], metrics={}, extras={})


def test_a_sample_on_which_several_functions_fail_counts_once() -> None:
    kinds = [("one", 0, 1, "error"), ("other", 0, 1, "error"), ("one", 1, 0, "timeout"), ("other", 1, 0, "error")]
    errors = [RewardError(function=f, prompt=p, sample=s, kind=kind, error="x") for f, p, s, kind in kinds]  # type: ignore[arg-type]
    rewards = replace(scored([[1.0, 0.0], [0.0, 1.0]]), errors=errors)
    metrics = rollout_metrics(groups([["a", "b"], ["c", "d"]]), rewards, 0)
    assert (metrics["rewards/errors"], metrics["rewards/timeouts"]) == (2 / 4, 1 / 4)


def test_a_resumed_monitor_goes_on() -> None:
    """A fault: a threshold between high and low rewards that begins anew."""
    whole, resumed = Monitor(verifier="verifier"), Monitor(verifier="verifier")
    for step, (groups_P, rewards) in enumerate(HACKS["verifier"].steps(12, seed=2)):
        if step == 6:
            state = json.loads(json.dumps(resumed.state()))
            resumed = Monitor(verifier="verifier")
            resumed.restore(state)
        np.testing.assert_equal(resumed.measure(groups_P, rewards), whole.measure(groups_P, rewards))


def test_the_slope_of_a_reward_of_length() -> None:
    for groups_P, rewards in HACKS["length"].steps(2, seed=0):
        lengths = np.asarray([[float(one.num_sampled) for one in group] for group in groups_P])
        metrics = Monitor(verifier=None).measure(groups_P, scored((0.01 * lengths).tolist()))
        assert metrics["hacking/length_slope"] == pytest.approx(0.01, rel=1e-5) and rewards.total_PG.size
        spread = np.sqrt(np.mean([lengths.var(axis=1, ddof=1)]))
        assert metrics["hacking/length_spread"] == pytest.approx(spread)
        assert metrics["hacking/length_correlation"] > 0.8


def test_values_that_are_missing() -> None:
    """Samples without rewards, without tokens, and groups of one."""
    monitor = Monitor(verifier="correct")
    for values in ([[np.nan, np.nan]], [[1.0, np.nan]], [[1.0, 0.0]]):
        metrics = monitor.measure(groups([["a", "b"]]), scored(values))
        assert math.isnan(metrics["hacking/length_slope"]) and metrics["hacking/repetition"] == 0
