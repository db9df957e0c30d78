"""Stages that a callback ends before their last step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import posttrain as pt
from posttrain.config.yaml_file import load_config
from posttrain.runs.run import run
from tests.often import often
from tests.pairs import write, write_teacher
from tests.stages.runs import few_devices, lines

STAGES = {
    "rl": ("truncated", "eval_dataset"),
    "asynchronous": ("asynchronous", "truncated"),
    "sft": ("packing", "eval_dataset"),
    "preference": ("ipo", "eval_dataset"),
    "distill": ("beta", "on_policy"),
    "reward_model": ("center_coef", "packing"),
    "online_preference": ("ipo", "share_prompts"),
    "drafter": ("packing", "layers"),
}
"""Features of a stage of each kind."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("ending") / "teacher")


def weights(out: Path) -> dict[str, bytes]:
    """Files of the trained model, or of a drafter."""
    return {file.name: file.read_bytes() for file in out.glob("0-*/model/*.safetensors")}


def train(file: Path, num_steps: int, on_step: Any = None) -> list[str]:
    with few_devices(1):
        config = load_config(file, [f"stages.0.num_steps={num_steps}"])
        return run(config, on_step=on_step)


@pytest.mark.parametrize("name", often(STAGES, "asynchronous"))
def test_a_callback_ends_a_stage(tmp_path: Path, teacher: Path, name: str) -> None:
    """It has the model of a stage of so many steps, and no call trains it on but one with more steps."""
    kind = "rl" if name == "asynchronous" else name
    files, saved = {}, {}
    for folder in ("two", "four", "ended"):
        (tmp_path / folder).mkdir()
        files[folder] = write(tmp_path / folder, teacher, kind, *STAGES[name])
    for number, folder in ((2, "two"), (4, "four")):
        train(files[folder], number)
        saved[number] = weights(tmp_path / folder / "out")

    def on_step(step: int, metrics: Any) -> Any:
        return pt.STOP if step == 2 and "grad_norm" in metrics else None

    out = tmp_path / "ended" / "out"
    assert train(files["ended"], 3, on_step) == [f"0-{kind}"]
    assert weights(out) == saved[2] != {}
    # A kill before the model was written.
    shutil.rmtree(out / f"0-{kind}" / "model")
    train(files["ended"], 3)
    assert weights(out) == saved[2] and train(files["ended"], 3) == []
    result = yaml.safe_load((out / f"0-{kind}" / "result.json").read_text())
    assert result["ended"] == 2 and pt.attach(out).finished
    told = lines(out)
    assert [line["step"] for line in told if "grad_norm" in line] == [1, 2]
    if "eval_dataset" in STAGES[name]:
        assert [line["step"] for line in told if any(key.startswith("eval/") for key in line)] == [0, 1, 2]
    train(files["ended"], 4)
    assert weights(out) == saved[4]


def test_what_a_callback_returns(tmp_path: Path, teacher: Path) -> None:
    """Samples are given too; an answer without a meaning is refused by name."""
    seen: list[Any] = []

    def on_samples(step: int, samples: Any) -> Any:
        seen.extend((step, sample.completion) for sample in samples)
        return pt.STOP

    file = write(tmp_path, teacher, "rl", "truncated", "eval_dataset")
    with few_devices(1):
        run(load_config(file, ["stages.0.num_steps=4"]), on_samples=on_samples)
    assert {step for step, _ in seen} == {1} and repr(pt.STOP) == "pt.STOP"
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(pt.ConfigError, match=r"on_step: returned True; return nothing, or pt\.STOP"):
        train(file, 2, lambda *_: True)
