"""Plans of tiny runs on virtual devices: phases, what does not fit, and the cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from posttrain.config import RunConfig
from posttrain.config.yaml_file import dump_config, load_config
from posttrain.errors import ConfigError
from posttrain.models.activations import shown_remat
from posttrain.plan import lowered
from posttrain.plan.lowered import bytes_on_device
from posttrain.plan.machine import GIB, Machine, machine
from posttrain.plan.report import Phase, StagePlan
from posttrain.runs.check import training_size
from posttrain.runs.folder import machine_of_run
from posttrain.runs.memory import (
    HEADROOM,
    GatherChoice,
    RematChoice,
    StageSetup,
    _full_bytes,
    check_memory,
    choose_gather,
    choose_remat,
)
from posttrain.runs.plan import (
    _mesh,
    _model_files,
    _role_devices,
    _setup,
    _stage,
    plan,
    plan_elsewhere,
    plan_run,
)
from posttrain.runs.run import _memory_choices
from posttrain.train.programs import placed_shapes
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights
from tests.stages.runs import INIT, posttrain, rl_stage, sft_stage, write_run
from tests.tiny import tiny_model

CPU_8 = machine("cpu-8")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def with_memory(count: int) -> Machine:
    return replace(CPU_8, chip=replace(CPU_8.chip, memory=count))


def setup_of(config: RunConfig, memory: int = CPU_8.chip.memory) -> StageSetup:
    """First stage on eight devices."""
    return replace(_setup(config.stages[0], config, _model_files(config), _mesh(config, CPU_8), CPU_8), memory=memory)


def run_of(folder: Path, *stages: dict[str, Any]) -> RunConfig:
    return load_config(write_run(folder, *stages))


@pytest.mark.thorough
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
    check_beside(config, tmp_path / "out")


STEP = {"perf/peak_memory_gib": 3.0, "perf/compilations": 0.0}
RL_STEP = {
    "rollout/prefill_s": 1.0,
    "rollout/decode_s": 2.0,
    "timing_s/update": 4.0,
    "timing_s/logps": 8.0,
    "step_time": 32.0,
    "completions/num_tokens": 40.0,
    "memory/update/peak_gib": 2.5,
}
METRICS = [
    {"stage": "0-sft", "step": 1, **STEP, "step_time": 99.0, "perf/compilations": 2.0, "memory/step/peak_gib": 0.5},
    *({"stage": "0-sft", "step": 2 + n, **STEP, "step_time": 1.0 + n} for n in range(3)),
    {"stage": "0-sft", "step": 4, "timing_s/evaluation": 5.0},
    {"stage": "1-rl", "step": 0, "eval/reward": 1.0},
    {"stage": "1-rl", "step": 1, **STEP, **RL_STEP},
]


def check_beside(config: RunConfig, run: Path) -> None:
    """Planned beside measured of runs with these metrics, on a CPU and on a device that states its memory."""
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(config))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    own = {"kind": "cpu", "platform": "cpu", "number": 8, "slices": 1, "processes": 1}
    (run / "devices.json").write_text(json.dumps([own]))
    assert machine_of_run(run) == "cpu-8"
    sft, rl = plan_run(run, CPU_8)
    assert sft.steps == 3 and not sft.compiled and rl.steps == 1
    (update, process), notes = sft.rows, {row.memory_note for row in rl.rows[:-1] if not row.name.startswith(" ")}
    assert (update.name, update.measured_s, update.measured_by) == ("update", 2.0, "step_time")
    assert update.memory_note == "not stated by CPU devices" and notes == {update.memory_note}
    assert process.measured_bytes == 3 * GIB and 0.3 * GIB < (process.planned_bytes or 0) < 2 * GIB
    assert rl.rows[-1].memory_note == "at most 3.00 GiB", "no higher than in the stage before"
    (run / "devices.json").write_text(json.dumps([{**own, "kind": "TPU v5 lite", "platform": "tpu"}]))
    sft, rl = plan_run(run, CPU_8)
    assert [row.name for row in sft.rows] == ["update"] and sft.rows[0].measured_bytes == GIB / 2
    by_name = {row.name: row for row in rl.rows}
    phases = ["  sampler: layout", "  sampler: prefill", "  sampler: decode"]
    assert list(by_name) == ["sampling", *phases, "statistics", "update", "step"]
    sampling, statistics, update, step = (row for name, row in by_name.items() if name not in phases)
    assert [row.measured_s for row in (sampling, statistics, update, step)] == [3.0, 8.0, 4.0, 32.0]
    assert sampling.planned_s == sum(by_name[phase].planned_s or 0 for phase in phases) > 0
    assert sampling.planned_bytes == max(by_name[phase].planned_bytes or 0 for phase in phases)
    assert step.planned_s == pytest.approx(sum(row.planned_s or 0 for row in (sampling, statistics, update)))
    assert update.measured_bytes == 2.5 * GIB and sampling.memory_note == step.memory_note == "at most 3.00 GiB"
    recorded = {row["name"]: row for row in rl.record()["rows"]}
    assert recorded["update"]["ratio_bytes"] == 2.5 * GIB / (update.planned_bytes or 1)
    assert recorded["update"]["ratio_s"] == 4.0 / (update.planned_s or 1) and recorded["step"]["ratio_bytes"] is None
    table = "\n".join(rl.lines())
    assert "sampled tokens of a step: 40 measured, 48 planned as the most" in table
    assert "1 s in those that read prompts; 2 s in those that only decode" in table
    assert "measured on 8 x TPU v5 lite, medians of 1 steps" in table and "2.50 GiB" in table


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

    def chosen(memory: int) -> RematChoice:
        return choose_remat(setup_of(config, memory))

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


def test_gradients_and_logits_are_not_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate counts the fuller of the backward pass of layers, and a chunk of logits with the head's gradient."""
    setup = setup_of(run_of(tmp_path, sft_stage(batch_rows=8)))

    def full(copies: int, held: float = 0.0) -> float:
        monkeypatch.setattr("posttrain.runs.memory.OTHER_LOGITS_COPIES", copies)
        return _full_bytes(setup, held)

    assert full(1, float(GIB)) == full(1000, float(GIB)) > GIB, "less than the layer's"
    size, width = training_size(setup.config, setup.outline(), setup.mesh.shape), INIT["hidden_size"]
    # A layer's input; the head and its gradient.
    beside = 4 * width * (16 + 2 * setup.outline().config.vocab_size / 8)
    assert 2 * full(1000) - full(2000) == size.per_device - size.gradient_per_device + beside


