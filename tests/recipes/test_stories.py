"""The real pretrained model: a short run of its configuration, and its greedy text in transformers and here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from posttrain.config_file import load_config
from posttrain.recipes.run import run
from tests.recipes.greedy import assert_same_greedy_text
from tests.recipes.runs import ROOT, inside, posttrain

SMALL = (
    "num_steps=1",
    "prompts_per_step=2",
    "group_size=4",
    "row_tokens=80",
    "sampling.max_tokens=16",
    "eval_sampling.max_tokens=16",
    "dataset.args.limit=200",
    "eval_dataset.args.limit=4",
)


def test_the_configuration_is_found_from_anywhere(shared: Path, tmp_path: Path) -> None:
    small = ("dataset.args.limit=20", "eval_dataset.args.limit=4")
    with inside(tmp_path):
        checked = posttrain("check", ROOT / "configs" / "grpo_stories.yaml", *small)
    assert checked.code == 0 and "20 prompts" in checked.out, checked.err


@pytest.mark.thorough
def test_the_saved_model_says_the_same_in_transformers(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    loaded = load_config("configs/grpo_stories.yaml", [*SMALL, f"output={tmp_path / 'run'}"])
    result = run(loaded.config, loaded.base_dir)
    folder = result.model_path

    assert sorted(json.loads((folder / "generation_config.json").read_text())["eos_token_id"]) == [1, 2]
    assert_same_greedy_text(folder)
    assert np.isfinite(result.results[0]["after"]["mean"])
