"""Comparison of runs: groups of seeds, intervals, paired tests over shared prompts, and settings that differ."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from posttrain.config.yaml_file import dump_config, load_config
from posttrain.results.compare import over_seeds
from posttrain.statistics import paired_difference, paired_ratio_difference
from tests.stages.runs import posttrain, rl_stage, sft_stage, write_run

PROMPTS = [f"{n}+1=" for n in range(8)]


def run_folder(
    folder: Path, seed: int, curve: Sequence[float], values: Sequence[float | None] | None = None, **changes: Any
) -> Path:
    """Folder of an RL run with these rewards, step by step, and values of held-out prompts after it."""
    config = load_config(write_run(folder, rl_stage(**changes), seed=seed))
    out = folder / "out"
    (out / "0-rl").mkdir(parents=True)
    (out / "config.yaml").write_text(dump_config(config))
    rows = [{"step": n, "stage": "0-rl", "time": 1.0, "reward": value} for n, value in enumerate(curve, 1)]
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if values is not None:
        samples = [
            {"prompt": prompt, "completion": "", "reward": v} for prompt, v in zip(PROMPTS, values, strict=False)
        ]
        keys = [sample["prompt"] for sample in samples]
        after = {"samples": samples, "prompts": keys, "values": {"reward": values}, "sets": {}}
        (out / "0-rl" / "result.json").write_text(json.dumps({"before": after, "after": after}))
    return out


def test_seeds_are_one_group_and_prompts_are_paired(tmp_path: Path) -> None:
    """Red if a seed made a group of its own, or prompts were paired by their place."""
    runs = [
        run_folder(tmp_path / "a0", 0, [0.0, 0.2, 0.4], [0.0, 0.0, 1.0, 0.0]),
        run_folder(tmp_path / "a1", 1, [0.2, 0.4, 0.6], [0.0, 1.0, 1.0, 0.0]),
        run_folder(tmp_path / "b0", 0, [0.5, 0.6, 0.9], [1.0, 1.0, None, 1.0, 0.0], group_size=8),
    ]
    found = pt.compare(*runs)
    assert [[config.seed for config in group.configs] for group in found.groups] == [[0, 1], [0]]
    last = dict(found.groups[0].curves["reward"])[3]
    # Student's interval of two values: half of their distance times t(0.975, 1 degree) = 12.706.
    assert (last.mean, last.n, last.high - last.mean) == pytest.approx((0.5, 2, 12.706 * 0.1), rel=1e-4)
    assert found.settings == {"stages.0.group_size": [4, 8]}
    for run, jax in ((runs[0], "0.10.2"), (runs[2], "0.12.0")):
        calls = [{"posttrain": "0.0.9"}, {"posttrain": "0.1.0", "jax": jax}]
        (run / "versions.json").write_text(json.dumps(calls))
    assert pt.compare(*runs).settings == {"stages.0.group_size": [4, 8], "versions.jax": ["0.10.2", "0.12.0"]}
    means = [0.0, 0.5, 0.0]  # over seeds, of prompts 0, 1 and 3, which all runs have
    assert found.paired["B"]["eval/reward"] == paired_difference(means, [1.0, 1.0, 1.0])
    text = repr(found)
    assert "A  seeds 0, 1" in text and "stages.0.group_size: A 4; B 8" in text
    assert f"{runs[2]} is not finished: stopped after step 3; its values are those so far" in text
    assert "0.5 [-0.7706, 1.771] over 2 seeds at step 3" in text and "B less A over 3 shared prompts" in text
    root = ElementTree.fromstring(found.save(tmp_path / "curves.svg").read_text())
    tags = [one.tag.rpartition("}")[2] for one in root.iter()]
    assert tags.count("polyline") == 2 and tags.count("polygon") == 1
    said = posttrain("compare", *runs[::2], "--metric", "reward")
    assert said.code == 0 and "B less A" in said.out


def test_other_data_are_no_other_seed(tmp_path: Path) -> None:
    """Runs with the same settings on other rows are not averaged. Red without: settings and code alone are compared."""
    runs = [run_folder(tmp_path / name, seed, [0.5]) for seed, name in enumerate("abc")]
    for out, rows in zip(runs, ("x", "x", "y"), strict=True):
        (out / "inputs.json").write_text(json.dumps({"dataset": {"dataset": f"rows.jsonl, 24 rows, {rows}"}}))
    found = pt.compare(*runs)
    assert [[config.seed for config in group.configs] for group in found.groups] == [[0, 1], [2]]
    assert found.settings.keys() == {"data"} and len(set(found.settings["data"])) == 2


def sft_folder(folder: Path, seed: int, nll: Sequence[float], weight: Sequence[float], **changes: Any) -> Path:
    """Folder of an SFT run with these sums of each held-out sequence after it."""
    held_out = changes.pop("held_out", "held_out.jsonl")
    stage = sft_stage(eval_dataset={"path": held_out, "prompt": "{a}", "completion": "{b}"}, **changes)
    out = folder / "out"
    (out / "0-sft").mkdir(parents=True)
    (out / "config.yaml").write_text(dump_config(load_config(write_run(folder, stage, seed=seed, output=str(out)))))
    (out / "metrics.jsonl").write_text(json.dumps({"step": 1, "stage": "0-sft", "time": 1.0, "nll": 1.0}) + "\n")
    prompts = [f"p{n}" for n in range(len(nll))]
    after = {"eval/nll": 1.0, "sequences": {"nll": nll, "weight": weight, "prompts": prompts}}
    (out / "0-sft" / "result.json").write_text(json.dumps({"before": after, "after": after}))
    return out


def test_held_out_sequences_are_paired(tmp_path: Path) -> None:
    """Means of seeds over the same sequences; red if sequences counted alike, whatever their length."""
    weight = [4.0, 2.0, 6.0]
    runs = [
        sft_folder(tmp_path / "a0", 0, [8.0, 3.0, 6.0], weight),
        sft_folder(tmp_path / "a1", 1, [6.0, 5.0, 6.0], weight),
        sft_folder(tmp_path / "b0", 0, [5.0, 3.0, 5.0], weight, num_steps=7),
    ]
    expected = paired_ratio_difference([7.0, 4.0, 6.0], [5.0, 3.0, 5.0], weight)
    assert expected.mean == pytest.approx(-4 / 12)
    found = pt.compare(*runs)
    assert found.paired == {"B": {"eval/nll": expected}}
    assert "eval/nll, B less A over 3 prompts of held-out sequences: -0.3333" in repr(found)
    other = sft_folder(tmp_path / "b1", 1, [5.0, 3.0, 5.0], [4.0, 2.0, 5.0], num_steps=7)
    assert pt.compare(runs[0], other).paired == {} == pt.compare(runs[0], runs[2], other).paired, "other lengths"
    assert found.settings["stages.0.num_steps"] == [4, 7]
    grown = sft_folder(tmp_path / "grown", 0, [5.0, 3.0, 5.0], weight, optimizer={"learning_rate": 0.1, "ema": {}})
    changed = pt.compare(runs[0], grown).settings["stages.0.optimizer.ema"]
    assert changed == ["-", {"decay": 0.999, "start": 0, "keep_last": False}]
    other = sft_folder(tmp_path / "c", 0, [5.0, 3.0, 5.0], weight, held_out="others.jsonl")
    assert pt.compare(runs[0], other).paired == {}, "other texts"


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    one, twin = (run_folder(tmp_path / name, 0, [0.5]) for name in ("one", "twin"))
    other = run_folder(tmp_path / "other", 0, [0.5], group_size=8)
    for runs, options, message in [
        ((one,), (), "compare: give two runs or more"),
        ((one, twin), (), "runs of the same settings and seed are one run"),
        ((one, other), ("--metric", "rewards"), "no run has the metric 'rewards'; did you mean 'reward'"),
        ((one, other), ("--stage", "0-sft"), "has no stage '0-sft' (0-rl)"),
        ((one, tmp_path), (), "is not the output folder of a run"),
        ((one, other), ("--save", "curves.png"), "give a file that ends with .svg or .html"),
    ]:
        assert message in posttrain("compare", *runs, *options).error
    sft = tmp_path / "sft"
    config = load_config(write_run(sft, sft_stage()))
    (sft / "out").mkdir()
    (sft / "out" / "config.yaml").write_text(dump_config(config))
    assert "stages of kinds rl, sft" in posttrain("compare", one, sft / "out").error


def test_steps_that_every_seed_has() -> None:
    curve = over_seeds([[(1, 0.0), (2, math.nan), (3, 1.0)], [(1, 1.0), (2, 0.5), (4, 1.0)]])
    assert [step for step, _ in curve] == [1] and curve[0][1].high > 1.0, "no interval of outcomes 0 and 1"
