"""Plans beside runs: the programs that a run of the same configuration compiles, and what it measures."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.cluster.reference import FrozenModel
from posttrain.config.yaml_file import load_config
from posttrain.plan.hlo import ProgramText
from posttrain.plan.lowered import Figures, compile_program
from posttrain.plan.machine import GIB, machine
from posttrain.plan.report import Outcome, Phase, StagePlan
from posttrain.runs.plan import Measured, _mesh, _model_files, _rows, _setup, _stage
from posttrain.train.trainer import Trainer
from posttrain.weights.save import save_model
from tests.plan.test_plan import CPU_8, beside_of, run_of, stage_of
from tests.stages.runs import INIT, posttrain, rl_stage, sft_stage, write_run
from tests.stages.test_preference import PAIRS, preference_stage
from tests.tiny import tiny_model

CPU_1 = machine("cpu-1")
PEAK = 0.03
"""Greatest relative difference of peaks."""
TEXTS: dict[str, jax.stages.Lowered] = {}
"""Programs that the runs of this file have compiled: a process compiles those of its engines once."""


@contextlib.contextmanager
def compiled() -> Iterator[list[jax.stages.Lowered]]:
    """Programs that are compiled meanwhile."""
    found: list[jax.stages.Lowered] = []
    compile_, passes = jax.stages.Lowered.compile, FrozenModel._in_passes

    def compiling(self: jax.stages.Lowered, *given: Any, **more: Any) -> Any:
        found.append(self)
        return compile_(self, *given, **more)

    def of_trainer(self: Trainer, program: Any, *arguments: Any) -> None:
        found.append(program.lower(*arguments))

    def of_frozen(self: FrozenModel, program: Any, batch: Any) -> Any:
        def seen(weights: Any, rows: Any) -> Any:
            found.append(program.lower(weights, rows))
            return program(weights, rows)

        return passes(self, seen, batch)

    with (
        mock.patch.object(jax.stages.Lowered, "compile", compiling),
        mock.patch.object(Trainer, "_meet", of_trainer),
        mock.patch.object(FrozenModel, "_in_passes", of_frozen),
    ):
        yield found


def planned(file: Path) -> StagePlan:
    config = load_config(file)
    return _stage(_setup(config.stages[0], config, _model_files(config), _mesh(config, CPU_1), CPU_1), CPU_1)


def check(file: Path) -> set[str]:
    """Run a configuration, whose programs are those of its plan; names of the phases."""
    stage = planned(file)
    with compiled() as found:
        done = posttrain("run", file)
    assert done.code == 0, done.err
    TEXTS.update({one.as_text(): one for one in found})
    for phase in stage.phases:
        check_phase(phase)
    return {f"{phase.role}: {phase.name}" for phase in stage.phases}


def check_phase(phase: Phase) -> None:
    """A run compiles the same program, or one of its name and peak."""
    lowered = phase.lower()
    text = lowered.as_text()
    if text in TEXTS:
        return
    name, peak = name_of(text), compile_program(lowered, 1, for_cpu=True).peak
    peaks = [compile_program(one, 1, for_cpu=True).peak for own, one in TEXTS.items() if name_of(own) == name]
    assert any(abs(peak / one - 1) <= PEAK for one in peaks), (phase.role, phase.name, peak, peaks)


def name_of(text: str) -> str:
    return text.split(maxsplit=2)[1]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def run_of_pairs(folder: Path, stage: dict[str, Any]) -> Path:
    file = write_run(folder, stage)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return file


@pytest.mark.thorough
def test_rows_and_pairs(tmp_path: Path) -> None:
    held_out = {"path": "rows.jsonl", "chat": False, "limit": 4}
    assert check(write_run(tmp_path / "sft", sft_stage(num_steps=1, eval_dataset=held_out))) == {
        "trainer: update",
        "trainer: evaluation",
    }
    found = check(run_of_pairs(tmp_path / "dpo", preference_stage(num_steps=1)))
    assert found == {"trainer: update", "trainer: statistics"}


@pytest.mark.thorough
def test_samples_with_a_critic_and_a_reward_model(tmp_path: Path) -> None:
    scored = {"kind": "reward_model", "dataset": {"path": "pairs.jsonl"}, "num_steps": 1, "row_tokens": 64}
    file = run_of_pairs(tmp_path / "scores", scored | {"batch_rows": 4})
    assert check(file) == {"trainer: update"}
    rewards = [{"model": str(tmp_path / "scores" / "out" / "0-reward_model" / "model"), "name": "scores"}]
    found = check(write_run(tmp_path / "ppo", rl_stage(num_steps=1, algorithm="ppo", rewards=rewards)))
    sampling = {"sampler: layout", "sampler: prefill", "sampler: decode"}
    assert found - sampling == {"reward model: rewards", "critic: values", "critic: update", "trainer: update"}
    kl = {"kind": "grpo", "kl_coef": 0.1}
    found = check(write_run(tmp_path / "grpo", rl_stage(num_steps=1, algorithm=kl)))
    assert found - sampling == {"trainer: statistics", "trainer: update"}


@pytest.mark.thorough
def test_distillation(tmp_path: Path) -> None:
    save_model(model := tiny_model(), tmp_path / "teacher")
    init = {"init": {**INIT, "vocab_size": model.config.vocab_size}, "tokenizer": "bytes"}
    settings = {"kind": "distill", "num_steps": 1, "on_policy": 1, "sampling": {"max_tokens": 8}}
    taught = sft_stage(**settings, teachers=[{"path": str(tmp_path / "teacher")}])
    assert "trainer: update" in check(write_run(tmp_path / "live", taught, model=init))


def test_reward_models_are_counted(tmp_path: Path) -> None:
    """On the trainer's devices beside every program, in the precision in which they are stored; their pass has all
    samples, in rows as long as the longest, to the next power of two."""
    folder = tmp_path / "scores"
    folder.mkdir()
    fields = {**INIT, "architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(fields | {"vocab_size": 256, "dtype": "bfloat16"}))
    rewards = [{"model": str(folder), "name": name} for name in ("one", "two")]
    stage = stage_of(tmp_path, rewards=rewards)
    beside, phases = beside_of(stage), [phase for phase in stage.phases if phase.name == "rewards"]
    size = phases[0].own["reward models"]
    assert len(phases) == 2 and phases[0].beside["other reward models"] == size
    assert beside["trainer: update"]["reward models"] == 2 * size == beside["sampler: decode"]["reward models"]
    shapes = jax.tree.leaves(phases[0].lower().in_avals)
    assert {x.shape for x in shapes if x.dtype == np.int32} == {(8, 64)}
    assert sum(x.size for x in shapes if x.dtype == jnp.bfloat16) > 4 * size / 2
    check_rows(stage, rl_stage(rewards=rewards), tmp_path)


def check_rows(stage: StagePlan, section: dict[str, Any], folder: Path) -> None:
    """Reward models are measured with all rewards, and while samples are made not at all; teachers with
    log-probabilities, and a copy of the weights with their hand-over."""
    seconds = {"timing_s/rewards": 1.0, "timing_s/logps": 2.0, "timing_s/sync": 4.0}
    row = {**seconds, "step_time": 8.0, "memory/rewards/peak_gib": 2.0, "perf/peak_memory_gib": 3.0}
    measured = Measured([row], [row], [{"platform": "tpu"}])
    others = [replace(stage.phases[0], role="teacher", name="scores"), replace(stage.phases[0], name="copy")]
    phases = [phase for phase in stage.phases if phase.name == "rewards"] + others
    sizes = dict.fromkeys(("arguments", "temporaries", "peak", "code", "compiler", "kept"), 0)
    figures = Figures(**sizes, text=ProgramText(), mosaic=(), flops=0.0, compile_s=0.0)
    outcomes = [Outcome(phase=phase, figures=figures, machine=CPU_8) for phase in phases]
    both = []
    for change in ({}, {"asynchronous": {"max_staleness": 1}}):
        config = run_of(folder, {**section, **change})
        both.append(list(_rows(config.stages[0], replace(stage, phases=phases), outcomes, measured, CPU_8)))
    (rewards, one, other, statistics, sync, _), ahead = both
    assert (rewards.name, rewards.measured_s, rewards.measured_bytes) == ("rewards", 1.0, 2.0 * GIB)
    assert one.name == other.name == "  reward model: rewards"
    assert rewards.planned_s == sum(outcome.step_seconds for outcome in outcomes[:2]) > 0
    assert [(row.name, row.measured_s) for row in (statistics, sync)] == [("statistics", 2.0), ("sync", 4.0)]
    assert ahead[0].measured_s is None and ahead[0].memory_note == "not told apart: samples are made meanwhile"
