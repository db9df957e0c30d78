"""The house: SFT loads nothing of reinforcement learning, and files, fields and validators grow no more.

The numbers go down, never up: a file that is merged or a field that goes lowers its number here.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from posttrain.config import RLSection
from tests.stages.runs import posttrain, rl_stage, sft_stage, write_run
from tests.test_layers import PACKAGE, ROOT, edges_of, module_name, modules, tree_of

LIMITS = {
    "modules that an import of posttrain.stages.sft loads": 172,
    "files": 321,
    "files under 60 lines": 4,
    "files with one importer, in its own folder": 15,
    "fields of RLSection": 39,
    "model validators": 5,
    "files of the core that a GRPO step enters": 20,
    "files that a GRPO step enters": 66,
    "files that SFT enters up to its first gradient": 82,
}
RL_ALONE = {"rl", "reward", "rollout", "agents", "environments", "sandbox", "cluster"}
"""Folders of the package that SFT does not need."""
CORE = {"rl", "train", "losses", "cluster", "batch.py"}
"""Parts of the package that hold the algorithms and the update."""
SHORT = 60

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
    assert len(stage) <= LIMITS["modules that an import of posttrain.stages.sft loads"]


@pytest.mark.thorough
def test_a_check_of_sft_loads_no_rl(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "completion": " 2"}) + "\n")
    (names,) = loaded(CHECK, tmp_path)
    assert "posttrain.stages.sft" in names and of_rl(names) == []


class Entered:
    """Files of the package with functions that are called between the first call of `begin` and the return of `end`,
    both qualified names, in all threads begun meanwhile."""

    def __init__(self, begin: str, end: str) -> None:
        self.begin, self.end = begin, end
        self.files: set[str] = set()
        self.optax: set[str] = set()
        """Functions of optax that are called meanwhile."""
        self._counts, self._ended = False, False

    def __enter__(self) -> Entered:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _see(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if self._counts and not self._ended and f"{os.sep}optax{os.sep}" in code.co_filename:
            self.optax.add(code.co_qualname)
        if self._ended or not code.co_filename.startswith(f"{PACKAGE}/"):
            return
        # Bodies of modules and classes are no functions; a coroutine that waits returns a future or nothing.
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:
            self._counts |= code.co_qualname == self.begin
            if self._counts:
                self.files.add(code.co_filename.removeprefix(f"{PACKAGE}/"))
        elif event == "return" and code.co_qualname == self.end:
            self._ended = type(result).__name__ in ("StepResult", "Metrics")


@pytest.mark.thorough
def test_few_files_are_entered(tmp_path: Path) -> None:
    with Entered("rl_step", "rl_step") as step:
        assert posttrain("run", write_run(tmp_path / "rl", rl_stage(num_steps=1))).code == 0
    with Entered("main", "Trainer.step") as sft:
        assert posttrain("run", write_run(tmp_path / "sft", sft_stage(num_steps=1))).code == 0
    assert "scale_by_adam.<locals>.update_fn" in sft.optax
    core = {file for file in step.files if file.split("/")[0] in CORE}
    found = {
        "files of the core that a GRPO step enters": core,
        "files that a GRPO step enters": step.files,
        "files that SFT enters up to its first gradient": sft.files,
    }
    assert {"rl/step.py", "train/trainer.py", "rollout/engine.py"} <= step.files
    assert {"config/yaml_file.py", "train/trainer.py", "models/decoder.py"} <= sft.files
    too_many = {name: sorted(files) for name, files in found.items() if len(files) > LIMITS[name]}
    assert not too_many, {name: (len(files), LIMITS[name], files) for name, files in too_many.items()}


@pytest.mark.fast
def test_the_package_grows_no_more() -> None:
    paths = {module_name(path): path for path in modules(PACKAGE)}
    named = {"families", "vision"}  # whose files are found by their names
    plain = {n: path for n, path in paths.items() if path.name != "__init__.py" and not named & set(path.parts)}
    lines = {name: path.read_text().splitlines() for name, path in paths.items()}
    edges = edges_of({name: tree_of(path) for name, path in paths.items()})
    importers = Counter(chain(*edges.values()))
    beside = {one for name, targets in edges.items() for one in targets if paths[one].parent == paths[name].parent}
    found = {
        "files": len(paths),
        "files under 60 lines": sum(len(lines[name]) < SHORT for name in plain),
        "files with one importer, in its own folder": sum(importers[name] == 1 and name in beside for name in plain),
        "fields of RLSection": len(RLSection.model_fields),
        "model validators": sum(
            line.strip().startswith("@model_validator") for text in lines.values() for line in text
        ),
    }
    assert {name: (count, LIMITS[name]) for name, count in found.items() if count > LIMITS[name]} == {}, "found, limit"
