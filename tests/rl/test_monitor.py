"""The monitor of reward hacking raises its alarm soon after simulated hacking begins, and not in honest training."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from posttrain.reward.types import RewardError, Rewards
from posttrain.rl.metrics import SignalWarnings, rollout_metrics
from posttrain.rl.monitor import Alarm, Monitor
from tests.rl.helpers import groups
from tests.rl.streams import CLEAN, HACKS, NUM_GROUPS, Stream

pytestmark = pytest.mark.fast

ONSET, WITHIN = 30, 25
CLEAN_STEPS = 130
"""Steps of each of the eight honest streams: 1,040 together."""


def alarms(stream: Stream, count: int, seed: int = 0) -> list[tuple[int, Alarm]]:
    monitor = stream.monitor()
    steps = enumerate(stream.steps(count, seed))
    return [(step, alarm) for step, (groups_P, rewards) in steps for alarm in monitor.observe(groups_P, rewards)[1]]


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", list(HACKS))
def test_hacking_raises_its_alarm(kind: str) -> None:
    found = alarms(replace(HACKS[kind], onset=ONSET), ONSET + WITHIN)
    assert [alarm.kind for _, alarm in found][:1] == [kind]
    step, alarm = found[0]
    assert ONSET < step < ONSET + WITHIN and alarm.text and 1 <= len(alarm.samples) <= 2


@pytest.mark.thorough
def test_honest_training_raises_almost_none() -> None:
    """A fault: alarms at small changes, or at longer answers whose length the reward does not follow."""
    found = {name: [(step, alarm.kind) for step, alarm in alarms(one, CLEAN_STEPS)] for name, one in CLEAN.items()}
    assert sum(map(len, found.values())) <= 1, found


def test_the_samples_shown_are_those_that_hack() -> None:
    """A fault in the order of samples would show honest ones."""
    stream = replace(HACKS["length"], onset=ONSET)
    monitor = stream.monitor()
    for groups_P, rewards in stream.steps(ONSET + WITHIN, seed=1):
        for alarm in monitor.observe(groups_P, rewards)[1]:
            lengths = np.asarray([[one.num_sampled for one in group] for group in groups_P])
            assert all(lengths[p, g] == lengths[p].max() for p, g in alarm.samples)
            return
    pytest.fail("no alarm")


def test_a_resumed_monitor_goes_on() -> None:
    """Alarms after a resume come at the same step, and those raised before do not come again."""
    stream = replace(HACKS["copy"], onset=ONSET)
    whole, resumed = stream.monitor(), stream.monitor()
    for step, (groups_P, rewards) in enumerate(stream.steps(ONSET + WITHIN, seed=2)):
        if step in (ONSET + 4, ONSET + 20):
            state = json.loads(json.dumps(resumed.state()))
            resumed = stream.monitor()
            resumed.restore(state)
        assert resumed.observe(groups_P, rewards) == whole.observe(groups_P, rewards)
    assert whole.state()["raised"] == ["copy"]


def scored(values: list[list[float]]) -> Rewards:
    array = np.asarray(values, np.float32)
    return Rewards(total_PG=array, parts_PG={"correct": array}, errors=[], metrics={}, extras={})


def test_a_sample_on_which_several_functions_fail_counts_once() -> None:
    kinds = [("one", 0, 1, "error"), ("other", 0, 1, "error"), ("one", 1, 0, "timeout"), ("other", 1, 0, "error")]
    errors = [RewardError(function=f, prompt=p, sample=s, kind=kind, error="x") for f, p, s, kind in kinds]  # type: ignore[arg-type]
    rewards = replace(scored([[1.0, 0.0], [0.0, 1.0]]), errors=errors)
    metrics = rollout_metrics(groups([["a", "b"], ["c", "d"]]), rewards, 0)
    assert (metrics["rewards/errors"], metrics["rewards/timeouts"]) == (2 / 4, 1 / 4)


def watched(values: list[list[float]], stop: str = "stop", steps: int = 5) -> list[list[str]]:
    warnings = SignalWarnings(max_tokens=6, scored=True, converses=False)
    samples = groups([[str(value) for value in row] for row in values])
    cut = [[replace(one, stop=stop) for one in group] for group in samples]  # type: ignore[arg-type]
    return [warnings.observe(cut, scored(values), kl=math.nan) for _ in range(steps)]


def test_warnings_come_once_after_three_steps() -> None:
    equal = watched([[0.0] * 4] * 3)
    assert [len(lines) for lines in equal] == [0, 0, 1, 0, 0]
    assert "reward 0 (correct 0)" in equal[2][0] and "posttrain reward" in equal[2][0]
    assert "0 to 1" in watched([[0.0] * 4, [1.0] * 4])[2][0]
    cut = watched([[0.0, 1.0]] * 3, stop="length")
    assert [len(lines) for lines in cut] == [0, 0, 1, 0, 0] and "sampling.max_tokens=6" in cut[2][0]
    assert watched([[0.0, 1.0]] * 3) == [[]] * 5


def test_a_policy_that_an_update_has_wrecked() -> None:
    """The functions paid before: not they, but the learning rate is named, with the KL where it is measured."""
    warnings, samples = SignalWarnings(max_tokens=6, scored=True, converses=False), groups([["a"] * 4] * 3)
    good, lost = [[1.0, 1.0, 0.0, 1.0]] * 3, [[0.0] * 4] * 3
    lines = [warnings.observe(samples, scored(one), kl=kl) for one, kl in ((good, 0.0), *[(lost, 7.59)] * 4)]
    assert [len(some) for some in lines] == [0, 0, 0, 1, 0]
    (line,) = lines[3]
    assert "0.75 on average" in line and "KL from the reference 7.59 nats" in line
    assert "lower optimizer.learning_rate" in line and "posttrain reward" not in line
    # A policy that has solved all, or hardly fell, is not wrecked.
    for before, after in ((good, [[1.0] * 4] * 3), ([[0.1, 0.0, 0.0, 0.0]] * 3, lost)):
        warnings = SignalWarnings(max_tokens=6, scored=True, converses=False)
        lines = [warnings.observe(samples, scored(one), kl=math.nan) for one in (before, *[after] * 3)]
        assert "learning_rate" not in lines[3][0]


def test_a_reward_that_pays_answers_without_an_end() -> None:
    """At the limit all lengths are equal, so that no correlation shows it; and more tokens would not help."""
    monitor, warnings = (
        Monitor(verifier=None, content={"correct": 1.0}, form={}),
        SignalWarnings(max_tokens=6, scored=True, converses=False),
    )
    draw, raised, lines = np.random.default_rng(0), [], []
    for step in range(45):
        share = float(np.clip((step - 15) / 10, 0, 1))
        cut = draw.random((6, 6)) < share
        samples = [
            [replace(one, stop="length" if c else "stop") for one, c in zip(group, row, strict=True)]
            for group, row in zip(groups([["abc"] * 6] * 6), cut, strict=True)
        ]
        rewards = scored((0.6 + 0.4 * cut + 0.1 * draw.normal(size=(6, 6))).tolist())
        raised += [(step, alarm) for alarm in monitor.observe(samples, rewards)[1]]
        lines += warnings.observe(samples, rewards, kl=math.nan)
    ((step, alarm),) = raised
    assert alarm.kind == "length" and step < 40 and "cut at the limit of tokens, 0% before" in alarm.text
    (line,) = [line for line in lines if "sampling.max_tokens" in line]
    assert "do not ask for an end" in line and "raise sampling.max_tokens" not in line


def test_a_reward_of_length_alone() -> None:
    warnings, lines = SignalWarnings(max_tokens=999, scored=True, converses=False), []
    for groups_P, rewards in HACKS["length"].steps(3, seed=0):
        lengths = np.asarray([[float(one.num_sampled) for one in group] for group in groups_P])
        lines += warnings.observe(groups_P, scored((0.01 * lengths).tolist()), kl=math.nan)
        assert rewards.total_PG.shape[0] == NUM_GROUPS
    assert len(lines) == 1 and "longer ones are learned" in lines[0]


def test_values_that_are_missing() -> None:
    """Samples without rewards, without tokens, and groups of one."""
    monitor = Monitor(verifier="correct", content={"correct": 1.0}, form={})
    for values in ([[np.nan, np.nan]], [[1.0, np.nan]], [[1.0, 0.0]]):
        metrics, raised = monitor.observe(groups([["a", "b"]]), scored(values))
        assert raised == [] and metrics["hacking/alarms"] == 0
