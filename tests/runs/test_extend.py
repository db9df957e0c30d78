"""More steps for a stage that there is: it ends where a run with so many from the start ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from posttrain.config.yaml_file import load_config
from tests.stages.runs import posttrain, rl_stage, sft_stage, steps, weights, write_run

HELD_OUT = {"path": "rows.jsonl", "chat": False, "limit": 3}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sft", pytest.param("rl", marks=pytest.mark.thorough)])
def test_more_steps_end_as_if_from_the_start(tmp_path: Path, kind: str) -> None:
    stage = sft_stage if kind == "sft" else rl_stage
    fields = {"optimizer": {"learning_rate": 1e-2, "schedule": "constant", "warmup_steps": 3}, "eval_dataset": HELD_OUT}
    whole = write_run(tmp_path / "whole", stage(num_steps=8, **fields))
    parts = write_run(tmp_path / "parts", stage(num_steps=4, **fields))
    assert posttrain("run", whole).code == posttrain("run", parts).code == 0
    grown = posttrain("run", parts, "stages.0.num_steps=8")
    assert grown.code == 0, grown.err
    assert f"0-{kind}: num_steps grows from 4 to 8\n" in grown.out and "resuming after step 4 of 8" in grown.out
    outputs = [file.parent / "out" for file in (whole, parts)]
    assert [steps(output, f"0-{kind}") for output in outputs] == [list(range(1, 9))] * 2
    assert weights(outputs[0], f"0-{kind}") == weights(outputs[1], f"0-{kind}")
    results = [(output / f"0-{kind}" / "result.json").read_text() for output in outputs]
    assert results[0] == results[1]
    assert load_config(outputs[1] / "config.yaml").stages[0].num_steps == 8
    again = posttrain("run", parts, "stages.0.num_steps=8")
    assert again.code == 0 and "done before" in again.out
    assert "stages.0.num_steps (num_steps may grow); give another output" in posttrain("run", parts).error


@pytest.mark.thorough
def test_what_may_not_grow(tmp_path: Path) -> None:
    optimizer = {"learning_rate": 1e-2, "schedule": "linear"}
    first, second = (sft_stage(num_steps=2, name=name, optimizer=optimizer) for name in ("a", "b"))
    file, output = write_run(tmp_path, first, second), tmp_path / "out"
    assert posttrain("run", file).code == 0
    saved = weights(output, "0-a")
    error = posttrain("run", file, "stages.a.num_steps=3").error
    assert "stages.0.num_steps grows, but 1-b in" in error and "delete" in error
    both = posttrain("run", file, "stages.b.num_steps=3", "stages.b.optimizer.learning_rate=1").error
    assert "other settings: stages.1.optimizer.learning_rate; give" in both
    assert weights(output, "0-a") == saved and (output / "1-b" / "model").is_dir()
    grown = posttrain("run", file, "stages.b.num_steps=3")
    assert grown.code == 0 and "the linear schedule of its learning rate now ends at step 3" in grown.out
    assert "0-a: done before" in grown.out and steps(output, "1-b") == [1, 2, 3]
    assert not list(output.glob("*/model.replaced"))
    for folder in (output / "1-b" / "checkpoints").iterdir():
        folder.rename(tmp_path / folder.name)
    assert "has no checkpoint of step 3" in posttrain("run", file, "stages.b.num_steps=4").error
    model = load_file(output / "1-b" / "model" / "model.safetensors")
    assert all(np.isfinite(tensor).all() for tensor in model.values())


@pytest.mark.parametrize("mistake", ["row", "checkpoint", "none"])
def test_a_refused_call_changes_nothing(tmp_path: Path, mistake: str) -> None:
    """Red without: the model of the finished run is deleted before its data and its checkpoint are verified."""
    file, output = write_run(tmp_path, sft_stage(num_steps=2)), tmp_path / "out"
    assert posttrain("run", file).code == 0
    before = contents(output)
    rows = (tmp_path / "rows.jsonl").read_text()
    if mistake == "row":
        (tmp_path / "rows.jsonl").write_text(rows.replace("=", ":", 1))
        refused = posttrain("run", file, "stages.0.num_steps=3")
        assert refused.code == 2 and "cannot resume: dataset was" in refused.error
        (tmp_path / "rows.jsonl").write_text(rows)
    if mistake == "checkpoint":
        kept = {path: path.read_bytes() for path in (output / "0-sft" / "checkpoints").rglob("*") if path.is_file()}
        for path, content in kept.items():
            path.write_bytes(bytes(byte ^ 255 for byte in content))
        refused = posttrain("run", file, "stages.0.num_steps=3", "--strict")
        assert refused.code != 0, refused.out
        for path, content in kept.items():
            path.write_bytes(content)
    assert contents(output) == before
    again = posttrain("run", file)
    assert again.code == 0 and "done before" in again.out and contents(output) == before
    grown = posttrain("run", file, "stages.0.num_steps=3")
    assert grown.code == 0 and steps(output, "0-sft") == [1, 2, 3]


def contents(folder: Path) -> dict[str, bytes]:
    """Files of a run by name, but for its lock and its logs."""
    files = [path for path in folder.rglob("*") if path.is_file() and not {"lock", ".lock", "hosts"} & set(path.parts)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