def test_the_other_machine(tmp_path: Path) -> None:
    """Without libtpu the virtual devices of CPU stand for a TPU, and the plan says so."""
    lines = list(plan(run_of(tmp_path, sft_stage()), machine("v5e-8")))
    assert lines[1].startswith("compiler: XLA's for virtual CPU devices") and "$" in "".join(lines)


def test_refusals(tmp_path: Path) -> None:
    file = write_run(tmp_path, sft_stage())
    assert "machine 'v5e-9' is unknown" in posttrain("plan", file, "--devices", "v5e-9").error
    assert "--devices 0: give a number" in posttrain("check", file, "--devices", "0").error
    assert "give --devices MACHINE, or the folder of a run" in posttrain("plan", file).error
    assert "--json is for the folder of a run" in posttrain("plan", file, "--devices", "cpu-1", "--json").error
    file.rename(tmp_path / "config.yaml")
    assert "ran on devices that it did not write; give --devices" in posttrain("plan", tmp_path).error
    assert "a run is planned as it was" in posttrain("plan", tmp_path, "seed=1", "--devices", "cpu-8").error
    with pytest.raises(ConfigError, match="has no step yet"):
        plan_run(tmp_path, CPU_8)
    own = rl_stage(rollout={"engine": "rewards_of_test.py:engine"})
    with pytest.raises(ConfigError, match="cannot plan rl with rollout.engine, whose memory only it knows; remove it"):
        list(plan(run_of(tmp_path, own), CPU_8))


