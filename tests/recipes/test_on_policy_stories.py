"""What on-policy distillation is for: on what the student itself writes it is nearer to its teacher."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from posttrain.config_file import load_config
from posttrain.recipes.run import run

FEWER = ("stages.warm.num_steps=40", "stages.own.num_steps=40")


@pytest.mark.thorough
@pytest.mark.optimized
def test_on_policy_beats_off_policy_on_the_students_own_samples(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the same warm start, by the same divergence and steps: mean log(student / teacher) per token, held out."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    after, before = {}, {}
    for name, share in (("own", 1.0), ("rows", 1e-9)):
        output = tmp_path / name
        if name == "rows":
            shutil.copytree(tmp_path / "own" / "0-warm", output / "0-warm")
        loaded = load_config(
            "configs/distill_onpolicy_stories.yaml",
            [f"output={output}", f"stages.own.on_policy={share}", "tensorboard=false", *FEWER],
        )
        result = run(loaded.config, loaded.base_dir).results[1]
        before[name], after[name] = result["before"], result["after"]
    kl = "eval/distill/reverse_kl"
    assert before["own"][kl] == pytest.approx(before["rows"][kl], rel=1e-4)
    assert after["own"][f"{kl}_high"] < after["rows"][f"{kl}_low"]
    assert after["own"][f"{kl}_high"] < before["own"][f"{kl}_low"]
