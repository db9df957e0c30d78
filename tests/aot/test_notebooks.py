"""Accelerator paths of the notebooks: what they would run is compiled for the TPUs that Colab (v5e-1) and Kaggle
(v5e-8) lend, and fits, from their own settings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jupytext
import pytest

import posttrain as pt
from posttrain.config import RunConfig
from posttrain.kernels.platform import CHIPS
from posttrain.plan.hlo import kernel_names
from posttrain.plan.lowered import compile_program
from posttrain.plan.machine import GIB, machine
from posttrain.plan.report import DECODE, LAYOUT, Phase, StagePlan
from posttrain.runs.plan import _mesh, _model_files, _setup, _stage
from tests.aot.slices import QWEN3, QWEN3_4B, Fields

ROOT = Path(__file__).resolve().parent.parent.parent
QWEN3_VL_4B: Fields = {
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "tie_word_embeddings": True,
    "text_config": QWEN3_4B
    | {"model_type": "qwen3_vl_text", "rope_theta": 5e6}
    | {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}},
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
        "out_hidden_size": 2560,
    },
}
QWEN3_VL_2B: Fields = QWEN3_VL_4B | {
    "text_config": QWEN3_VL_4B["text_config"]
    | {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
    "vision_config": QWEN3_VL_4B["vision_config"] | {"out_hidden_size": 2048},
}
MODELS = {
    "Qwen/Qwen3-0.6B": QWEN3,
    "Qwen/Qwen3-4B": QWEN3_4B,
    "Qwen/Qwen3-VL-2B-Instruct": QWEN3_VL_2B,
    "Qwen/Qwen3-VL-4B-Instruct": QWEN3_VL_4B,
}

ROWS = [{"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3", "answer": "2"}]
REWARD = {"dataset": ROWS, "rewards": ["rewards/gsm8k.py:correct"]}
TOOL = {"tools": ["envs/food101.py:lookup_dish"]}
NOTEBOOKS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "sft_lora": (pt.SFT, {"dataset": ROWS}),
    "dpo": (pt.Preference, {"dataset": ROWS}),
    "grpo_gsm8k": (pt.RL, REWARD),
    "reward_lab": (pt.RL, REWARD),
    "tools": (pt.RL, REWARD | TOOL),
    "food101": (pt.RL, REWARD | TOOL | {"eval_dataset": ROWS}),
    "food_vision": (pt.RL, REWARD | TOOL),
}
"""Class of each notebook's run, and fields that `settings` does not hold."""


def settings_of(name: str, number: int) -> dict[str, Any]:
    """Settings that a notebook's own cell chooses on a TPU with a number of chips."""
    source = ROOT / "notebooks" / f"{name}.py"
    (cell,) = [cell.source for cell in jupytext.read(source).cells if cell.source.startswith("platform, number =")]
    chip = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    names: dict[str, Any] = {
        "jax": SimpleNamespace(devices=lambda: [chip] * number),
        "meals": SimpleNamespace(FOODS=["rice"]),
        "print": lambda *_: None,
    }
    exec(cell, names)
    assert names.get("machine", f"v5e-{number}") == f"v5e-{number}"
    found: dict[str, Any] = names["settings"]
    return found


def run_of(name: str, number: int, folder: Path) -> RunConfig:
    """Configuration of a notebook's run, with the model's `config.json` in a folder in place of the hub."""
    settings = settings_of(name, number)
    model = settings.pop("model")
    more = model if isinstance(model, dict) else {"path": model}
    (folder / "config.json").write_text(json.dumps(MODELS[more["path"]]))
    kind, fields = NOTEBOOKS[name]
    model = more | {"path": str(folder)}
    config: RunConfig = kind(model=model, output=folder / "run", seed=0, **fields, **settings).config
    return config


def plan_of(name: str, number: int, folder: Path) -> StagePlan:
    config = run_of(name, number, folder)
    wanted = machine(f"v5e-{number}")
    return _stage(_setup(config.stages[0], config, _model_files(config), _mesh(config, wanted), wanted), wanted)


def check(phase: Phase, number: int) -> None:
    """Compile, and compare the peak with the chip's memory."""
    found = compile_program(phase.lower(), number)
    peak = (found.peak + phase.bytes_beside) / GIB
    assert peak <= CHIPS["v5e"].memory / GIB, f"{phase.role}: {phase.name}: {peak:.2f} GiB"
    if phase.name != LAYOUT:
        kernel = "ragged_paged_attention" if phase.name == DECODE else "splash_mha"
        assert any(mosaic.startswith(kernel) for mosaic in found.mosaic), (phase.name, found.mosaic)


def phase_of(plan: StagePlan, name: str) -> Phase:
    (found,) = [phase for phase in plan.phases if phase.name == name]
    return found


@pytest.mark.parametrize("name", ["sft_lora", "dpo", "grpo_gsm8k", "food101"])
def test_the_update_lowers_for_v5e_8_with_its_kernels(name: str, tmp_path: Path) -> None:
    lowered = phase_of(plan_of(name, 8, tmp_path), "update").lower()
    assert any(kernel.startswith("splash_mha_dkv") for kernel in kernel_names(lowered.as_text()))


def test_decoding_of_grpo_gsm8k_fits_v5e_8(tmp_path: Path) -> None:
    check(phase_of(plan_of("grpo_gsm8k", 8, tmp_path), "decode"), 8)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [8, 1], ids=["v5e-8", "v5e-1"])
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_program_fits(name: str, number: int, tmp_path: Path) -> None:
    for phase in plan_of(name, number, tmp_path).phases:
        check(phase, number)