def stage_of(folder: Path, **changes: Any) -> StagePlan:
    """Plan of an RL stage on eight devices, of which nothing is compiled."""
    config = run_of(folder, rl_stage(**changes))
    return _stage(setup_of(config), CPU_8)


def beside_of(stage: StagePlan) -> dict[str, dict[str, int]]:
    """Bytes beside each program, on each device."""
    return {f"{phase.role}: {phase.name}": dict(phase.beside) for phase in stage.phases}


def weights_on(devices: int, head: int = 261 * 16) -> int:
    """Bytes of the tiny model on one of `devices`: embedding or head, attention, MLP, norms, of which those of heads
    are on each whole."""
    return 4 * ((head + 16 * 8 * 6 + 3 * 16 * 32 + 3 * 16) // devices + 2 * 8)


COUNTERS = 12
"""Bytes of AdamW's counters, beside two moments of each number."""
BLOCK = 2 * 4 * 16 * 8
"""Bytes of a block of the cache: keys and values of 16 positions, of one layer and head of 8 numbers."""
KL = {"kind": "grpo", "kl_coef": 0.1}


def test_what_is_offloaded_is_not_counted(tmp_path: Path) -> None:
    """On the devices in its own phases alone, and moved in each step; what is not offloaded lies beside all others."""
    weights, cache = weights_on(8), 2 * BLOCK
    state = 2 * weights + COUNTERS
    stays, unread = {"optimizer state": state, "reference": weights}, {"weights before layout": weights}
    kept = stage_of(tmp_path, algorithm=KL)
    assert beside_of(kept) == {
        "sampler: layout": stays | {"cache": cache},
        "sampler: prefill": stays | unread,
        "sampler: decode": stays | unread,
        "trainer: statistics": stays,
        "trainer: update": {"reference": weights},
    }
    assert not kept.moves and kept.elsewhere == 8 * cache, "given up in the update"
    offload = {"optimizer": {"offload": True}, "reference": {"offload": True}}
    moved = stage_of(tmp_path, algorithm=KL, placement=offload)
    assert beside_of(moved) == {
        "sampler: layout": {"cache": cache},
        "sampler: prefill": unread,
        "sampler: decode": unread,
        "trainer: statistics": {"reference": weights},
        "trainer: update": {},
    }
    assert [(move.size, move.times, move.by) for move in moved.moves] == [(state, 2, "host"), (weights, 1, "host")]
    assert moved.elsewhere == 8 * (cache + weights)


def test_roles_are_counted_on_their_own_devices(tmp_path: Path) -> None:
    placement = {"rollout": {"devices": 2}, "reference": {"devices": 2}}
    stage = stage_of(tmp_path, algorithm=KL, placement=placement)
    found = {f"{phase.role}: {phase.name}": phase for phase in stage.phases}
    sizes = {name: phase.mesh.size for name, phase in found.items()}
    assert sizes == {"sampler: prefill": 2, "sampler: decode": 2, "reference: statistics": 2, "trainer: update": 4}
    assert not any(phase.beside for phase in stage.phases)
    groups = [set(found[name].mesh.devices.flat) for name in list(sizes)[1:]]
    assert len(set.union(*groups)) == 8, "no device has two roles"
    cache = 5 * BLOCK  # four sequences of a block on each of two devices, which hold all weights
    assert stage.elsewhere == 2 * (weights_on(1) + cache + weights_on(2))
    assert [(move.size, move.by) for move in stage.moves] == [(weights_on(1), "wire")]
    scoring = found["reference: statistics"]
    assert scoring.runs == 2 and scoring.read == weights_on(2), "eight rows in passes of four"
    shapes = [x for x in jax.tree.leaves(scoring.lower().in_avals) if x.dtype == np.float32]
    assert 4 * sum(x.size for x in shapes) == weights_on(1) + 4 * 4 * 16, "weights of the loss are read beside them"
    stage = stage_of(tmp_path, algorithm=KL, placement={"rollout": {"devices": 4}}, asynchronous={"max_staleness": 1})
    assert stage.overlaps and beside_of(stage)["trainer: statistics"].keys() == {"optimizer state", "reference"}


def test_a_critic_is_counted(tmp_path: Path) -> None:
    """Beside all programs on the actor's devices, and theirs beside its own; a choice of activations knows it."""
    actor, critic = weights_on(8), weights_on(8, 262 * 16)
    states = {"optimizer state": 2 * actor + COUNTERS, "optimizer state of the critic": 2 * critic + COUNTERS}
    stage = stage_of(tmp_path, algorithm="ppo")
    beside = beside_of(stage)
    assert beside["sampler: decode"] == states | {"critic": critic, "weights before layout": actor}
    assert beside["critic: values"] == states | {"weights of the actor": actor}
    assert beside["critic: update"] == {"weights of the actor": actor, "optimizer state": states["optimizer state"]}
    of_critic = {"critic": critic, "optimizer state of the critic": states["optimizer state of the critic"]}
    assert beside["trainer: update"] == of_critic
    assert stage.state == actor + critic + sum(states.values())
    apart = stage_of(tmp_path, algorithm="ppo", placement={"critic": {"devices": 4, "offload": True}})
    assert beside_of(apart)["critic: values"] == beside_of(apart)["trainer: update"] == {}
    assert [move.size for move in apart.moves] == [2 * weights_on(4, 262 * 16) + COUNTERS]

    def spare(algorithm: str) -> int:
        config = load_config(write_run(tmp_path, rl_stage(algorithm=algorithm)), ["model.remat=auto"])
        return choose_remat(setup_of(config, 1 << 30)).spare or 0

    assert spare("rloo") - spare("ppo") == sum(of_critic.values())


def test_the_average_of_a_moving_reference_is_counted(tmp_path: Path) -> None:
    """In float32 beside a copy in bfloat16: 4 bytes and 2; parameters in float32 are the average themselves."""

    def reference(dtype: str, mixup: float) -> int:
        stage = rl_stage(algorithm=KL, reference={"refresh_every": 1, "mixup": mixup})
        config = load_config(write_run(tmp_path, stage), [f"model.dtype={dtype}"])
        return beside_of(_stage(setup_of(config), CPU_8))["sampler: decode"]["reference"]

    assert reference("float32", 0.1) == reference("float32", 1.0) == weights_on(8)
    assert reference("bfloat16", 1.0) * 2 == weights_on(8)
    assert reference("bfloat16", 0.1) * 2 == 3 * weights_on(8)


def test_what_is_not_counted_is_said_or_refused(tmp_path: Path) -> None:
    refreshed = stage_of(tmp_path, algorithm=KL, reference={"refresh_every": 5})
    assert refreshed.not_counted == ["the second copy of the reference at its refresh, every 5 versions"]
    talks = stage_of(tmp_path, env={"fn": "rewards_of_test.py:Env", "max_turns": 2}, row_tokens=32)
    assert len(talks.not_counted) == 1 and "turns of conversations" in talks.not_counted[0]
    config = run_of(tmp_path, rl_stage(placement={"rollout": {"devices": 2}}))
    with pytest.raises(ConfigError, match="v5e-16 has 4 hosts with a process each, and devices of a role of its own"):
        _role_devices(config.stages[0], config, machine("v5e-16"))


@pytest.mark.thorough
def test_teachers_are_part_of_the_update(tmp_path: Path) -> None:
    """In their own precision. Those outside of it score before it, and lie beside it on the student's devices; of a
    cache there is the top-k alone."""
    model = tiny_model()
    save_model(model, tmp_path / "teacher")
    rows = model.config.vocab_size
    teachers = [{"path": str(tmp_path / "teacher"), "name": name} for name in ("one", "two")]
    shapes = {"kind": "distill", "num_steps": 1, "teachers": teachers, "teacher_column": "answer"}
    one_model = {"init": {**INIT, "vocab_size": rows}, "tokenizer": "bytes"}
    file = write_run(tmp_path, sft_stage(**shapes), model=one_model)
    config = load_config(file)
    stage = _stage(setup_of(config), CPU_8)
    (update,) = stage.phases
    plain = load_config(write_run(tmp_path, sft_stage(), model=one_model))
    (alone,) = _stage(setup_of(plain), CPU_8).phases

    def sizes(phase: Phase) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(phase.lower().in_avals))

    own = sum(array.nbytes for array in ModelWeights(model).read().values())
    assert sizes(update) - sizes(alone) == 2 * own + 8 * 16 * 2 * 4, "weights of both, and their shares"
    mesh = _mesh(config, CPU_8)
    spares = []
    for one in (plain, config):
        chosen = one.model_copy(update={"model": one.model.model_copy(update={"remat": "auto"})})
        spares.append(choose_remat(setup_of(chosen, 1 << 30)).spare or 0)
    assert spares[0] - spares[1] == 2 * bytes_on_device(placed_shapes(ModelWeights(model), mesh))
    on_all = bytes_on_device(placed_shapes(ModelWeights(model), mesh))
    top_k = 8 * 16 * 4 * (2 * 8 + 3)
    own_fields = {**shapes, "cache": "cache", "top_k": 8}
    cached = load_config(write_run(tmp_path, sft_stage(**own_fields), model=one_model))
    (update,) = _stage(setup_of(cached), CPU_8).phases
    assert sizes(update) - sizes(alone) == 2 * (top_k + 8 * 16 * 4) and update.beside == {}
    shared = {**teachers[1], "mesh": {"data": 8}, "devices": "shared"}
    changed = sft_stage(**shapes | {"teachers": [teachers[0], shared], "top_k": 8})
    outside = load_config(write_run(tmp_path, changed, model=one_model))
    update, scores = _stage(setup_of(outside), CPU_8).phases
    assert (scores.role, scores.name, dict(scores.own)) == ("teacher", "scores", {"teachers": own})
    assert update.beside == {"teachers": own} and update.own["teachers"] == on_all
    assert scores.beside == {name.replace("teach", "other teach"): size for name, size in update.own.items()}
    changed = sft_stage(**shapes | {"teachers": [teachers[0], teachers[1] | {"tokenizer": "align"}]})
    aligned = load_config(write_run(tmp_path, changed, model=one_model))
    with pytest.raises(ConfigError, match="cannot plan distill with teachers of another tokenizer, the length of"):
        _stage(setup_of(aligned), CPU_8)
    changed = sft_stage(**shapes | {"teachers": [teachers[0], teachers[1] | {"mesh": {"fsdp": 4}}], "top_k": 8})
    apart = load_config(write_run(tmp_path, changed, model=one_model))
    planned = _stage(setup_of(apart), CPU_8)
    update, scores = planned.phases
    assert update.mesh.size == scores.mesh.size == 4 and not update.beside and not scores.beside
    assert not set(update.mesh.devices.flat) & set(scores.mesh.devices.flat)
    assert planned.elsewhere == 4 * scores.own["teachers"]
    features = {"hidden": {"layers": "last"}}
    changed = sft_stage(**shapes | {"teachers": teachers[:1], "features": features, "teacher_column": None})
    matched = load_config(write_run(tmp_path, changed, model=one_model))
    (update,) = _stage(setup_of(matched), CPU_8).phases
    assert update.own["weights of the actor"] > alone.own["weights of the actor"], "projections"


