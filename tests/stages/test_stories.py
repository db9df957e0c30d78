"""The configurations of stories, as a stranger runs them; `.ci/run` compares the greedy text after GRPO with
transformers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.statistics import paired_difference
from tests import compilation
from tests.stages.runs import ROOT, inside, posttrain, start


def test_the_configuration_is_found_from_anywhere(tmp_path: Path) -> None:
    small = ("dataset.args.count=20", "eval_dataset.args.count=4")
    with inside(tmp_path):
        checked = posttrain("check", ROOT / "configs" / "sft_stories.yaml", *small)
    assert checked.code == 0 and "20 dataset rows" in checked.out, checked.out + checked.err


def trained(config: str, output: Path, *changes: str) -> dict[str, Any]:
    """The result of the last stage of a configuration, run in a child."""
    process = start("run", ROOT / "configs" / f"{config}.yaml", f"output={output}", "tensorboard=false", *changes)
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0, out
    result: dict[str, Any] = json.loads(max(output.glob("*/result.json")).read_text())
    return result


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that all others go on with, trained once."""
    compilation.quick(False)  # as `optimized`, which is set for a test after the fixtures of its file
    output = tmp_path_factory.mktemp("stories") / "sft_stories"
    result = trained("sft_stories", output)
    assert result["before"]["eval/perplexity"] > 500 and result["after"]["eval/perplexity_high"] < 2
    return output / "0-sft" / "model"


@pytest.mark.thorough
@pytest.mark.optimized
def test_pairs_teach_which_end_is_preferred(base: Path, tmp_path: Path) -> None:
    """Of 200 held-out pairs: the reward of the chosen end is the greater one, and more often than before it is the
    more probable one; neither by accident."""
    result = trained("dpo_stories", tmp_path / "run", f"model.path={base}")
    before, after = result["before"], result["after"]
    assert before["metrics"]["eval/rewards/margins"] == 0 < after["metrics"]["eval/rewards/margins_low"]
    assert after["metrics"]["eval/rewards/accuracies_low"] > 0.8, after["metrics"]
    assert paired_difference(before["preferred"], after["preferred"]).low > 0.2


@pytest.mark.thorough
@pytest.mark.optimized
def test_a_reward_model_learns_which_end_is_preferred(base: Path, tmp_path: Path) -> None:
    """And says with which probability: nearer to the truth than one half for all."""
    result = trained("rm_stories", tmp_path / "run", f"model.path={base}")
    before, after = result["before"], result["after"]
    metrics = after["metrics"]
    assert before["metrics"]["eval/rewards/accuracies_high"] < 0.75 < metrics["eval/rewards/accuracies_low"]
    assert paired_difference(before["preferred"], after["preferred"]).low > 0.1
    assert metrics["eval/calibration/brier_high"] < 0.2 < 0.24 < before["metrics"]["eval/calibration/brier"]


@pytest.mark.thorough
@pytest.mark.optimized
def test_online_pairs_teach_what_is_rewarded(base: Path, tmp_path: Path) -> None:
    """Two thirds of the steps: the reward on 48 held-out openings rises, by no accident."""
    shorter = ("num_steps=20", "eval_dataset.args.count=48", f"model.path={base}")
    result = trained("online_dpo_stories", tmp_path / "run", *shorter)
    assert result["before"]["high"] < result["after"]["low"], result["after"]["mean"]


@pytest.mark.thorough
@pytest.mark.optimized
def test_on_policy_beats_off_policy_on_the_students_own_samples(base: Path, tmp_path: Path) -> None:
    """After the same warm start, by the same divergence and steps: mean log(student / teacher) per token, held out."""
    fewer = ("stages.warm.num_steps=40", "stages.own.num_steps=40")
    teachers = [f"stages.{stage}.teachers.0.path={base}" for stage in ("warm", "own")]
    results: dict[str, Any] = {}
    for name, share in (("own", 1.0), ("rows", 1e-9)):
        output = tmp_path / name
        if name == "rows":
            shutil.copytree(tmp_path / "own" / "0-warm", output / "0-warm")
        changes = (*fewer, *teachers, f"stages.own.on_policy={share}")
        results[name] = trained("distill_onpolicy_stories", output, *changes)
    kl = "eval/distill/reverse_kl"
    before, own, rows = results["own"]["before"], results["own"]["after"], results["rows"]["after"]
    assert before[kl] == pytest.approx(results["rows"]["before"][kl], rel=1e-4)
    for other in (rows, before):
        # The 95 % interval of the difference of two means over samples of their own.
        widths = [(found[f"{kl}_high"] - found[f"{kl}_low"]) / 2 for found in (own, other)]
        assert other[kl] - own[kl] > math.hypot(*widths), (own, other)
