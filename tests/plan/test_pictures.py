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
from posttrain.plan.lowered import batch_of, pictured
from posttrain.plan.machine import machine
from posttrain.plan.report import Phase
from posttrain.rollout.programs import Programs
from posttrain.rollout.vision import patches_size
from posttrain.runs.memory import StageSetup, _tower_bytes, choose_remat
from posttrain.runs.plan import _mesh, _model_files, _pictures, _setup
from posttrain.train.trainer import Trainer
from tests.plan.test_plan import setup_of
from tests.stages.runs import lines, posttrain, rl_stage, sft_stage, write_run


@pytest.fixture(scope="module")
def pictures(shared: Path) -> Path:
    return shared / "goldens" / "vision" / "gemma3"


def rl_on_pictures(folder: Path, checkpoint: Path, vision: str = "tower", **stage: Any) -> RunConfig:
    stage = rl_stage(row_tokens=64, dataset={"path": "rows.jsonl"}) | stage
    return load_config(write_run(folder, stage, model={"path": str(checkpoint), "vision": vision, "remat": "full"}))


def run_on_pictures(folder: Path, checkpoint: Path, vision: str, **stage: Any) -> RunConfig:
    stage = sft_stage() | {"row_tokens": 64, "batch_rows": 8, "dataset": {"path": "rows.jsonl"}} | stage
    return load_config(write_run(folder, stage, model={"path": str(checkpoint), "vision": vision, "remat": "full"}))


def test_pictures_are_counted(tmp_path: Path, pictures: Path) -> None:
    """Batches have their arrays, the bound the tower's operations, and `remat: auto` leaves memory for its layers."""
    phases: dict[str, Phase] = {}
    spare: dict[str, int] = {}
    for vision in ("kept", "frozen", "projector", "tower"):
        kept = vision == "kept"
        setup = setup_of(run_on_pictures(tmp_path, pictures, "frozen" if kept else vision, image_cache_mib=1024 * kept))
        (*encode, phases[vision]) = (stage := setup.plan()).phases
        if kept:
            (phases["encode"],), shown = encode, list(_pictures(stage))
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
    call = phases["encode"]
    assert phases["kept"].tower == 0 and phases["kept"].flops == pytest.approx(phases["frozen"].flops - once / 8)
    # 7 pictures in each of 8 rows, in a call of 8 on each of 8 devices.
    assert call.runs * call.flops == call.runs * call.tower == pytest.approx(once / 8 * 64 / 56)
    of_step = call.runs * call.flops
    share = of_step / (of_step + phases["kept"].flops)
    assert shown == [
        f"  images: the frozen vision tower has {share:.0%} of the operations of "
        "updates in the first epoch, later none for pictures that image_cache_mib holds"
    ]
    assert phases["projector"].tower == pytest.approx((once + 2 * work.projector) / 8)
    assert phases["tower"].tower == pytest.approx((3 * once + 0.5 * work.attention + again) / 8)
    assert phases["frozen"].flops - phases["frozen"].tower == pytest.approx(
        phases["tower"].flops - phases["tower"].tower
    )
    assert spare["kept"] > spare["frozen"] > spare["projector"] > spare["tower"]
    share = phases["tower"].tower / phases["tower"].flops
    assert list(_pictures(stage)) == [f"  images: the vision tower has {share:.0%} of the operations of an update"]


def test_pictures_of_an_rl_stage_are_counted(tmp_path: Path, pictures: Path) -> None:
    """In the update and statistics, and once for each prompt in calls of the tower."""
    config = rl_on_pictures(tmp_path, pictures, algorithm={"kind": "grpo", "kl_coef": 0.1})
    stage = (setup := setup_of(config)).plan()
    by_name = {(phase.role, phase.name): phase for phase in stage.phases}
    vision = setup.outline().config.vision
    assert vision is not None and not any("images" in line for line in stage.not_counted)
    encode, update = by_name["sampler", "encode"], by_name["trainer", "update"]
    call = pictured(batch_of(8, 1), setup.outline().config, 256, ImageSection())
    work = vision.work(np.asarray(call.patch_images), np.asarray(call.patch_places))
    assert encode.flops == encode.tower == pytest.approx(work.total / 8)
    # 2 prompts of at most 58 tokens, of 4 patches each, in calls of 8 rows of 256 patches.
    assert encode.runs == 1 and set(encode.beside) == set(by_name["sampler", "prefill"].beside)
    assert update.tower > 3 * by_name["trainer", "statistics"].tower > 0
    assert min(_tower_bytes(setup.section, setup.outline(), 1.0, 1.0)) > 0, "`remat: auto` leaves memory for it"