def test_stages_of_pairs_are_planned(tmp_path: Path) -> None:
    """A reward model has a scalar head, margins and common prompts; online preference a reference and an engine."""
    pairs = {"dataset": {"path": "pairs.jsonl"}, "num_steps": 1, "row_tokens": 16, "batch_rows": 8}
    (update,) = _stage(setup_of(run_of(tmp_path, {"kind": "reward_model", **pairs})), CPU_8).phases
    shapes = jax.tree.leaves(update.lower().in_avals)
    assert (16, 1) in {x.shape for x in shapes} and (261, 16) in {x.shape for x in shapes}
    # Tokens, positions, segments, roles and parents; weights and margins.
    rows = [x.dtype for x in shapes if x.shape[-2:] == (8, 16) and x.ndim == 3]
    assert [rows.count(np.dtype(kind)) for kind in (np.int32, np.float32)] == [5, 2]
    online = {name: value for name, value in rl_stage().items() if name not in ("algorithm", "kind")}
    stage = _stage(setup_of(run_of(tmp_path, online | {"kind": "online_preference", "row_tokens": 32})), CPU_8)
    update = stage.phases[-1]
    assert [phase.name for phase in stage.phases][-2:] == ["statistics", "update"] and "cache" not in update.beside
    assert update.beside["reference"] == update.own["weights of the actor"]


