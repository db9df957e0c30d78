"""Memory of the process of a run on a CPU: its parts, and the prediction beside runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from bench.plan import WITHIN, compare
from bench.plan_runs import RUNS
from posttrain.config import MeshSection
from posttrain.config.yaml_file import load_config
from posttrain.mesh import make_mesh
from posttrain.plan.hlo import ProgramText
from posttrain.plan.lowered import Figures
from posttrain.plan.machine import machine
from posttrain.plan.report import SMALLEST, Moment, Move, Outcome, Phase, StagePlan, moments, report, report_process
from posttrain.runs.plan import _loading, _mesh, _model_files, plan
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights
from tests.stages.runs import sft_stage, write_run
from tests.tiny import tiny_model

FIGURES = Figures(
    arguments=100,
    temporaries=30,
    peak=150,
    code=0,
    text=ProgramText([], [], Counter()),
    mosaic=(),
    flops=0.0,
    compile_s=0.0,
    compiler=20,
    kept=7,
)
STAGE = StagePlan(phases=[], tokens=1, unit="tokens", state=90, largest=10, saves_between=False, rounds_at_once=False)


def outcome(role: str, name: str, figures: Figures = FIGURES, beside: int = 0, devices: int = 1) -> Outcome:
    phase = Phase(
        role=role,
        name=name,
        lower=lambda: pytest.fail("nothing is lowered"),
        runs=1,
        trips=(),
        flops=0.0,
        read=0.0,
        parameters=frozenset(),
        mesh=make_mesh(MeshSection(fsdp=devices), jax.devices()[:devices]),
        beside={"other": beside},
        own={},
    )
    return Outcome(phase=phase, figures=figures, machine=machine("cpu-1"))


def by_name(stage: StagePlan, *outcomes: Outcome) -> dict[str, int]:
    """Bytes of each moment beyond those of the smallest run."""
    sampled = any(one.phase.role == "sampler" for one in outcomes)
    return {one.name: one.total - SMALLEST[sampled] for one in moments(stage, outcomes, 60)}


def test_moments_are_the_sums_of_their_parts() -> None:
    update, statistics = outcome("trainer", "update", beside=40), outcome("trainer", "statistics")
    # Arguments 100, temporaries and results 50, reference and cache 40, two programs of 7.
    assert by_name(STAGE, update, statistics) == {
        "loading": 60,
        "compiling": 100 + 40 + 20,
        "training": 100 + 40 + 50 + 2 * 7,
        "saving": 100 + 40 + 2 * 7 + 90,
    }
    between = by_name(replace(STAGE, saves_between=True), update, statistics)
    assert between["training"] == 100 + 40 + 50 + 2 * 7 + 90 + 90, "the state twice, and the files"
    update, statistics = outcome("trainer", "update", beside=40, devices=8), outcome("trainer", "statistics", devices=8)
    eight = by_name(STAGE, update, statistics)
    assert eight["training"] == 8 * (100 + 40 + 50) + 2 * 7, "arrays are those of all devices, programs are not"


def test_the_sampler_lies_beside_the_trainer() -> None:
    stage = replace(STAGE, made=5, sampler_programs=6)
    decode = outcome("sampler", "decode", replace(FIGURES, peak=104))
    found = by_name(stage, outcome("trainer", "update"), decode)
    assert found["training"] == 100 + 50 + 7 + 6 * 7 + 5 + 4


def test_other_devices_and_the_host_count_for_the_process() -> None:
    """What a role has on devices of its own, and in the host's memory; a move has a second copy on its way."""
    move = Move(name="moved", size=60, times=2, by="host", phase="update")
    stage = replace(STAGE, elsewhere=11, moves=[move])
    decode = outcome("sampler", "decode", devices=2)
    found = by_name(stage, outcome("trainer", "update"), decode)
    assert found["training"] == 100 + 11 + 60 + 7 + 2 * 50


def test_devices_of_roles_have_a_verdict_each() -> None:
    """And a step that samples ahead on devices of its own takes as long as the longer half, else both and the moves."""
    small = replace(CPU, chip=replace(CPU.chip, memory=170))
    update = replace(outcome("trainer", "update", beside=40, devices=2), machine=small)
    decode = replace(outcome("sampler", "decode", devices=1), machine=small)
    slow = replace(decode, phase=replace(decode.phase, read=40e9))
    lines = list(report(replace(STAGE, not_counted=["tools"], moves=[MOVE]), [update, slow], small))
    assert "  2 devices of trainer: 190 B of 170 B in update, DOES NOT FIT" in lines
    assert "  1 device of sampler: 150 B of 170 B in decode, fits" in lines
    assert "  not counted: tools" in lines and "  moved: 37.25 GiB a step, 2 s at least" in lines
    assert any(line.startswith("  a step takes 4 s at least") for line in lines)
    ahead = list(report(replace(STAGE, overlaps=True, moves=[MOVE]), [update, slow], small))
    assert any(line.startswith("  a step takes 2 s at least") for line in ahead)


MOVE = Move(name="moved", size=int(20e9), times=2, by="host", phase="update")
CPU = machine("cpu-8")


def test_the_fullest_moment_is_reported() -> None:
    few, many = Moment(name="few", parts={"a": 1}), Moment(name="many", parts={"b": 1 << 20, "c": 3 << 20, "d": 0})
    assert list(report_process([few, many])) == [
        "  peak of the process: about 4.00 MiB, in many:",
        "    3.00 MiB  c",
        "    1.00 MiB  b",
    ]


@pytest.mark.thorough
def test_only_a_cpu_has_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = load_config(write_run(tmp_path, sft_stage()))
    lines = list(plan(config, machine("cpu-1")))
    [at] = [place for place, line in enumerate(lines) if "peak of the process" in line]
    assert "Python, JAX and the package" in "\n".join(lines[at + 1 : at + 5]) and lines[-1] == "  it fits"
    for name in ("v5e-1", "h100-1"):
        assert not any("peak of the process" in line for line in plan(config, machine(name)))


def test_weights_of_a_checkpoint_are_read_one_at_a_time(tmp_path: Path) -> None:
    model = tiny_model()
    save_model(model, tmp_path / "model")
    config = load_config(
        write_run(tmp_path, sft_stage(), model={"path": str(tmp_path / "model"), "tokenizer": "bytes"})
    )
    target = machine("cpu-1")
    sizes = [array.nbytes for array in ModelWeights(model).read().values()]
    assert _loading(config, _model_files(config), _mesh(config, target), target) == sum(sizes) + max(sizes)


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read as Linux tells it")
@pytest.mark.parametrize("name", ["sft 5M", "grpo 5M"])
def test_predictions_are_within_ten_per_cent(name: str) -> None:
    predicted, measured = compare(name, *RUNS[name])
    assert abs(predicted / measured - 1) < WITHIN, (predicted >> 20, measured >> 20)