@pytest.mark.parametrize("kept", [True, False])
def test_a_frozen_tower_of_an_rl_stage_encodes_before(tmp_path: Path, pictures: Path, kept: bool) -> None:
    """Each prompt's pictures once for statistics and update, which have no tower; a reference of other files has its
    own."""
    changes: dict[str, Any] = {"algorithm": {"kind": "grpo", "kl_coef": 0.1, "old_logps": "trainer"}}
    changes |= {"reference": {"path": str(pictures)}, "rollout": {"image_cache_mib": 64 * kept}}
    stage = (setup := setup_of(rl_on_pictures(tmp_path, pictures, "frozen", **changes))).plan()
    by_name = {(phase.role, phase.name): phase for phase in stage.phases}
    assert not any("images" in line for line in stage.not_counted) and by_name["reference", "statistics"].tower > 0
    assert all((by_name["trainer", name].tower > 0) != kept for name in ("statistics", "update"))
    assert (("trainer", "encode") in by_name) == kept
    if kept:
        # 2 prompts of 14 pictures, in a call of 8 on each of 8 devices.
        assert by_name["trainer", "encode"].runs == 1 and _tower_bytes(setup.section, setup.outline(), 1.0, 1.0)[1] == 0


@pytest.mark.thorough
def test_the_plan_of_sampling_is_the_program_of_the_run(tmp_path: Path, shared: Path) -> None:
    """Calls of the tower and of prompts with pictures, to the letter."""
    Image.new("RGB", (24, 24)).save(tmp_path / "p.png")
    rows = [{"image": "p.png", "prompt": "What?"} for _ in range(8)]
    (tmp_path / "pictures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = {"num_steps": 1, "dataset": {"path": str(tmp_path / "pictures.jsonl")}, "rollout": {"warm_up": False}}
    config = rl_on_pictures(tmp_path, shared / "goldens" / "vision" / "qwen3_vl", **stage)
    alone = machine("cpu-1")
    phases = _setup(config.stages[0], config, _model_files(config), _mesh(config, alone), alone).plan().phases
    planned = {phase.name: phase.lower().as_text() for phase in phases if phase.name in ("encode", "prefill")}
    seen: set[str] = set()
    lower = Programs._lower

    def noted(self: Programs, *arguments: Any) -> Any:
        seen.add((lowered := lower(self, *arguments)).as_text())
        return lowered

    # The run's pictures are few; it is given the size of the plan's call.
    size = patches_size(2, 8 * 58 * 4)
    with (
        mock.patch.object(Programs, "_lower", noted),
        mock.patch("posttrain.rollout.vision.patches_size", return_value=size),
    ):
        outcome = posttrain("run", tmp_path / "run.yaml")
    assert outcome.code == 0, outcome.err
    assert set(planned.values()) <= seen


def auto_of(setup: StageSetup) -> ModelSection:
    return setup.config.model.model_copy(update={"remat": "auto"})


@pytest.mark.thorough
@pytest.mark.parametrize("vision", ["frozen", "tower"])
def test_the_plan_is_the_program_of_the_run(tmp_path: Path, pictures: Path, vision: str) -> None:
    """The same program to the letter, for pictures, and so the compiler's memory."""
    Image.new("RGB", (9, 9)).save(tmp_path / "p.png")
    # One has as many pictures as a row may have, and so the batch the patches of the plan.
    rows = [{"images": ["p.png"] * (2 - bool(n)), "prompt": "What?", "completion": "Yes."} for n in range(8)]
    (tmp_path / "pictures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = {"num_steps": 1, "row_patches": 80, "dataset": {"path": str(tmp_path / "pictures.jsonl")}}
    config = run_on_pictures(tmp_path, pictures, vision, **stage)
    alone = machine("cpu-1")
    phases = _setup(config.stages[0], config, _model_files(config), _mesh(config, alone), alone).plan().phases
    *encode, phase = phases
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
    if vision == "frozen":
        # All pictures are one, in a call of as many rows as the plan's.
        (call,) = encode
        assert line["images/encoded"] == 1 and 0 < line["perf/tower_ratio"] < call.flops / (call.flops + phase.flops)
        return
    # Seven rows have half of the patches, and all have few tokens.
    assert line["perf/tower_ratio"] == pytest.approx(phase.tower / phase.flops, rel=0.5)
    assert line["perf/tflops"] < phase.flops / 1e12