def test_samples_of_the_student_are_planned(tmp_path: Path) -> None:
    """In the share of the steps that has them; their cache is given up in the update."""
    save_model(model := tiny_model(), tmp_path / "teacher")
    teacher = {"path": str(tmp_path / "teacher"), "mesh": {"fsdp": 8}, "devices": "shared"}
    sampled = {"on_policy": 0.25, "sampling": {"max_tokens": 8}, "teachers": [teacher], "top_k": 8}
    init = {"init": {**INIT, "vocab_size": model.config.vocab_size}, "tokenizer": "bytes"}
    config = load_config(write_run(tmp_path, sft_stage(kind="distill", num_steps=4, **sampled), model=init))
    stage = _stage(setup_of(config), CPU_8)
    phases = {phase.name: phase for phase in stage.phases}
    assert list(phases) == ["layout", "prefill", "decode", "update", "scores"]
    assert phases["decode"].runs == 0.25 * 8 and phases["decode"].beside["teachers"] == phases["scores"].own["teachers"]
    assert "cache" not in phases["update"].beside and stage.elsewhere == 8 * phases["decode"].own["cache"]
    with pytest.raises(ConfigError, match="v5e-16 has 4 hosts with a process each, and its teachers"):
        _role_devices(config.stages[0], config, machine("v5e-16"))


