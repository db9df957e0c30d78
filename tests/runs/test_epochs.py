"""Passes over the data as steps: of every kind, counted once per run, estimated by check."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from posttrain.config import DatasetSection, SFTSection
from posttrain.config.yaml_file import load_config
from posttrain.data import sources
from posttrain.data.chat import Renderer
from posttrain.data.pipeline import SFTBatches, row_tokenizer, window_of
from posttrain.data.sources import load_rows
from posttrain.data.tokenizer import load_tokenizer
from posttrain.runs import prepare as preparation
from posttrain.runs.prepare import prepare, rows_of_epochs
from tests.stages.runs import INIT, ROWS, posttrain, sft_stage, steps, write_run


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
        prepared = prepare(loaded, offline_ok=True)
        expected = -(-int(1.5 * count) // 4)
        assert prepared.config.stages[0].num_steps == prepared.stages[0].section.num_steps == expected
        few = f"of 64 tokens: few updates; batch_rows=1 makes {int(1.5 * count)} of the same passes"
        assert f"0-{kind}: num_epochs=1.5 is num_steps={expected} of 4 rows {few}" in prepared.notes


@pytest.mark.thorough
def test_passes_are_counted_once_per_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = sft_stage(num_epochs=1, packing=False, optimizer={"learning_rate": 1e-2, "warmup_steps": 2})
    del stage["num_steps"]
    file, output = write_run(tmp_path, stage), tmp_path / "out"
    count, counted = preparation.rows_of_epochs, []

    def counting(*args: Any, **fields: Any) -> int:
        counted.append(fields["num_epochs"])
        return count(*args, **fields)

    monkeypatch.setattr(preparation, "rows_of_epochs", counting)
    assert posttrain("check", file, "stages.0.optimizer.warmup_steps=6").error.startswith(
        "optimizer.warmup_steps=6 must be less than num_steps=6, which num_epochs=1 makes of the data"
    )
    assert posttrain("check", file, "stages.0.optimizer.warmup_steps=99%").error.startswith(
        "optimizer.warmup_steps=99% must be less than num_steps=6"
    )
    counted.clear()
    assert posttrain("run", file).code == 0
    assert steps(output, "0-sft") == [1, 2, 3, 4, 5, 6] and counted == [1.0]
    written = load_config(output / "config.yaml").stages[0]
    assert isinstance(written, SFTSection) and (written.num_steps, written.num_epochs) == (6, None)
    again = posttrain("run", file)
    assert again.code == 0 and "done before" in again.out and counted == [1.0]
    # What changes the count is counted anew: more passes, other rows.
    grown = posttrain("run", file, "stages.0.num_epochs=1.5")
    assert grown.code == 0 and "num_steps grows from 6 to 9" in grown.out and counted == [1.0, 1.5]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:20]))
    assert "stages.0.num_steps" in posttrain("run", file).error and counted == [1.0, 1.5, 1.0]


def test_check_estimates_the_passes_of_a_large_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 10, 1000)
    rows = [{"prompt": f"{i}:", "completion": "n" * int(length)} for i, length in enumerate(lengths)]
    (tmp_path / "large.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = sft_stage(num_epochs=3, row_tokens=64, dataset={"path": "large.jsonl", "chat": False})
    del stage["num_steps"]
    file = write_run(tmp_path, stage)
    exact = load_config(file)
    num_steps = prepare(exact, offline_ok=False).config.stages[0].num_steps
    assert num_steps is not None
    monkeypatch.setattr(sources, "CHECKED_ROWS", 200)
    checked = posttrain("check", file)
    [note] = [line for line in checked.out.splitlines() if "estimated" in line]
    start, rest = note.split(" steps of 4 rows, estimated from ")
    assert rest == "200 of 1,000 sequences; run counts them all, once"
    assert int(start.removeprefix("0-sft: num_epochs=3 is about ")) == pytest.approx(num_steps, rel=0.05)
    assert "0-sft: 1,000 dataset rows, num_epochs=3 in steps of 4 x 64 tokens\n" in checked.out
    assert not (tmp_path / "out").exists()


@pytest.mark.few(5)
@pytest.mark.parametrize("num_epochs", [1.0, 3.0, 0.4])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"packing": False},
        {"overlong": "drop", "row_tokens": 20},
        {"dataset": {"shuffle": False}},
        {"mix": ["other.jsonl"]},
    ],
)
def test_the_counted_rows_hold_the_passes(tmp_path: Path, fields: dict[str, Any], num_epochs: float) -> None:
    for name, count in (("rows", 300), ("other", 90)):
        rows = [{"prompt": f"{name}{i}:", "completion": "n" * (1 + i * 7 % 13)} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = DatasetSection(path=str(tmp_path / "rows.jsonl"), chat=False, **fields.pop("dataset", {}))
    mix = [DatasetSection(path=str(tmp_path / path), chat=False, weight=0.5) for path in fields.pop("mix", [])]
    settings = {"row_tokens": 48, "batch_rows": 1, "overlong": "truncate", **fields}
    section = SFTSection(dataset=dataset, mix=tuple(mix), **settings)
    renderer = Renderer(load_tokenizer("bytes"), chat=False)
    sources = [(load_rows(one), renderer) for one in section.datasets]
    tokenizers = [row_tokenizer(section, one, *source) for one, source in zip(section.datasets, sources, strict=True)]
    made = [[tokenize(i) for i in range(len(rows))] for tokenize, (rows, _) in zip(tokenizers, sources, strict=True)]
    lengths = [[[None if s is None else (len(s["tokens"]), 0) for s in row] for row in of_one] for of_one in made]
    window = window_of(section, section.datasets)
    found = rows_of_epochs(section, section.datasets, lengths, window=window, num_epochs=num_epochs, seed=5)

    stream = SFTBatches(section, *sources[0], seed=5, mixed=sources[1:])
    held = [int(np.max(next(stream).segments)) for _ in range(found)]
    if not mix:
        kept = sum(length is not None for (length,) in lengths[0])
        assert (kept < 300) == (section.overlong == "drop")
        wanted = num_epochs * kept
        # A part of a pass is counted in draws, of which some are left out.
        assert sum(held) >= math.floor(wanted) - 5 and (num_epochs < 1 or sum(held) == wanted)
    else:
        assert sum(held) >= math.ceil(num_epochs * 390) > sum(held[:-1])
