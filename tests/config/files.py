"""Configurations as files, and what is read of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.config import RLSection, RunConfig
from posttrain.config.yaml_file import load_config
from posttrain.errors import ConfigError

LONG = """\
output: runs/x
seed: 0
model:
  init: {model_type: llama, rms_norm_eps: 1e-6, rope_theta: 1e4}
  tokenizer: bytes
stages:
  - kind: sft
    dataset: {path: a.jsonl}
    num_steps: 10
    row_tokens: 64
    batch_rows: 4
    optimizer: {learning_rate: 1e-4}
  - kind: rl
    name: words
    dataset: {path: b.jsonl, chat: no}
    num_steps: 20
    row_tokens: 64
    rewards: [{fn: "rewards/length.py:short"}, {fn: "rewards/length.py:long", weight: -0.5}]
    prompts_per_step: 4
    group_size: 8
    optimizer: {learning_rate: 0.001}
    sampling: {max_tokens: 32}
"""

SHORT = """\
kind: sft
output: runs/x
seed: 0
model: {path: some/model}
dataset: {path: a.jsonl}
num_steps: 10
row_tokens: 64
batch_rows: 4
optimizer: {learning_rate: 1e-4}
"""

Write = Callable[[str], Path]


def fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """What writes `run.yaml` into the current folder, which is a fresh one."""
    monkeypatch.chdir(tmp_path)

    def _write(text: str) -> Path:
        Path("run.yaml").write_text(text)
        return Path("run.yaml")

    return _write


def read(file: Path, *overrides: str) -> RunConfig:
    return load_config(file, overrides)


def mistakes(file: Path | str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value).splitlines()


def rl(config: RunConfig) -> RLSection:
    stage = config.stages[-1]
    assert isinstance(stage, RLSection)
    return stage
