"""Defaults: one set for YAML and Python, lengths that fit the model, passes over the data as steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import posttrain as pt
from posttrain.config import OnlineSection, RunConfig, SFTSection
from posttrain.config.yaml_file import load_config
from posttrain.runs.lengths import fit_lengths
from posttrain.runs.prepare import prepare
from tests.stages.runs import INIT, ROWS, inside, posttrain, sft_stage, steps, write_run

PYTHON: dict[str, Any] = {
    "sft": pt.SFT,
    "distill": pt.Distill,
    "preference": pt.Preference,
    "reward_model": pt.RewardModel,
    "rl": pt.RL,
    "online_preference": pt.OnlinePreference,
}
NEEDED: dict[str, dict[str, Any]] = {
    "distill": {"teachers": [{"path": "teacher"}]},
    "rl": {"rewards": [{"fn": "a.py:b"}]},
    "online_preference": {"rewards": [{"fn": "a.py:b"}]},
}


def both(kind: str, tmp_path: Path, model: dict[str, Any], **fields: Any) -> tuple[RunConfig, RunConfig]:
    """The same keys as YAML and as Python keywords."""
    stage = {"dataset": {"path": "rows.jsonl"}, **NEEDED.get(kind, {}), **fields}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"output": "out", "seed": 3, "model": model, "kind": kind, **stage}))
    return load_config(file).config, PYTHON[kind](model=model, output="out", seed=3, **stage).config


@pytest.mark.parametrize("kind", PYTHON)
@pytest.mark.parametrize("lora", [False, True])
def test_yaml_and_python_have_the_same_defaults(kind: str, lora: bool, tmp_path: Path) -> None:
    model = {"path": "student", **({"lora": {"rank": 4}} if lora else {})}
    written, called = both(kind, tmp_path, model)
    assert written == called
    rate = written.stages[0].optimizer.learning_rate
    assert rate == pytest.approx({"sft": 2e-5, "distill": 2e-5, "reward_model": 1e-5}.get(kind, 1e-6) * 10**lora)
    more: dict[str, Any] = {"optimizer": {"warmup_steps": 1}}
    more |= {"sampling": {"max_tokens": 30}} if isinstance(written.stages[0], OnlineSection) else {"num_epochs": 2.5}
    changed, called = both(kind, tmp_path, model, **more)
    assert changed == called != written
    assert changed.stages[0].optimizer.learning_rate == rate


def lengths(kind: str, context: int, tmp_path: Path, **fields: Any) -> tuple[int, int]:
    config, _ = both(kind, tmp_path, {"path": "student"}, **fields)
    stage = fit_lengths(config, context).stages[0]
    return stage.row_tokens, stage.sampling.max_tokens if isinstance(stage, OnlineSection) else 0


def test_default_lengths_fit_the_model(tmp_path: Path) -> None:
    def rl(context: int, **fields: Any) -> tuple[int, int]:
        return lengths("rl", context, tmp_path, **fields)

    assert rl(40_000) == (1024, 512)
    assert rl(40_000, sampling={"max_tokens": 2000}) == (2512, 2000)
    assert rl(2048, sampling={"max_tokens": 2000}) == (2048, 2000)
    assert rl(512) == rl(512, sampling={"temperature": 0.5}) == (512, 256)
    assert rl(512, sampling={"max_tokens": 100}) == (512, 100)
    assert rl(512, row_tokens=128) == (128, 64)
    assert rl(512, row_tokens=600) == (600, 300), "what is given is an error later, and not lowered"
    assert lengths("online_preference", 40_000, tmp_path) == (2048, 512)
    assert lengths("online_preference", 512, tmp_path) == (512, 128)
    assert lengths("sft", 512, tmp_path)[0] == 512 and lengths("sft", 40_000, tmp_path)[0] == 1024
    with pytest.raises(pt.ConfigError, match="max_position_embeddings=512 of the model, which does not hold"):
        rl(512, sampling={"max_tokens": 600})
    config, _ = both("rl", tmp_path, {"path": "student"}, eval_sampling={"temperature": 0.5})
    evaluation = fit_lengths(config, 512).stages[0]
    assert isinstance(evaluation, OnlineSection) and evaluation.eval_sampling is not None
    assert (evaluation.eval_sampling.max_tokens, evaluation.eval_sampling.temperature) == (256, 0.5)


def test_mistakes(tmp_path: Path) -> None:
    for kind, fields, words in (
        ("sft", {"num_steps": 3, "num_epochs": 2}, "num_steps=3 and num_epochs=2 both say how long"),
        ("distill", {"on_policy": 0.5, "sampling": {}}, "give num_steps"),
        ("distill", {"teachers": [{"path": "t", "tokenizer": "align"}]}, "give num_steps"),
        ("rl", {"num_epochs": 2}, "num_epochs: unknown field"),
    ):
        with pytest.raises(pt.ConfigError, match=words):
            both(kind, tmp_path, {"path": "student"}, **fields)


def test_epochs_of_every_offline_kind(tmp_path: Path) -> None:
    """Without packing each sequence or pair has a row: the steps are passes * count / batch_rows, rounded up."""
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"prompt": "a", "chosen": "b" * (i + 1), "rejected": "c"}) + "\n" for i in range(10))
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    common = {"packing": False, "batch_rows": 4, "row_tokens": 64, "num_epochs": 1.5}
    for kind, path, count in (("sft", "rows", 24), ("preference", "pairs", 10), ("reward_model", "pairs", 10)):
        stage = {"kind": kind, "dataset": {"path": f"{path}.jsonl", "chat": False}, **common}
        file = tmp_path / "run.yaml"
        run = {"output": "out", "seed": 0, "model": {"init": INIT, "tokenizer": "bytes"}, **stage}
        file.write_text(yaml.safe_dump(run))
        loaded = load_config(file)
        prepared = prepare(loaded.config, loaded.base_dir, offline_ok=True)
        expected = -(-int(1.5 * count) // 4)
        assert prepared.config.stages[0].num_steps == prepared.stages[0].section.num_steps == expected
        assert f"0-{kind}: num_epochs=1.5 is num_steps={expected} of 4 rows" in prepared.notes


def test_an_epoch_is_written_as_steps_and_resumed(tmp_path: Path) -> None:
    stage = sft_stage(num_epochs=1, packing=False, optimizer={"learning_rate": 1e-2, "warmup_steps": 2})
    del stage["num_steps"]
    file = write_run(tmp_path, stage)
    with inside(tmp_path):
        assert posttrain("check", file, "stages.0.optimizer.warmup_steps=6").error.startswith(
            "optimizer.warmup_steps=6 must be less than num_steps=6, which num_epochs=1 makes of the data"
        )
        assert posttrain("run", file).code == 0
        assert steps(tmp_path / "out", "0-sft") == [1, 2, 3, 4, 5, 6]
        written = load_config(tmp_path / "out" / "config.yaml").config.stages[0]
        assert isinstance(written, SFTSection) and (written.num_steps, written.num_epochs) == (6, None)
        again = posttrain("run", file)
        assert again.code == 0 and "done before" in again.out
