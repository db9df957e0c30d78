"""Runs of the real pretrained model; `.ci/run` compares its greedy text after GRPO with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.yaml_file import load_config
from posttrain.runs.run import run
from posttrain.statistics import paired_difference
from tests.stages.runs import ROOT, inside, posttrain, start


def test_the_configuration_is_found_from_anywhere(shared: Path, tmp_path: Path) -> None:
    small = ("dataset.args.limit=20", "eval_dataset.args.limit=4")
    with inside(tmp_path):
        checked = posttrain("check", ROOT / "configs" / "grpo_stories.yaml", *small)
    assert checked.code == 0 and "20 prompts" in checked.out, checked.err


@pytest.mark.thorough
def test_pairs_teach_which_answer_is_preferred(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 held-out pairs: more often than by chance the reward of the chosen answer is the greater one, and more
    often than before it is the more probable one; neither by accident."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before, after = evaluations("dpo_stories", tmp_path, monkeypatch)
    assert before["metrics"]["eval/rewards/margins"] == 0 < after["metrics"]["eval/rewards/margins_low"]
    assert after["metrics"]["eval/rewards/accuracies_low"] > 0.5, after["metrics"]
    assert paired_difference(before["preferred"], after["preferred"]).low > 0


@pytest.mark.thorough
def test_a_reward_model_learns_which_answer_is_preferred(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says with which probability: nearer to the truth than one half for all."""
    before, after = evaluations("rm_stories", tmp_path, monkeypatch)
    metrics = after["metrics"]
    assert before["metrics"]["eval/rewards/accuracies_low"] < 0.5 < 0.7 < metrics["eval/rewards/accuracies_low"]
    assert paired_difference(before["preferred"], after["preferred"]).low > 0.1
    assert metrics["eval/calibration/brier_high"] < 0.2 < 0.24 < before["metrics"]["eval/calibration/brier"]
    assert 0 < metrics["eval/calibration/ece"] < 0.2


def evaluations(config: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Before and after the training of a whole configuration."""
    monkeypatch.chdir(ROOT)
    loaded = load_config(f"configs/{config}.yaml", [f"output={folder / 'run'}"])
    (trained,) = run(loaded)
    result = json.loads((folder / "run" / trained / "result.json").read_text())
    return [dict(result[when]) for when in ("before", "after")]


@pytest.mark.thorough
@pytest.mark.optimized
def test_online_pairs_teach_what_is_rewarded(shared: Path, tmp_path: Path) -> None:
    """A quarter of the steps: the reward on 48 held-out openings rises, by no accident."""
    shorter = ("num_steps=8", "eval_dataset.args.limit=48", f"output={tmp_path / 'run'}")
    process = start("run", ROOT / "configs" / "online_dpo_stories.yaml", *shorter)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    result = json.loads((tmp_path / "run" / "0-online_preference" / "result.json").read_text())
    assert result["before"]["high"] < result["after"]["low"], result["after"]["mean"]
