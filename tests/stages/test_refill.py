"""Runs with dynamic sampling and a curriculum: their metrics, a resumed run, and configurations that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.config import RLSection
from posttrain.config.yaml_file import load_config
from posttrain.errors import ConfigError
from posttrain.rl.collector import Refill
from posttrain.runs.prepare import prepare
from tests.stages.runs import lines, posttrain, rl_stage, weights, write_run

BELOW = '''

def halves(trajectories, **_):
    """Passes with a chance by prompt: some groups are mixed, some not."""
    return [float((sum(t.tokens) + t.sample) % 8 < t.example.index % 9) for t in trajectories]


def no_filter(rewards_PG):
    return rewards_PG


def any_reward(rewards_PG):
    return rewards_PG.max(axis=1) > 0
'''
SELECTED: dict[str, Any] = {
    "rewards": [{"fn": "rewards_of_test.py:halves", "isolate": "thread"}],
    "refill": {"limit": 2},
    "curriculum": {"pools": [0.0, 0.3, 0.7, 1.0], "draw": [0.2, 0.6, 0.2]},
    "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    "checkpoint_every": 3,
}


def write(folder: Path, **changes: Any) -> Path:
    file = write_run(folder, rl_stage(**{**SELECTED, **changes}))
    with (folder / "rewards_of_test.py").open("a") as rewards:
        rewards.write(BELOW)
    return file


@pytest.mark.thorough
def test_a_resumed_run_ends_as_never_stopped(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert posttrain("run", write(whole, num_steps=6)).code == 0
    for steps in (3, 6):
        assert posttrain("run", write(resumed, num_steps=steps)).code == 0
    assert weights(resumed / "out", "0-rl") == weights(whole / "out", "0-rl")
    told = [line for line in lines(whole / "out") if "grad_norm" in line]
    names = ("reward", "frac_mixed", "curriculum/pool_1", "curriculum/seen", "sampling/refill/groups")
    again = [line for line in lines(resumed / "out") if "grad_norm" in line]
    assert [[line[name] for name in names] for line in told] == [[line[name] for name in names] for line in again]
    assert sum(line["sampling/refill/groups"] for line in told) > 0
    assert told[-1]["curriculum/seen"] > told[0]["curriculum/seen"] > 0
    for line in told:
        assert line["groups/kept"] + line["sampling/refill/short"] == 2
        assert line["groups/kept"] + line["groups/filtered"] == 2 + line["sampling/refill/groups"]
        assert line["frac_mixed"] + line["frac_all_good"] + line["frac_all_bad"] == pytest.approx(1)
        assert line["sampling/refill/waves"] <= 2
        assert line["rollout/late_compilations"] == 0, "a wave has the shapes of a step"


def section(file: Path, *overrides: str) -> RLSection:
    (stage,) = prepare(load_config(file, [f"stages.0.{change}" for change in overrides]), offline_ok=True).config.stages
    assert isinstance(stage, RLSection)
    return stage


def test_fields_and_refusals(tmp_path: Path) -> None:
    file = write(tmp_path)
    assert "; up to 2 waves of further groups" in " ".join(posttrain("check", file).out.split())
    assert Refill.of(section(file, "refill=null")) is None
    made = Refill.of(section(file, "refill.limit=5", "refill.keep=rewards_of_test.py:any_reward"))
    assert made is not None and made.limit == 5
    refused = {
        "refill.keep=rewards_of_test.py:no_filter": "refill.keep: .*no_filter must return true or false for each",
        "refill.keep=rewards_of_test.py:halves": r"refill.keep: .*halves\(rewards_PG\) raised AttributeError",
        "curriculum.pools=[0, 0.5, 0.5, 1]": "must rise from 0 to 1",
        "curriculum.pools=[0, 1]": "draw has 3 shares, and pools=.* bound 1 pools",
        "curriculum.draw=[0.2, 0.2, 0.2]": "adds up to 0.6; make it 1",
        "dataset.shuffle=false": "dataset.shuffle=false has no effect with curriculum",
    }
    for change, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            section(file, change)
    with pytest.raises(ConfigError, match="refill needs rewards"):
        section(file, "rewards=[]", "algorithm=distill", "teachers=[{path: x}]")
