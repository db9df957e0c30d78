"""Reward models as whole runs: steps that are judged, and pairs whose lesson reinforcement learning then takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stages.runs import check_data_wait, lines, posttrain, rl_stage, write_run

LETTERS = "abcdefgh"
BYTES = [*range(33, 127), 0xC2, 0xC3, *range(0x80, 0xC0)]
"""Those of the answers of `written`."""


def written(rng: np.random.Generator, low: int) -> str:
    """Three parts of two bytes in any order: `low` of them of bytes below 128, the others one character above."""
    parts = [[*rng.integers(33, 127, 2)] if number < low else [rng.integers(0xA1, 0xFF)] for number in range(3)]
    return "".join(chr(code) for number in rng.permutation(3) for code in parts[number])


def reward_stage(**changes: Any) -> dict[str, Any]:
    stage = {
        "kind": "reward_model",
        "dataset": {"path": "judged.jsonl", "chat": False, "limit": 400},
        "eval_dataset": {"path": "judged.jsonl", "chat": False, "skip": 400},
        "batch_rows": 16,
        "row_tokens": 24,
        "num_steps": 60,
        "optimizer": {"learning_rate": 2e-2, "schedule": "constant"},
    }
    return {**stage, **changes}


def trained(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> list[dict[str, float]]:
    """The metrics of the evaluations before and after."""
    file = write_run(folder, reward_stage(**changes))
    (folder / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = posttrain("run", file)
    assert done.code == 0, done.err
    check_data_wait(folder / "out")
    assert ("steps classified correctly: 0." in done.out) == (changes["loss"] == "process")
    assert ("of right steps" in done.out) != ("of chosen answers" in done.out)
    result = json.loads((folder / "out" / "0-reward_model" / "result.json").read_text())
    return [result[when]["metrics"] for when in ("before", "after")]


@pytest.mark.thorough
def test_steps_are_judged(tmp_path: Path) -> None:
    """A right step repeats the letter of the prompt. Held-out rows have letters of the same kind in other orders."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(480):
        letter, labels = rng.choice(list(LETTERS)), [bool(x) for x in rng.integers(0, 2, rng.integers(1, 5))]
        wrong = [other for other in LETTERS if other != letter]
        steps = [letter if right else str(rng.choice(wrong)) for right in labels]
        rows.append({"prompt": f"{letter}=", "completions": steps, "labels": labels})
    settings = {"num_steps": 80, "batch_rows": 32, "optimizer": {"learning_rate": 1e-2, "schedule": "constant"}}
    before, after = trained(tmp_path, rows, loss="process", **settings)
    assert before["eval/rewards/accuracies_low"] < 0.55 < 0.65 < after["eval/rewards/accuracies_low"], after
    assert after["eval/rewards/margins_low"] > 0.3 and after["eval/calibration/brier_high"] < 0.25
    assert 0 <= after["eval/calibration/ece"] < 0.2 and after["eval/loss_high"] < before["eval/loss_low"]
    for line in lines(tmp_path / "out"):
        if "grad_norm" in line:
            margin = line["rewards/chosen"] - line["rewards/rejected"]
            assert line["rewards/margins"] == pytest.approx(margin, abs=1e-6)


@pytest.mark.thorough
def test_what_pairs_teach_is_learned_from_their_reward_model(tmp_path: Path) -> None:
    """Of two answers the one with more bytes below 128 is chosen: with the reward model the policy writes those."""
    rng, rows = np.random.default_rng(0), []
    for number in range(480):
        few, many = sorted(rng.choice(4, 2, replace=False))
        rows.append({"prompt": f"{number}+1=", "chosen": written(rng, many), "rejected": written(rng, few)})
    _, after = trained(tmp_path / "pairs", rows, loss="bradley_terry")
    assert after["eval/rewards/accuracies_low"] > 0.9
    rewards = [
        {"model": str(tmp_path / "pairs" / "out" / "0-reward_model" / "model")},
        {"fn": "rewards_of_test.py:low", "weight": 0.0},
    ]
    sampling = {"max_tokens": 6, "allowed_token_ids": BYTES}
    stage = rl_stage(rewards=rewards, num_steps=40, group_size=16, sampling=sampling, optimizer={"learning_rate": 2e-2})
    done = posttrain("run", write_run(tmp_path / "rl", stage))
    assert done.code == 0, done.err
    shares = [line["rewards/low/mean"] for line in lines(tmp_path / "rl" / "out") if "grad_norm" in line]
    assert np.mean(shares[:3]) < 0.7 and np.mean(shares[-3:]) > np.mean(shares[:3]) + 0.2, shares
