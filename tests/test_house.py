"""The house: SFT loads nothing of reinforcement learning, so that a first run starts fast and a fault of RL cannot
reach it; and the update is optax's, not arithmetic of ours beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest

from tests.stages.runs import posttrain, sft_stage, write_run
from tests.test_layers import ROOT

RL_ALONE = {"rl", "reward", "rollout", "agents", "environments", "sandbox", "cluster"}
"""Folders of the package that SFT does not need."""

CONFIG = """
output: run
seed: 0
model:
  tokenizer: bytes
  init: {model_type: qwen3, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 1,
         num_key_value_heads: 1, head_dim: 8, max_position_embeddings: 64, rope_theta: 10000.0, rms_norm_eps: 1e-6,
         tie_word_embeddings: true}
kind: sft
dataset: {path: rows.jsonl, chat: false}
num_steps: 1
batch_rows: 8
row_tokens: 64
"""
TELL = """
import json, sys
def tell():
    print("LOADED", json.dumps([name for name in sys.modules if name.partition(".")[0] == "posttrain"]))
"""
IMPORTS = """
import posttrain.stages.sft
tell()
import posttrain.api, posttrain.runs.check, posttrain.runs.run
posttrain.runs.run.stage_kind("sft")
tell()
assert "PIL" not in sys.modules, "runs of text do without it"
"""
CHECK = """
import atexit
atexit.register(tell)
from posttrain.cli import main
sys.argv = ["posttrain", "check", "sft.yaml"]
main()
"""


def loaded(code: str, folder: Path) -> list[set[str]]:
    """Modules of the package in a fresh process, each time that it calls `tell`."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{TELL}{code}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    told = [line.removeprefix("LOADED") for line in done.stdout.splitlines() if line.startswith("LOADED")]
    return [set(json.loads(line)) for line in told]


def of_rl(names: set[str]) -> list[str]:
    return sorted(name for name in names if {*name.split(".")[1:2]} & RL_ALONE)


@pytest.mark.fast
def test_sft_loads_no_rl(tmp_path: Path) -> None:
    stage, run = loaded(IMPORTS, tmp_path)
    assert of_rl(stage) == of_rl(run) == []


@pytest.mark.thorough
def test_a_check_of_sft_loads_no_rl(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "completion": " 2"}) + "\n")
    (names,) = loaded(CHECK, tmp_path)
    assert "posttrain.stages.sft" in names and of_rl(names) == []


@pytest.mark.thorough
def test_the_update_is_optax(tmp_path: Path) -> None:
    names = set[str]()

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and f"{os.sep}optax{os.sep}" in frame.f_code.co_filename:
            names.add(frame.f_code.co_qualname)

    config = write_run(tmp_path / "sft", sft_stage(num_steps=1))
    sys.setprofile(record)
    try:
        assert posttrain("run", config).code == 0
    finally:
        sys.setprofile(None)
    assert "scale_by_adam.<locals>.update_fn" in names
