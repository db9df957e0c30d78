"""Runs with `profile`: a table that explains the steps, unchanged results, and mistakes in the section."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.stages.runs import lines, posttrain, rl_stage, sft_stage, weights, write_run


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stage", "name"), [pytest.param(sft_stage(num_steps=6), "0-sft", marks=pytest.mark.thorough), (rl_stage(), "0-rl")]
)
def test_recorded_steps_are_explained(tmp_path: Path, stage: dict[str, object], name: str) -> None:
    """Bounds by the clock at both sides, which hold on a busy machine too; weights are those of a run without a
    recording."""
    plain, recorded = write_run(tmp_path / "plain", stage), write_run(tmp_path / "recorded", stage)
    assert posttrain("run", plain).code == 0
    started = time.perf_counter()
    done = posttrain("run", recorded, "profile.steps=[2,3]")
    whole = time.perf_counter() - started
    assert done.code == 0, done.err
    folder = tmp_path / "recorded" / "out" / name / "profile"
    assert "profile of steps 2 to 3" in done.out and str(folder) in done.out
    table = json.loads((folder / "profile.json").read_text())
    assert table["steps"] == [2, 3]
    shares = {phase["name"]: phase["share"] for phase in table["phases"]}
    wanted = {"update", "data"} if name == "0-sft" else {"update", "rollout/prefill", "rewards", "sync", "assemble"}
    assert wanted <= shares.keys() and sum(shares.values()) == pytest.approx(1)
    assert table["programs"] and 0 < table["device_busy"] <= 1 and table["advice"]
    logged = sum(line["step_time"] for line in lines(tmp_path / "recorded" / "out") if line["step"] in (2, 3))
    assert logged / 2 <= 2 * table["seconds"] < whole and 0 < table["explained"] <= 1
    assert weights(tmp_path / "plain" / "out", name) == weights(tmp_path / "recorded" / "out", name)
    # The same run, which is finished, with another section.
    again = posttrain("run", recorded, "profile={}")
    assert again.code == 0 and "NOTHING WAS TRAINED" in again.out


def test_mistakes(tmp_path: Path) -> None:
    file = write_run(tmp_path, sft_stage())
    assert "the first step is after the last one" in posttrain("check", file, "profile.steps=[3,2]").error
    for wrong in ("[1,2,3]", "[0,2]", "soon"):
        refused = posttrain("check", file, f"profile.steps={wrong}")
        assert refused.code == 2 and f"profile.steps={wrong}" in refused.err
    assert posttrain("check", file, "profile={}").code == 0
