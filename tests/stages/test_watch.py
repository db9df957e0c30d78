"""The watch over online stages: metrics and warnings of a run, the verifier that is chosen, the stop at an alarm."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import RLSection
from posttrain.errors import ConfigError, RunError
from posttrain.reward.function import Reward
from posttrain.reward.rubric import Rubric
from posttrain.rl.monitor import Monitor
from posttrain.stages.online import StepWatch
from tests.rl.streams import HACKS
from tests.stages.runs import lines, posttrain, rl_stage, write_run


def judge(completions: list[str]) -> list[float]:
    return [0.5 for _ in completions]


def correct(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def rubric(**weights: float) -> Rubric:
    functions = {"judge": judge, "correct": correct}
    return Rubric([Reward(function=functions[name], weight=w, timeout_s=1.0) for name, w in weights.items()])


def section(**monitor: Any) -> RLSection:
    stage = rl_stage(dataset={"path": "rows.jsonl"}, monitor=monitor)
    return RLSection.model_validate({name: value for name, value in stage.items() if name != "kind"})


@pytest.mark.thorough
def test_a_run_with_an_equal_reward_warns_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def constant(completions):\n    return [0.5 for _ in completions]\n")
    rewards = [{"fn": str(tmp_path / "mine.py:constant")}, {"fn": "rewards_of_test.py:strict", "weight": 0.0}]
    outcome = posttrain("run", write_run(tmp_path, rl_stage(rewards=rewards, num_steps=5)))
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("no group has different rewards, for 3 steps") == 1
    assert "WARNING, step 3: " in outcome.out and "constant 0.5" in outcome.out
    for line in lines(tmp_path / "out"):
        assert line["hacking/alarms"] == 0 and "hacking/false_passes" in line


def test_the_verifier_is_a_reward_with_weight_0() -> None:
    assert "hacking/false_passes" in metrics(section(), judge=1.0, correct=0.0)
    assert "hacking/false_passes" not in metrics(section(), judge=1.0, correct=1.0)
    with pytest.raises(ConfigError, match="no reward is called 'corect'; did you mean 'correct'"):
        Monitor.of(section(verifier="corect"), rubric(judge=1.0, correct=0.0).rewards)
    with pytest.raises(ConfigError, match="the reward judge has weight 1, so training follows it"):
        Monitor.of(section(verifier="judge"), rubric(judge=1.0, correct=0.0).rewards)


def metrics(given: RLSection, **weights: float) -> dict[str, float]:
    monitor = Monitor.of(given, rubric(**weights).rewards)
    assert monitor is not None
    groups_P, rewards = next(HACKS["verifier"].steps(1, seed=0))
    parts = {"judge": rewards.parts_PG["judge"], "correct": rewards.parts_PG["verifier"]}
    return monitor.observe(groups_P, replace(rewards, parts_PG=parts))[0]


def test_an_alarm_is_loud_and_stops_if_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    stream = replace(HACKS["copy"], onset=25)
    warn, stop = (StepWatch(section(on_alarm=what), stream.monitor()) for what in ("warn", "stop"))
    for step, (groups_P, rewards) in enumerate(stream.steps(45, seed=0)):
        warn(step, groups_P, rewards, kl=math.nan)
    printed = capsys.readouterr().out
    assert printed.count("REWARD HACKING (copy), step ") == 1 and "Samples: 1 for '" in printed
    steps = list(stream.steps(45, seed=0))
    with pytest.raises(RunError, match="reward hacking: .* copied from the prompt"):
        [stop(step, groups_P, rewards, kl=math.nan) for step, (groups_P, rewards) in enumerate(steps)]