@pytest.mark.thorough
def test_what_is_sampled_from_is_counted(tmp_path: Path) -> None:
    """Weights in 8 bits, a teacher of the samples, a draft model with its cache, and recorded experts."""
    model = tiny_model()
    save_model(model, tmp_path / "other")
    rows, other = {"vocab_size": model.config.vocab_size}, {"path": str(tmp_path / "other")}
    own = bytes_on_device(placed_shapes(ModelWeights(model), _mesh(run_of(tmp_path, rl_stage()), CPU_8)))
    stage = rl_stage(
        rollout={"quantize": "int8", "speculative": {"kind": "draft", **other}}, teachers=[other], teacher_coef=0.5
    )
    config = load_config(write_run(tmp_path, stage, model={"init": {**INIT, **rows}, "tokenizer": "bytes"}))
    planned = _stage(setup_of(config), CPU_8)
    phases, beside = {phase.name: phase for phase in planned.phases}, beside_of(planned)
    copied = beside["trainer: update"]["weights quantized or merged"]
    trained = phases["update"].own["weights of the actor"]
    assert 0 < copied < trained / 2
    others = {name: size for name, size in beside["trainer: update"].items() if name != "reference"}
    assert others == {"weights quantized or merged": copied, "teachers": own, "draft model": own}
    drafted = phases["decode with drafts"]
    assert drafted.beside["draft model before layout"] + drafted.own["draft model"] == own
    assert phases["decode"].beside["cache of the draft model"] == drafted.own["cache of the draft model"] > 0
    given = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(phases["copy"].lower().out_info))
    assert given > 8 * copied / 2 and "weights quantized or merged" not in phases["copy"].beside
    assert dict(phases["scores"].own) == {"teachers": own} and "draft model" in phases["scores"].beside
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    moe = {"init": {**INIT, **experts, "norm_topk_prob": True}, "tokenizer": "bytes"}
    config = load_config(write_run(tmp_path, rl_stage(rollout={"record_routing": True}), model=moe))
    update = next(phase for phase in _stage(setup_of(config), CPU_8).phases if phase.name == "update")
    layers = INIT["num_hidden_layers"]
    assert any(x.shape[-3:] == (16, layers, 2) for x in jax.tree.leaves(update.lower().in_avals))


