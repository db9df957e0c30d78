"""Pages about what users add: their files train a tiny model for a step, as a page names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from tests.documents import ROOT, YAML, blocks_of, dump, parse, write_folder
from tests.snippets import ROWS
from tests.stages.runs import INIT, posttrain

EXTEND = ROOT / "docs" / "extend"
SMALL: dict[str, Any] = {"num_steps": 1, "row_tokens": 64, "dataset": {"path": "rows.jsonl"}}
ROLLOUTS = {"prompts_per_step": 2, "group_size": 2, "micro_batch_rows": 4, "sampling": {"max_tokens": 4}}
MODEL = {"init": INIT, "tokenizer": "bytes"}
STAGES: dict[str, dict[str, Any]] = {
    "sft": {**SMALL, "batch_rows": 2},
    "preference": {**SMALL, "batch_rows": 2},
    "rl": {**SMALL, **ROLLOUTS, "rewards": [{"fn": "rewards/length.py:short"}]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("extend"), sorted(EXTEND.glob("*.md")))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "family.py").write_text(blocks_of(EXTEND / "family.md", "python")[0].text)
    return folder


def fields(page: str, number: int) -> dict[str, Any]:
    """Fields of a YAML block of a page, counted from 0."""
    data = parse(blocks_of(EXTEND / f"{page}.md", *YAML)[number].text)
    assert isinstance(data, dict)
    return data


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        pytest.param("sft", {**fields("loss", 1), "model": {**MODEL, "family": "family.py"}}, id="loss-family"),
        pytest.param("sft", {**fields("optimizer", 1), "num_steps": 2}, id="optimizer"),
        pytest.param(
            "rl", {**fields("algorithm", 0), **fields("reward", 0), **fields("engine", 0)}, id="algorithm-reward-engine"
        ),
        pytest.param("preference", fields("loss", 3), id="preference", marks=pytest.mark.thorough),
        pytest.param("rl", {**fields("environment", 0), "rewards": []}, id="environment", marks=pytest.mark.thorough),
    ],
)
def test_what_a_page_adds_is_trained_with(kind: str, given: dict[str, Any], folder: Path, request: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        output = f"out/{request.node.callspec.id}"
        run = {"output": output, "seed": 0, "model": MODEL, "tensorboard": False, "kind": kind, **STAGES[kind], **given}
        Path("run.yaml").write_text(dump(run))
        outcome = posttrain("run", "run.yaml")
        assert outcome.code == 0, outcome.err
        assert pt.attach(Path(output)).metrics
