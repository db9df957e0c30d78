"""The house: SFT loads nothing of reinforcement learning, and files, fields and validators grow no more.

The numbers go down, never up: a file that is merged or a field that goes lowers its number here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import chain

import pytest

from posttrain.config import RLSection
from tests.test_layers import PACKAGE, ROOT, edges_of, module_name, modules, tree_of

pytestmark = pytest.mark.fast

LIMITS = {
    "modules that an import of posttrain.stages.sft loads": 172,
    "files": 377,
    "files under 60 lines": 20,
    "files with one importer, in its own folder": 47,
    "fields of RLSection": 70,
    "model validators": 40,
}
RL_ALONE = {"rl", "reward", "rollout", "agents", "environments", "sandbox", "cluster"}
"""Folders of the package that SFT does not need."""
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
import posttrain.runs.check, posttrain.runs.run
posttrain.runs.run.STAGES["sft"]()
tell()
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


def test_the_package_grows_no_more() -> None:
    paths = {module_name(path): path for path in modules(PACKAGE)}
    plain = {name: path for name, path in paths.items() if path.name != "__init__.py" and "families" not in path.parts}
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
