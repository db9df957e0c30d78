"""Plans of tiny runs on virtual devices: phases, what does not fit, and the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.config.yaml_file import load_config
from posttrain.errors import ConfigError
from posttrain.models.activations import shown_remat
from posttrain.plan import lowered
from posttrain.plan.machine import Machine, machine
from posttrain.runs.plan import HEADROOM, RematChoice, _mesh, _model_files, choose_remat, plan, plan_elsewhere
from tests.stages.runs import posttrain, rl_stage, sft_stage, write_run

CPU_8 = machine("cpu-8")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def with_memory(count: int) -> Machine:
    return replace(CPU_8, chip=replace(CPU_8.chip, memory=count))


def run_of(folder: Path, *stages: dict[str, Any]) -> RunConfig:
    return load_config(write_run(folder, *stages))


def test_phases_of_sft_and_rl_then_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_of(tmp_path, sft_stage(), rl_stage())
    lines = list(plan(config, CPU_8))
    assert lines[0] == "machine: cpu-8, 8 devices with 16.00 GiB each"
    assert "mesh: data=1, fsdp=8, expert=1, context=1, tensor=1" in lines
    assert lines.count("  remat: none; for a step, per device:") == 2
    phases = [line.split("  ")[1] for line in lines if line.startswith(("  trainer:", "  sampler:"))]
    assert phases[0] == "trainer: update"
    assert {"sampler: layout", "sampler: prefill", "sampler: decode"} < set(phases[1:])
    assert lines.count("  it fits") == 2
    monkeypatch.setattr(lowered, "compile_program", None)
    assert list(plan(config, CPU_8)) == lines, "nothing is compiled again"


@pytest.mark.thorough
def test_phases_of_preferences(tmp_path: Path) -> None:
    """Also from Python, in a process of its own, without the rows."""
    preference = {"kind": "preference", "dataset": {"path": "pairs.jsonl"}, "num_steps": 1, "row_tokens": 16}
    config = run_of(tmp_path, preference | {"batch_rows": 8})
    lines = list(plan(config, CPU_8))
    phases = [line.split("  ")[1] for line in lines if line.startswith("  trainer:")]
    assert phases == ["trainer: update", "trainer: statistics"] and lines[-1] == "  it fits"
    lines = list(plan_elsewhere(config, "cpu-1"))
    assert lines[0].startswith("machine: cpu-1") and lines[-1] == "  it fits"
    with pytest.raises(ConfigError, match="machine 'v5e-9' is unknown"):
        list(plan_elsewhere(config, "v5e-9"))
    free = run_of(tmp_path, preference | {"batch_rows": 8, "loss": "simpo"})
    assert not any("statistics" in line for line in plan(free, CPU_8))


@pytest.mark.thorough
def test_the_nearest_setting_that_fits(tmp_path: Path) -> None:
    config = run_of(tmp_path, sft_stage(batch_rows=64))
    peaks = [line for line in plan(config, CPU_8) if line.startswith("  trainer: update")]
    lines = list(plan(config, with_memory(1 << 10)))
    assert "TOO MUCH" in next(line for line in lines if line.startswith("  trainer: update")) and len(peaks) == 1
    assert "nor with model.remat=full; nor model.remat=full micro_batch_rows=8" in lines[-1]
    assert "micro_batch_rows=8 optimizer.moments=bfloat16; nor" in lines[-1] and "model.lora={'rank': 16}" in lines[-1]
    assert not any("nearest" in line for line in plan(config, with_memory(1 << 10), search=False))


def test_the_activations_that_fit_are_saved(tmp_path: Path) -> None:
    """Those first that spare most time per byte; a list and its price are said, and what has no plan is refused."""
    config = load_config(write_run(tmp_path, sft_stage()), ["model.remat=auto"])
    files, mesh = _model_files(config), _mesh(config, CPU_8)

    def chosen(memory: int) -> RematChoice:
        return choose_remat(config.stages[0], config, files, mesh, memory)

    assert chosen(1 << 34).remat == "none" and chosen(1 << 10).remat == "full"
    base, costs = (1 << 34) * (1 - HEADROOM) - (chosen(1 << 34).spare or 0), chosen(1 << 34).costs
    names = list(costs)
    assert set(names) == {"qkv", "attention", "projection", "gate", "up"}
    for count in range(1, len(names)):
        memory = int((base + sum(costs[name].bytes for name in names[:count]) + 16) / (1 - HEADROOM)) + 1
        assert shown_remat(chosen(memory).remat).startswith(f"save {', '.join(names[:count])}"), count
    head, *lines = chosen(memory).lines()
    assert head.startswith("  remat: save ") and ", by auto for " in head
    assert [line.split("  ")[-1] for line in lines] == ["saved"] * (len(names) - 1) + ["computed again"]
    critic = load_config(write_run(tmp_path, rl_stage(algorithm="ppo")), ["model.remat=auto"])
    with pytest.raises(ConfigError, match="remat=auto: the memory of a critic is not known yet; name the activations"):
        choose_remat(critic.stages[0], critic, files, mesh, 1 << 30)


def test_the_other_machine(tmp_path: Path) -> None:
    """Without libtpu the virtual devices of CPU stand for a TPU, and the plan says so."""
    lines = list(plan(run_of(tmp_path, sft_stage()), machine("v5e-8")))
    assert lines[1].startswith("compiler: XLA's for virtual CPU devices") and "$" in "".join(lines)


def test_refusals(tmp_path: Path) -> None:
    file = write_run(tmp_path, sft_stage())
    assert "machine 'v5e-9' is unknown" in posttrain("plan", file, "--devices", "v5e-9").error
    assert "--devices 0: give a number" in posttrain("check", file, "--devices", "0").error
    scores = {"kind": "reward_model", "dataset": {"path": "pairs.jsonl"}, "num_steps": 1}
    with pytest.raises(ConfigError, match="a stage of the kind RewardModel cannot be planned yet"):
        list(plan(run_of(tmp_path, scores), CPU_8))
