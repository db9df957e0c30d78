"""The verifier that the monitor of an online stage takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from posttrain.config import RLSection
from posttrain.errors import ConfigError
from posttrain.reward.function import Reward
from posttrain.reward.rubric import Rubric
from posttrain.rl.monitor import Monitor
from tests.rl.streams import HACKS
from tests.stages.runs import rl_stage


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
    return monitor.measure(groups_P, replace(rewards, parts_PG=parts))
