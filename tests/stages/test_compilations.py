"""A run compiles each program once, and its tables of samples come when they are asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.runs.folder import machine_of_run
from tests.stages.runs import INIT, lines, posttrain, rl_stage, sft_stage, write_run

STEPS = 20
STOPS = [chr(code) for code in range(32, 72)]
"""So many that samples end after a few tokens, one sooner than another."""


@pytest.mark.thorough
@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 2}, marks=pytest.mark.thorough)], ids=["full", "lora"])
def test_every_program_is_compiled_once(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    sft = sft_stage(num_steps=STEPS, checkpoint_every=9, packing=True, row_tokens=32)
    rl = rl_stage(
        num_steps=STEPS,
        checkpoint_every=9,
        algorithm={"kind": "grpo", "kl_coef": 0.1},
        row_tokens=32,
        sampling={"max_tokens": 12, "stop": STOPS},
        rollout={"warm_up": True},
        samples_every=8,
        asynchronous=None if lora else {"max_staleness": 1},
    )
    file = write_run(tmp_path, sft, rl, model={"init": INIT, "tokenizer": "bytes", "lora": lora})
    rows = [{"prompt": f"{'9' * (i % 14)}+1=", "completion": "1" * (1 + i % 9)} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = posttrain("run", file, devices=8)
    assert outcome.code == 0, outcome.err
    told = lines(tmp_path / "out")
    for stage in ("0-sft", "1-rl"):
        compiled = {line["step"]: line["perf/compilations"] for line in told if line["stage"] == stage}
        assert len(compiled) == STEPS and compiled.pop(1) > 0
        # The writer of the first checkpoint, after step 9, slices leaves that devices share; that of step 18 as well.
        # Of an adapter devices share every leaf, since its rank is less than their number.
        assert compiled.pop(10) <= (40 if lora else 9), "no digests"
        assert set(compiled.values()) == {0.0}, (stage, compiled)
    assert {line["rollout/late_compilations"] for line in told if line["stage"] == "1-rl"} == {0.0}
    seconds = [line["rollout/prefill_s"] for line in told if line["stage"] == "1-rl"]
    assert min(seconds) >= 0 < sum(seconds), "of dispatches, some of which are ahead of their step"
    assert machine_of_run(tmp_path / "out") == "cpu-8"
    stale = {line["sampling/staleness/mean"] > 0 for line in told if line["stage"] == "1-rl"}
    assert stale == ({False} if lora else {False, True}), "samples of earlier weights"
    lengths = {line["completions/mean_length"] for line in told if line["stage"] == "1-rl"}
    assert len(lengths) > 3, "samples must differ in length"
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {1, 8, 16}
