"""Reinforcement learning raises a reward that can be raised; supervised learning learns rows by heart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.stages.runs import check_data_wait, lines, posttrain, rl_stage, sft_stage, write_run


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("rloo", marks=pytest.mark.thorough)])
def test_reward_rises(tmp_path: Path, algorithm: str) -> None:
    stage = rl_stage(algorithm=algorithm, num_steps=25, group_size=8, optimizer={"learning_rate": 5e-2})
    assert posttrain("run", write_run(tmp_path, stage)).code == 0
    rewards = [line["reward"] for line in lines(tmp_path / "out")]
    # Half of the tokens count at random; a step's mean over 16 samples of up to 6 tokens has a deviation of 0.06.
    assert np.mean(rewards[:2]) < 0.65
    assert np.mean(rewards[-4:]) > 0.8


@pytest.mark.fast
def test_loss_falls(tmp_path: Path) -> None:
    stage = sft_stage(num_steps=25, eval_dataset={"path": "rows.jsonl", "chat": False, "limit": 5})
    assert posttrain("run", write_run(tmp_path, stage)).code == 0
    nll = [line["nll"] for line in lines(tmp_path / "out") if "grad_norm" in line]
    assert nll[-1] < nll[0] / 2
    check_data_wait(tmp_path / "out")
    result = json.loads((tmp_path / "out" / "0-sft" / "result.json").read_text())
    assert result["after"]["eval/nll"] < result["before"]["eval/nll"]


@pytest.mark.thorough
def test_each_program_compiles_once_and_the_first_update_is_on_policy(tmp_path: Path) -> None:
    held_out = {"path": "rows.jsonl", "chat": False, "limit": 3}
    stages = [
        sft_stage(num_steps=6, eval_dataset=held_out, eval_every=2),
        rl_stage(
            num_steps=6,
            algorithm={"kind": "grpo", "kl_coef": 0.1, "old_logps": "trainer"},
            eval_dataset=held_out,
            eval_every=2,
            max_prompt_tokens=5,
            overlong="drop",
        ),
    ]
    assert posttrain("run", write_run(tmp_path, *stages)).code == 0
    for stage in ("0-sft", "1-rl"):
        compiled = {
            line["step"]: line["perf/compilations"] for line in lines(tmp_path / "out", stage) if "grad_norm" in line
        }
        assert all(count == 0 for step, count in compiled.items() if step > 1), compiled
    first = next(line for line in lines(tmp_path / "out", "1-rl") if "grad_norm" in line)
    assert first["data/dropped_ratio"] == pytest.approx(14 / 24), "the prompts of two digits"
    assert first["step"] == 1 and abs(first["kl"]) < 1e-6
    assert abs(first["sampling/logp_difference/mean"]) < 1e-4
    assert first["clip_ratio/high_mean"] == first["clip_ratio/low_mean"] == 0
