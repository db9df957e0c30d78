"""Online preference as whole runs: what its fields do, learning, resuming."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.yaml_file import load_config
from posttrain.errors import ConfigError
from posttrain.losses.preference import PreferenceLoss
from posttrain.rl.store import read_record
from posttrain.runs.prepare import prepare
from posttrain.stages.online_preference import OnlinePreferenceInputs
from tests.stages.runs import INIT, lines, posttrain, rl_stage, steps, weights, write_run

STAGE = "0-online_preference"


def online_stage(**changes: Any) -> dict[str, Any]:
    return rl_stage(**{"kind": "online_preference", "row_tokens": 32, "micro_batch_rows": 1, **changes})


def inputs_of(folder: Path, *overrides: str) -> OnlinePreferenceInputs:
    file = write_run(folder, online_stage())
    loaded = load_config(file, [f"stages.0.{text}" for text in overrides])
    made = prepare(loaded, offline_ok=False).stages[0]
    assert isinstance(made, OnlinePreferenceInputs)
    return made


def test_fields(tmp_path: Path) -> None:
    inputs = inputs_of(tmp_path)
    assert inputs.loss == PreferenceLoss() and inputs.max_prompt_tokens == 10 and inputs.section.step_rows == 2
    assert inputs_of(tmp_path, "loss={kind: ipo, beta: 0.3}").loss == PreferenceLoss(kinds=("ipo",), beta=0.3)
    assert inputs_of(tmp_path, "max_prompt_tokens=7").max_prompt_tokens == 7
    assert inputs_of(tmp_path, "prompts_per_step=3").section.step_rows == 3
    assert [reward.weight for reward in inputs_of(tmp_path, "rewards.0.weight=0.5").rubric.rewards] == [0.5]
    assert inputs_of(tmp_path).share_prompts and not inputs_of(tmp_path, "share_prompts=false").share_prompts
    checked = posttrain("check", tmp_path / "run.yaml")
    assert "24 prompts, 4 steps of 2 prompts x 4 samples = 8" in checked.out, checked.err
    assert "the best against the worst by loss sigmoid" in checked.out


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("loss=kto", "loss: 'kto' is not for online preference"),
        ("loss=orpo", "loss: 'orpo' is not for online preference"),
        ("loss=simpo", "compares two samples against the start of the stage"),
        ("loss=sigmod", "did you mean 'sigmoid'"),
        ("loss={kind: sigmoid, beta: -1}", "beta=-1.0"),
        ("group_size=1", "a pair needs two samples of one prompt"),
        ("rewards=[]", "set rewards"),
        ("sampling.max_tokens=16", "must be less than half of row_tokens=32"),
        ("sampling.temperature=0", "without a training signal"),
        ("max_prompt_tokens=11", "must fit half of row_tokens=32"),
        ("dataset.completion='{answer}'", "samples its completions"),
        ("rollout.cache_tokens=31", "must be at least 32: half of row_tokens=32"),
        ("rewards.0.weight=0", "every weight is 0"),
    ],
)
def test_what_is_refused(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        inputs_of(tmp_path, override)
    assert words in str(error.value)


def test_dropout_is_refused(tmp_path: Path) -> None:
    model = {"init": INIT, "tokenizer": "bytes", "lora": {"rank": 2, "dropout": 0.1}}
    assert "model.lora.dropout=0.1" in posttrain("check", write_run(tmp_path, online_stage(), model=model)).error


@pytest.mark.thorough
def test_a_run_is_evaluated_and_goes_on_bitwise_from_a_checkpoint(tmp_path: Path) -> None:
    held_out = {"path": "rows.jsonl", "chat": False, "limit": 5}
    stage = online_stage(
        checkpoint_every=2,
        eval_dataset=held_out,
        loss={"kind": "sigmoid", "beta": 0.5},
        samples_every=1,
        rollout={"warm_up": False},
    )
    file = write_run(tmp_path / "whole", stage)
    done = posttrain("run", file)
    assert done.code == 0, done.err
    output = tmp_path / "whole" / "out"
    assert steps(output, STAGE) == [1, 2, 3, 4]
    told = lines(output)
    trained = [line for line in told if "grad_norm" in line]
    names = {"reward", "reward_std", "rewards/low/mean", "frac_ties", "sampling/logp_difference/mean", "kl"}
    names |= {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")}
    assert all(names <= set(line) for line in trained)
    assert abs(trained[0]["loss"] - 0.6931) < 1e-3 and trained[-1]["loss"] != trained[0]["loss"]
    assert {"eval/reward", "eval/reward_low", "eval/rewards/low/mean"} <= set(told[0])
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert {sample["extra"]["role"] for sample in samples} == {-1, 0, 1}
    recorded = read_record(output / STAGE / "trajectories", 4)
    assert recorded.roles_PG is not None and {*recorded.roles_PG.ravel().tolist()} == {-1, 0, 1}
    assert recorded.advantages_PG is None

    halves = write_run(tmp_path / "halves", stage)
    shutil.copytree(output, tmp_path / "halves" / "out")
    resumed = tmp_path / "halves" / "out" / STAGE
    shutil.rmtree(resumed / "model")
    shutil.rmtree(resumed / "checkpoints" / "4")
    again = posttrain("run", halves)
    assert again.code == 0 and "resuming after step 2 of 4" in again.out, again.err
    assert weights(tmp_path / "halves" / "out", STAGE) == weights(output, STAGE)
    told_again = [line for line in lines(tmp_path / "halves" / "out") if "grad_norm" in line]
    assert [line["loss"] for line in told_again][-2:] == [line["loss"] for line in trained][-2:]


@pytest.mark.thorough
def test_it_learns_what_is_rewarded(tmp_path: Path) -> None:
    """From one half of low tokens to most of them."""
    held_out = {"path": "rows.jsonl", "chat": False, "limit": 12}
    stage = online_stage(
        num_steps=40,
        prompts_per_step=8,
        micro_batch_rows=8,
        eval_dataset=held_out,
        eval_sampling={"max_tokens": 6, "temperature": 1.0},
    )
    done = posttrain("run", write_run(tmp_path, stage))
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "out" / STAGE / "result.json").read_text())
    assert result["before"]["mean"] < 0.7 and result["after"]["low"] > max(0.8, result["before"]["high"]), result
