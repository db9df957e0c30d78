"""What on-policy distillation is for: on what the student itself writes it is nearer to its teacher."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.stages.runs import start

FEWER = ("stages.warm.num_steps=40", "stages.own.num_steps=40")


@pytest.mark.thorough
@pytest.mark.optimized
def test_on_policy_beats_off_policy_on_the_students_own_samples(shared: Path, tmp_path: Path) -> None:
    """After the same warm start, by the same divergence and steps: mean log(student / teacher) per token, held out."""
    results: dict[str, Any] = {}
    for name, share in (("own", 1.0), ("rows", 1e-9)):
        output = tmp_path / name
        if name == "rows":
            shutil.copytree(tmp_path / "own" / "0-warm", output / "0-warm")
        changes = (f"output={output}", f"stages.own.on_policy={share}", "tensorboard=false", *FEWER)
        process = start("run", "configs/distill_onpolicy_stories.yaml", *changes)
        out, _ = process.communicate()
        assert process.returncode == 0, out
        results[name] = json.loads((output / "1-own" / "result.json").read_text())
    kl = "eval/distill/reverse_kl"
    before, own, rows = results["own"]["before"], results["own"]["after"], results["rows"]["after"]
    assert before[kl] == pytest.approx(results["rows"]["before"][kl], rel=1e-4)
    for other in (rows, before):
        # The 95 % interval of the difference of two means over samples of their own.
        widths = [(found[f"{kl}_high"] - found[f"{kl}_low"]) / 2 for found in (own, other)]
        assert other[kl] - own[kl] > math.hypot(*widths), (own, other)
