"""Plans of stages on images: their arrays and the vision tower's operations, in the program that a run compiles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from posttrain.config import ImageSection, ModelSection, RunConfig
from posttrain.config.yaml_file import load_config
from posttrain.plan.lowered import pictured
from posttrain.plan.machine import machine
from posttrain.plan.phases import batch_of
from posttrain.plan.report import Phase
from posttrain.runs.memory import StageSetup, choose_remat
from posttrain.runs.plan import _mesh, _model_files, _pictures, _setup
from posttrain.train.trainer import Trainer
from tests.plan.test_plan import setup_of
from tests.stages.runs import lines, posttrain, sft_stage, write_run


@pytest.fixture(scope="module")
def pictures(shared: Path) -> Path:
    return shared / "goldens" / "vision" / "gemma3"


def run_on_pictures(folder: Path, checkpoint: Path, vision: str, **stage: Any) -> RunConfig:
    stage = sft_stage() | {"row_tokens": 64, "batch_rows": 8, "dataset": {"path": "rows.jsonl"}} | stage
    return load_config(write_run(folder, stage, model={"path": str(checkpoint), "vision": vision, "remat": "full"}))


def test_pictures_are_counted(tmp_path: Path, pictures: Path) -> None:
    """Batches have their arrays, the bound the tower's operations, and `remat: auto` leaves memory for its layers."""
    phases: dict[str, Phase] = {}
    spare: dict[str, int] = {}
    for vision in ("frozen", "projector", "tower"):
        setup = setup_of(run_on_pictures(tmp_path, pictures, vision))
        (phases[vision],) = (stage := setup.plan()).phases
        auto = replace(setup, config=setup.config.model_copy(update={"model": auto_of(setup)}))
        spare[vision] = choose_remat(auto).spare or 0
    outline = setup.outline()
    vision = outline.config.vision
    assert vision is not None
    # A row of 64 tokens has at most 64 x 4 patches of 4 x 4 values, each picture 64 of them.
    batch = pictured(batch_of(8, 64), outline.config, 256, ImageSection())
    assert batch.patches is not None and batch.patches.shape == (8, 256, 3 * vision.patch_size**2)
    assert np.bincount(np.asarray(batch.patch_images[0])).tolist()[1:] == [vision.side**2] * (256 // vision.side**2)
    work = vision.work(np.asarray(batch.patch_images), np.asarray(batch.patch_places))
    once, again = work.total, work.products + work.attention
    assert phases["frozen"].tower == pytest.approx(once / 8)
    assert phases["projector"].tower == pytest.approx((once + 2 * work.projector) / 8)
    assert phases["tower"].tower == pytest.approx((3 * once + 0.5 * work.attention + again) / 8)
    assert phases["frozen"].flops - phases["frozen"].tower == pytest.approx(
        phases["tower"].flops - phases["tower"].tower
    )
    assert spare["frozen"] > spare["projector"] > spare["tower"]
    share = phases["tower"].tower / phases["tower"].flops
    assert list(_pictures(stage)) == [f"  images: the vision tower has {share:.0%} of the operations of an update"]


def auto_of(setup: StageSetup) -> ModelSection:
    return setup.config.model.model_copy(update={"remat": "auto"})


@pytest.mark.thorough
@pytest.mark.parametrize("vision", ["frozen", "tower"])
def test_the_plan_is_the_program_of_the_run(tmp_path: Path, pictures: Path, vision: str) -> None:
    """The same program to the letter, for pictures, and so the compiler's memory."""
    Image.new("RGB", (9, 9)).save(tmp_path / "p.png")
    rows = [{"image": "p.png", "prompt": "What?", "completion": "Yes."} for _ in range(8)]
    (tmp_path / "pictures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = {"num_steps": 1, "row_patches": 128, "dataset": {"path": str(tmp_path / "pictures.jsonl")}}
    config = run_on_pictures(tmp_path, pictures, vision, **stage)
    alone = machine("cpu-1")
    (phase,) = _setup(config.stages[0], config, _model_files(config), _mesh(config, alone), alone).plan().phases
    seen: list[str] = []

    def lower(self: Trainer, arguments: Any) -> Any:
        lowered = self._programs.update.lower(*arguments)
        seen.append(lowered.as_text())
        return lowered

    with mock.patch.object(Trainer, "_lower", lower):
        outcome = posttrain("run", tmp_path / "run.yaml")
    assert outcome.code == 0, outcome.err
    assert seen == [phase.lower().as_text()]
    (line,) = lines(tmp_path / "out")
    assert 0 < line["perf/tower_ratio"] < phase.tower / phase.flops and line["perf/tflops"] < phase.flops / 1e12
