"""Updates on real slices, whole ones of real models in minutes each: kernels, memory and bytes on the wire."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import posttrain as pt
from posttrain.batch import TokenLoss
from posttrain.config import AdamW, MomentType
from posttrain.losses.policy import GRPO
from posttrain.losses.sft import SFTLoss
from posttrain.plan.lowered import POLICY_ARRAYS, batch_of, compile_program, vocabulary_trips
from posttrain.plan.machine import machine
from posttrain.plan.report import DECODE, LAYOUT, PREFILL, STATISTICS, UPDATE
from posttrain.runs.memory import HEADROOM, _spare, choose_remat
from posttrain.runs.plan import _mesh, _model_files, _setup
from posttrain.train.objective import TrainSettings
from posttrain.train.programs import TrainPrograms
from posttrain.train.transformations import make_optimizer
from tests.aot.bounds import GIB, HEAD_8B_GIB, MIB, STEPS
from tests.aot.slices import QWEN3, QWEN3_4B, QWEN3_8B, QWEN3_30B, SMALL, Fields, mesh_of, model


class Step(NamedTuple):
    """Update of a model on a slice."""

    fields: Fields
    slice: tuple[str, str]
    axes: dict[str, int]
    rows: int
    length: int
    loss: TokenLoss
    arrays: tuple[str, ...] = ()
    moments: MomentType = "float32"


CASES = {
    "grpo_0.6b": Step(QWEN3, ("v5e", "2x4"), {"fsdp": 8}, 16, 2048, GRPO, POLICY_ARRAYS),
    "sft_8b": Step(QWEN3_8B, ("v5e", "2x4"), {"fsdp": 8}, 8, 4096, SFTLoss(), moments="bfloat16"),
    "sft_30b": Step(QWEN3_30B, ("v5p", "2x2x2"), {"fsdp": 2, "expert": 4}, 8, 4096, SFTLoss()),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_update(name: str) -> None:
    case, bound = CASES[name], STEPS[name]
    mesh = mesh_of(*case.slice, **case.axes)
    made: Any = model(case.fields, mesh, "full")
    section = AdamW(learning_rate=1e-5, moments=case.moments)
    programs = TrainPrograms(
        made,
        case.loss,
        make_optimizer(section, 10, seed=0, model=made),
        TrainSettings(temperature=1.0, max_grad_norm=1.0),
        mesh=mesh,
    )
    lowered = programs.lower_update(batch_of(case.rows, case.length, arrays=case.arrays))
    found = compile_program(lowered, mesh.size)
    assert set(found.mosaic) == bound.kernels
    assert found.peak / GIB <= bound.peak_gib
    assert found.temporaries / GIB <= bound.temporaries_gib
    loop = [c for c in found.text.collectives if c.in_dynamic_loop]
    vocabulary = made.config.vocab_size
    assert [str(c) for c in loop if any(vocabulary in dims for dims in c.dims)] == []
    assert sum(c.wire * c.executions() for c in loop) / MIB <= bound.loop_mib
    assert sum(c.wire * c.executions() for c in found.text.collectives if not c.in_dynamic_loop) / MIB <= bound.once_mib
    trips = vocabulary_trips(mesh, case.rows, case.length, vocabulary)
    assert sum(c.wire * c.executions([trips]) for c in loop) / GIB <= HEAD_8B_GIB


@pytest.mark.thorough
def test_grpo_of_4b_leaves_memory(tmp_path: Path) -> None:
    """In full with a reference, nothing offloaded, on v5e-8; and what `remat: auto` estimates is what the compiler
    needs."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    config = pt.RL(
        model={"path": str(tmp_path), "dtype": "bfloat16", "remat": "full"},
        output=tmp_path / "run",
        dataset=[{"prompt": "1+1=", "answer": "2"}],
        rewards=["rewards/gsm8k.py:correct"],
        algorithm={"kind": "grpo", "kl_coef": 0.001},
        num_steps=100,
        prompts_per_step=8,
        group_size=8,
        row_tokens=2048,
        max_prompt_tokens=1024,
        sampling={"max_tokens": 1024},
        optimizer={"learning_rate": 1e-6},
        seed=0,
    ).config
    chips = machine("v5e-8")
    setup = _setup(config.stages[0], config, _model_files(config), _mesh(config, chips), chips)
    phases = setup.plan("full").phases
    peaks = {one.name: compile_program(one.lower(), 8).peak + one.bytes_beside for one in phases}
    assert peaks.keys() == {LAYOUT, PREFILL, DECODE, STATISTICS, UPDATE}
    assert max(peaks.values()) <= 12 * GIB, peaks
    estimate = (1 - HEADROOM) * setup.memory - _spare(setup, choose_remat(setup).costs)
    assert estimate == pytest.approx(peaks[UPDATE], rel=0.03)


def test_gradients_are_reduced_once_an_update() -> None:
    """Of four micro-batches on four chips, in whose loop nothing is sent."""
    mesh = mesh_of("v5e", "2x2", data=4)
    made: Any = model(SMALL | {"model_type": "qwen3", "num_hidden_layers": 1}, mesh, "full")
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, micro_batch_rows=4)
    optimizer = make_optimizer(AdamW(learning_rate=1e-5), 10, seed=0, model=made)
    programs = TrainPrograms(made, SFTLoss(), optimizer, settings, mesh=mesh)
    found = compile_program(programs.lower_update(batch_of(16, 512)), mesh.size)
    assert [str(c) for c in found.text.collectives if c.in_dynamic_loop] == []
    size = 4 * sum(x.size for x in programs.params.values())
    reduced = sum(c.size for c in found.text.collectives if c.kind == "all-reduce")
    assert size <= reduced <= 1.01 * size