def gather_of(folder: Path, memory: int, *overrides: str, platform: str = "tpu") -> GatherChoice | None:
    config = load_config(write_run(folder, sft_stage(batch_rows=32, micro_batch_rows=8)), [*overrides])
    setup = setup_of(config, memory)
    return choose_gather(setup, choose_remat(setup), platform=platform)


def test_when_weights_are_gathered(tmp_path: Path) -> None:
    """Once an update where memory for them and their gradients is there; not on CPU, whose devices share theirs."""
    found = gather_of(tmp_path, 1 << 30)
    assert found is not None and found.once and found.chosen and found.passes == 4 and found.spare is not None
    count = 6544
    assert found.needed == 4 * count + 7 * (4 + 4) * count // 8
    assert found.layer == 7 / 8 * 3 * 4 * count and found.update == 7 / 8 * 2 * 4 * count
    needed = (1 << 30) - round((found.spare - found.needed) / (1 - HEADROOM))
    for memory, once in ((needed + 9, True), (needed - 9, False)):
        again = gather_of(tmp_path, memory)
        assert again is not None and again.once == once
    on_cpu, one_pass = (
        gather_of(tmp_path, 1 << 30, platform="cpu"),
        gather_of(tmp_path, 1 << 30, "stages.0.micro_batch_rows=32"),
    )
    assert on_cpu is not None and one_pass is not None and not on_cpu.once and not one_pass.once
    two = gather_of(tmp_path, 1 << 30, "mesh={data: 2, fsdp: 4}")
    assert two is not None and two.update == 3 / 4 * 8 * count + 2 / 2 * 4 * count / 4
    asked = gather_of(tmp_path, 1, "mesh.gather=update", platform="cpu")
    assert asked is not None and asked.once and not asked.chosen
    assert next(asked.lines()) == "  gather: update; wire by arithmetic at least:"
    assert gather_of(tmp_path, 1 << 30, "mesh={fsdp: 4, expert: 2}") is None
    with pytest.raises(ConfigError, match="mesh.gather=update needs fsdp above 1"):
        gather_of(tmp_path, 1 << 30, "mesh={data: 8, fsdp: 1, gather: update}")


def test_what_cannot_fit_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where devices state their memory: by what must lie there at once, to the byte."""
    config = run_of(tmp_path, rl_stage(algorithm="ppo"))
    files, mesh, stage = _model_files(config), _mesh(config, CPU_8), stage_of(tmp_path, algorithm="ppo")
    weights, critic = weights_on(8), weights_on(8, 262 * 16)
    held = {f"{phase.role}: {phase.name}": phase.held for phase in stage.phases}
    assert held["trainer: update"] == held["critic: update"] == 3 * (weights + critic) + 2 * COUNTERS
    most = max(held.values())
    check_memory("0-rl", stage.phases, most)
    monkeypatch.setattr("posttrain.runs.run._stated_memory", lambda mesh: held["trainer: update"] - 1)
    with pytest.raises(ConfigError, match=r"0-rl: \w+: \w+ needs at least .* of a device, which has .* --force"):
        _memory_choices(config, files, mesh, force=False)
    assert _memory_choices(config, files, mesh, force=True) == [("none", None)]
    monkeypatch.setattr("posttrain.runs.run._stated_memory", lambda mesh: most)
    assert _memory_choices(config, files, mesh, force=False) == [("none", None)]
