"""What is said of before and after, and what a stage leaves out or does otherwise than written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.config.yaml_file import load_config
from posttrain.runs.run import _difference, _print_answers
from posttrain.stages.table import row_notes
from tests.stages.runs import lines, posttrain, rl_stage, sft_stage, write_run

pytestmark = pytest.mark.fast


def result(before: list[Any], after: list[Any]) -> dict[str, Any]:
    keys = [f"p{n}" for n in range(len(after))]
    return {"before": {"values": {"reward": before}}, "after": {"values": {"reward": after}, "prompts": keys}}


def test_difference_is_paired() -> None:
    """Prompts differ much and each gains a little: the pairs show it. Prompts without a reward are left out."""
    before = [0.1 * i for i in range(10)]
    gain = [0.04, 0.05, 0.06, 0.05, 0.04, 0.06, 0.05, 0.05, 0.04, 0.06]
    said = _difference(
        result([*before, None, 0.5], [*(b + g for b, g in zip(before, gain, strict=True)), 1.0, None]), "reward"
    )
    assert said.startswith("difference over the same prompts: +0.050 (+0.044 to +0.056), p < 0.001, significant")
    noise = _difference(result([0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]), "reward")
    assert noise.startswith("difference over the same prompts: +0.000 (") and noise.endswith(
        "p = 1.000, not significant"
    )
    assert "fewer than two prompts" in _difference(result([0.0, None], [1.0, 1.0]), "reward")


def test_numbers_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    sample = {"prompt": "p", "completion": "c", "reward": 0.019999999552965164}
    one: dict[str, Any] = {"measure": "reward", "n": 2, "mean": 0.02, "low": 0.0, "high": 0.1, "samples": [sample] * 2}
    one |= {"prompts": ["a", "b"], "values": {"reward": [0.02, 0.02]}}
    one["metrics"] = {"eval/rewards/exact/mean": 0.375, "eval/rewards/short/mean": 0.5}
    other = {**one, "samples": [{**sample, "reward": None}, {**sample, "reward": 1.0}]}
    other["values"] = {"reward": [None, 1.0]}
    _print_answers("0-rl", {"before": one, "after": other}, None)
    shown = capsys.readouterr().out
    assert "held-out reward, 2 rows, 2 prompts" in shown and "mean exact" in shown and "0.375" in shown
    assert "0.0199" not in shown and " 0.02 " in shown and " - " in shown and " 1 " in shown


@pytest.mark.parametrize(
    ("shards", "notes"),
    [
        (1, []),
        (
            3,
            [
                "0-sft: micro_batch_rows=2 becomes 3, a multiple of mesh.data x mesh.fsdp x mesh.expert = 3",
                "1-rl: ",
            ],
        ),
        (
            4,
            ["0-sft: micro_batch_rows=2 becomes 4, a multiple of mesh.data x mesh.fsdp x mesh.expert = 4"],
        ),
    ],
)
def test_row_notes(tmp_path: Path, shards: int, notes: list[str]) -> None:
    file = write_run(tmp_path, sft_stage(micro_batch_rows=2), rl_stage(), sft_stage(name="whole"))
    found = row_notes(load_config(file), shards)
    assert len(found) == len(notes) and all(f.startswith(n) for f, n in zip(found, notes, strict=True)), found


@pytest.mark.thorough
def test_rows_left_out_are_counted_and_said_once(tmp_path: Path) -> None:
    data = {"path": "rows.jsonl", "chat": False}
    stage = sft_stage(num_steps=2, overlong="drop", row_tokens=7, eval_dataset={**data, "skip": 8, "limit": 8})
    outcome = posttrain("run", write_run(tmp_path, stage))
    assert outcome.code == 0, outcome.err
    # `9+1=10` and longer: 8 tokens with the beginning and the end.
    train, held_out = "15 of 24 rows of", "7 of 8 rows of"
    assert outcome.out.count(train) == outcome.out.count(held_out) == 1, outcome.out
    found = [line["data/dropped_ratio"] for line in lines(tmp_path / "out") if "grad_norm" in line]
    assert found == [15 / 24] * 2
