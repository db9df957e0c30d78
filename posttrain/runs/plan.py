"""Plan of a run for a machine that need not be there: `posttrain plan CONFIG --devices v5e-8`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from posttrain.config import (
    MESH_AXES,
    OnlineSection,
    RLSection,
    RunConfig,
    SavedActivations,
    TrainSection,
)
from posttrain.config.yaml_file import dump_config, load_recorded
from posttrain.data.tokenizer import load_tokenizer
from posttrain.distill.teachers import own_devices
from posttrain.errors import ConfigError
from posttrain.mesh import make_mesh, torus_note
from posttrain.plan.lowered import Figures, bytes_on_device, figures_of
from posttrain.plan.machine import GIB, Machine, libtpu_version
from posttrain.plan.report import (
    COPYING,
    DECODE,
    DRAFTED,
    ENCODE,
    EVALUATION,
    LAYOUT,
    PREFILL,
    REWARDS,
    SCORES,
    STATISTICS,
    SYNC,
    UPDATE,
    VALUES,
    Beside,
    Outcome,
    StageBeside,
    StagePlan,
    in_units,
    moments,
    move_seconds,
    report,
    report_process,
    step_seconds,
)
from posttrain.runs.folder import CONFIG_NAME, devices_of
from posttrain.runs.memory import GatherChoice, RematChoice, StageSetup, choose_gather, choose_remat, outline_on
from posttrain.runs.prepare import fit_lengths
from posttrain.stages.context import RoleDevices, num_training_devices, role_devices
from posttrain.stages.table import check_row_tokens, stage_kind, stage_names
from posttrain.tracking.records import read_metrics
from posttrain.train.programs import placed_shapes
from posttrain.weights.load import random_weights
from posttrain.weights.locate import ModelFiles, is_sized, tokenizer_name, trained_model_files
from posttrain.weights.state import ModelWeights

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
MAX_TRIED = 5
"""Settings that are compiled in search of one that fits."""


def plan(config: RunConfig, machine: Machine, *, search: bool = True) -> Iterator[str]:
    """Lines on memory, traffic, time and price of every stage, from `config.json` and shapes alone.

    `search`: where a stage does not fit, look for the nearest setting that does. Raises ConfigError for what cannot be
    planned.
    """
    files = _model_files(config)
    assert files.config is not None
    config = fit_lengths(config, files.config.max_positions)
    chip = machine.chip
    slices = f"{machine.num_slices} slices " if machine.num_slices > 1 else ""
    yield f"machine: {slices}{machine.name}, {machine.num_devices} devices with {chip.memory / GIB:.2f} GiB each"
    if machine.has_compiler:
        yield "compiler: " + (f"TPU's (libtpu {libtpu_version()})" if chip.platform == "tpu" else "XLA's for CPU")
    else:
        yield (
            "compiler: XLA's for virtual CPU devices, without the machine's kernels; memory is an estimate"
            + ("; TPU's own needs libtpu, the extra 'aot'" if chip.platform == "tpu" else "")
        )
    mesh = _mesh(config, machine)
    check_row_tokens(config, mesh.shape["context"])
    yield "mesh: " + ", ".join(f"{axis}={mesh.shape[axis]}" for axis in MESH_AXES)
    if (note := torus_note(mesh)) is not None:
        yield f"torus: {note}"
    for name, section in zip(stage_names(config), config.stages, strict=True):
        setup = _setup(section, config, files, mesh, machine)
        stage = _stage(setup, machine)
        yield f"{name}:"
        for choice in _choices(setup, machine):
            yield from () if choice is None else choice.lines()
        try:
            outcomes = _compiled(stage, machine)
        except MemoryError as error:
            yield f"  does not fit: {error}"
            outcomes = []
        else:
            yield from report(stage, outcomes, machine)
            yield from _pictures(stage)
            if isinstance(section, OnlineSection) and machine.num_hosts > 1:
                yield f"  not counted: the copies of the weights with which the {machine.num_hosts} processes sample"
            if chip.platform == "cpu":
                read = _loading(config, files, mesh, machine)
                yield from report_process(moments(stage, outcomes, read))
        if outcomes and all(outcome.fits for outcome in outcomes):
            yield "  it fits"
        elif search:
            yield "  " + _nearest(section, config, files, machine)


def _pictures(stage: StagePlan) -> Iterator[str]:
    """Line of a stage with images on the tower's share of an update, or of a step where it runs before."""
    phase = next(phase for phase in stage.phases if (phase.role, phase.name) == ("trainer", UPDATE))
    if encode := sum(one.runs * one.flops for one in stage.phases if one.role == "trainer" and ENCODE in one.name):
        share = encode / (encode + phase.runs * phase.flops)
        yield (
            f"  images: the frozen vision tower has {share:.0%} of the operations of updates in the first epoch, later "
            "none for pictures that image_cache_mib holds"
        )
    if phase.tower:
        yield f"  images: the vision tower has {phase.tower / phase.flops:.0%} of the operations of an update"


def _compiled(stage: StagePlan, machine: Machine) -> list[Outcome]:
    """Compile all phases. MemoryError where the compiler finds no plan that fits."""
    outcomes = []
    for phase in stage.phases:
        try:
            figures = figures_of(phase.lower(), machine, phase.mesh)
        except jax.errors.JaxRuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            first = next((line for line in str(error).splitlines() if "Used" in line or "exceed" in line), str(error))
            raise MemoryError(f"{phase.name}: {first.strip()[:200]}") from error
        outcomes.append(Outcome(phase=phase, figures=figures, machine=machine))
    return outcomes


def _loading(config: RunConfig, files: ModelFiles, mesh: Mesh, machine: Machine) -> Figures | int:
    """Figures of the program that draws random weights; of a checkpoint bytes of the weights and of the largest."""
    outline = outline_on(config, files, mesh, "full")
    if config.model.init is None:
        sizes = [bytes_on_device(array) for array in placed_shapes(ModelWeights(outline), mesh).values()]
        return sum(sizes) + max(sizes)
    dtype = jnp.dtype(config.model.dtype)
    _, draw = random_weights(outline.config, outline.compute, dtype, config.model.quantize)
    return figures_of(draw.lower(jax.ShapeDtypeStruct((), jnp.uint32)), machine, mesh)


def _model_files(config: RunConfig) -> ModelFiles:
    section = config.model
    sized = section.init is None or is_sized(section.init)
    files = trained_model_files(section, None if sized else load_tokenizer(tokenizer_name(section)))
    if files.config is None:
        raise ConfigError(f"plan: no network to read the config.json of model.path={section.path}; give a folder")
    return files


def _mesh(config: RunConfig, machine: Machine) -> Mesh:
    devices = machine.devices()[: num_training_devices(config, machine.num_devices)]
    whole = machine.chip.platform == "tpu" and len(devices) == machine.num_devices
    if whole and config.mesh.slices != machine.num_slices:
        raise ConfigError(
            f"mesh.slices={config.mesh.slices}: the machine has {machine.num_slices}; "
            + ("set mesh.slices" if machine.num_slices > 1 else f"plan for {config.mesh.slices}x{machine.name}")
        )
    return make_mesh(config.mesh, machine.part(devices))


def _setup(section: TrainSection, config: RunConfig, files: ModelFiles, mesh: Mesh, machine: Machine) -> StageSetup:
    own, memory = _role_devices(section, config, machine), machine.chip.memory
    taught = own_devices(getattr(section, "teachers", ()), machine.devices())
    return StageSetup(
        section=section,
        config=config,
        files=files,
        mesh=mesh,
        devices=own,
        memory=memory,
        teachers={title: None if devices is None else machine.part(devices) for title, devices in taught.items()},
    )


def _stage(setup: StageSetup, machine: Machine) -> StagePlan:
    wanted, (remat, gather) = setup.config.model.remat, _choices(setup, machine)
    return setup.plan(remat.remat if wanted == "auto" else wanted, gather_once=gather is not None and gather.once)


def _choices(setup: StageSetup, machine: Machine) -> tuple[RematChoice, GatherChoice | None]:
    """Choose what a stage saves, and when it gathers, as a run on the machine would choose."""
    remat = choose_remat(setup)
    return remat, choose_gather(setup, remat, platform=machine.chip.platform)


def _role_devices(section: TrainSection, config: RunConfig, machine: Machine) -> RoleDevices:
    """Devices of the roles. ConfigError for a stage or roles that a machine of several processes cannot have."""
    kind = config.stages[config.stages.index(section)].kind
    if machine.num_hosts > 1 and (reason := stage_kind(kind).one_process(section)) is not None:
        raise ConfigError(f"plan: {machine.name} has {machine.num_hosts} hosts with a process each, and {reason}")
    if not isinstance(section, OnlineSection):
        return RoleDevices()
    found = vars(role_devices(config, section.placement, machine.devices()))
    return RoleDevices(**{role: None if own is None else machine.part(own) for role, own in found.items()})


def _nearest(section: TrainSection, config: RunConfig, files: ModelFiles, machine: Machine) -> str:
    """Nearest setting that fits, of those that change one thing or build on the change before."""
    tried = []
    for changes in list(_changes(section, config, machine))[:MAX_TRIED]:
        changed, stage = _changed(config, section, changes)
        names = " ".join(f"{name}={value}" for name, value in changes.items())
        try:
            mesh = _mesh(changed, machine)
            outcomes = _compiled(_stage(_setup(stage, changed, files, mesh, machine), machine), machine)
        except (MemoryError, ConfigError):
            tried.append(names)
            continue
        if all(outcome.fits for outcome in outcomes):
            peak = max(outcome.peak for outcome in outcomes)
            return f"it does not fit; the nearest setting that does: {names} ({peak / GIB:.2f} GiB)"
        tried.append(names)
    return f"it does not fit, nor with {'; nor '.join(tried)}; take more devices or a smaller model"


def _changes(section: TrainSection, config: RunConfig, machine: Machine) -> Iterator[dict[str, Any]]:
    """Changes to try, the least costly ones first; each keeps those before it."""
    changes: dict[str, Any] = {}
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.expert, config.mesh.tensor)
    if machine.num_devices > 1 and sizes != (1, -1, 1, 1):
        changes |= {"mesh.data": 1, "mesh.fsdp": -1, "mesh.expert": 1, "mesh.tensor": 1}
        yield dict(changes)
    if config.model.remat != "full":
        changes["model.remat"] = "full"
        yield dict(changes)
    if section.micro_batch_rows != machine.num_devices:
        changes["micro_batch_rows"] = machine.num_devices
        yield dict(changes)
    if section.optimizer.moments == "float32":
        changes["optimizer.moments"] = "bfloat16"
        yield dict(changes)
    if config.model.dtype == "bfloat16" and not section.optimizer.stochastic_rounding:
        changes["optimizer.stochastic_rounding"] = True
        yield dict(changes)
    if config.model.lora is None and config.model.adapter is None:
        changes["model.lora"] = {"rank": 16}
        yield dict(changes)


def _changed(config: RunConfig, section: TrainSection, changes: dict[str, Any]) -> tuple[RunConfig, TrainSection]:
    fields = config.model_dump(exclude_unset=True)
    place = config.stages.index(section)
    for name, value in changes.items():
        head, _, last = name.rpartition(".")
        stage = fields["stages"][place]
        target = stage.setdefault(head, {}) if head == "optimizer" else fields.setdefault(head, {}) if head else stage
        target[last] = value
    changed = RunConfig.model_validate(fields)
    return changed, changed.stages[place]


MEASURED = {
    "sampling": ((LAYOUT, ENCODE, PREFILL, DECODE, DRAFTED), ("rollout/prefill_s", "rollout/decode_s"), "rollout"),
    REWARDS: ((REWARDS,), ("timing_s/rewards",), "rewards"),
    STATISTICS: ((STATISTICS, VALUES, SCORES), ("timing_s/logps",), "logps"),
    UPDATE: ((UPDATE,), ("timing_s/update",), "update"),
    SYNC: ((COPYING,), ("timing_s/sync",), "sync"),
}
"""Phases of RL that a run measures together: their names in a plan, metrics of their seconds, and the name under which
a run has their peak."""
NOT_STATED = "not stated by CPU devices"


def plan_run(run: Path, machine: Machine) -> list[StageBeside]:
    """Planned beside measured of each stage of a run that has begun. ConfigError for a run without steps."""
    config, metrics, devices = load_recorded(run / CONFIG_NAME), read_metrics(run), devices_of(run)
    found, before = [], 0.0
    for name, section in zip(stage_names(config), config.stages, strict=True):
        rows = [row for row in metrics if row["stage"] == name and "step_time" in row]
        if rows:
            found.append(_stage_beside(name, section, _as_run(config, run / name), rows, devices, machine, before))
            before = max(before, *(row["perf/peak_memory_gib"] for row in rows))
    if not found:
        raise ConfigError(f"plan: {run} has no step yet; plan its {CONFIG_NAME}")
    return found


def _as_run(config: RunConfig, folder: Path) -> RunConfig:
    """Configuration with what `auto` chose in a stage."""

    def chosen(name: str) -> Any:
        file = folder / f"{name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    remat, once = chosen("remat"), chosen("gather")
    if isinstance(remat, dict):
        remat = SavedActivations(**remat)
    model = config.model if remat is None else config.model.model_copy(update={"remat": remat})
    gather = config.mesh.gather if once is None else "update" if once else "layer"
    return config.model_copy(update={"model": model, "mesh": config.mesh.model_copy(update={"gather": gather})})


def _stage_beside(
    name: str,
    section: TrainSection,
    config: RunConfig,
    metrics: Sequence[Mapping[str, Any]],
    devices: Sequence[Mapping[str, Any]],
    machine: Machine,
    before: float,
) -> StageBeside:
    stage, outcomes, process, notes = None, list[Outcome](), None, list[str]()
    try:
        files = _model_files(config)
        assert files.config is not None
        fitted = fit_lengths(config, files.config.max_positions)
        mesh = _mesh(fitted, machine)
        stage = _stage(_setup(section, fitted, files, mesh, machine), machine)
        outcomes = _compiled(stage, machine)
        if machine.chip.platform == "cpu":
            process = max(one.total for one in moments(stage, outcomes, _loading(fitted, files, mesh, machine)))
        notes += [f"not counted: {one}" for one in stage.not_counted]
    except (ConfigError, MemoryError) as error:
        notes.append(f"not planned: {error}")
    quiet = [row for row in metrics if row.get("perf/compilations") == 0]
    measured = Measured(quiet or metrics, metrics, devices)
    rows = list(_rows(section, stage, outcomes, measured, machine))
    if measured.on_cpu:
        rows.append(Beside(name="process", planned_bytes=process, **measured.process_peak(before)))
    if not machine.has_compiler:
        notes.append("planned by XLA's compiler for virtual CPU devices, without the machine's kernels: an estimate")
    return StageBeside(
        name=name,
        machine=machine.name,
        devices=devices,
        steps=len(measured.quiet),
        compiled=not quiet,
        rows=rows,
        notes=[*notes, *measured.notes(section, stage)],
    )


@dataclass(frozen=True)
class Measured:
    """Metrics of a stage."""

    quiet: Sequence[Mapping[str, Any]]
    """Steps whose seconds count."""
    all: Sequence[Mapping[str, Any]]
    devices: Sequence[Mapping[str, Any]]

    @property
    def on_cpu(self) -> bool:
        return any(one["platform"] == "cpu" for one in self.devices)

    def seconds(self, *names: str) -> float | None:
        """Median of the sum of metrics over the steps that have them."""
        sums = [sum(row[name] for name in names) for row in self.quiet if names and all_in(names, row)]
        return statistics.median(sums) if sums else None

    def peak(self, phase: str) -> dict[str, Any]:
        """Measured peak of a phase: known if it was ever the highest so far, else at most that of the run."""
        if self.on_cpu:
            return {"memory_note": NOT_STATED}
        if not self.devices:
            return {"memory_note": "not known on devices that are not known"}
        name = f"memory/{phase}/peak_gib"
        if own := [row[name] for row in self.all if name in row]:
            return {"measured_bytes": max(own) * GIB}
        return {"memory_note": at_most(max(row["perf/peak_memory_gib"] for row in self.all))}

    def process_peak(self, before: float) -> dict[str, Any]:
        """Peak of the process on CPU; `before`: GiB at the end of the stage before."""
        highest = max(row["perf/peak_memory_gib"] for row in self.all)
        if any(one["processes"] > 1 for one in self.devices):
            return {"memory_note": f"{in_units(highest * GIB)} of the first of several"}
        return {"measured_bytes": highest * GIB} if highest > before else {"memory_note": at_most(highest)}

    def notes(self, section: TrainSection, stage: StagePlan | None) -> Iterator[str]:
        """Lines on what is not measured or not planned."""
        if not isinstance(section, OnlineSection):
            yield "not measured apart: waiting for data, which is part of a step"
            if stage is not None and any(phase.name == EVALUATION for phase in stage.phases):
                yield "not planned: the number of batches of an evaluation, whose seconds are those of all"
            return
        yield "not measured apart: layout, prefill and decode, which share dispatches" + "".join(
            f"; {value:.3g} s in those that {what}"
            for name, what in (("prefill", "read prompts"), ("decode", "only decode"))
            if (value := self.seconds(f"rollout/{name}_s")) is not None
        )
        by_model = stage is None or any(phase.name == REWARDS for phase in stage.phases)
        rest = {} if by_model else {"rewards": "timing_s/rewards"}
        rest |= {"the whole of sampling, with what waits for it": "timing_s/rollout"}
        for what, name in rest.items():
            if (value := self.seconds(name)) is not None:
                yield f"not planned: {what}, {value:.3g} s ({name})"
        tokens = self.seconds("completions/num_tokens")
        if stage is not None and tokens is not None:
            yield f"sampled tokens of a step: {tokens:,.0f} measured, {stage.tokens:,} planned as the most"


def at_most(peak_gib: float) -> str:
    return f"at most {in_units(peak_gib * GIB)}"


def all_in(names: Sequence[str], row: Mapping[str, Any]) -> bool:
    return all(row.get(name) is not None for name in names)


def _rows(
    section: TrainSection, stage: StagePlan | None, outcomes: Sequence[Outcome], measured: Measured, machine: Machine
) -> Iterator[Beside]:
    """Rows of groups of phases that are measured together, each followed by its phases if it has several."""
    trained = [outcome for outcome in outcomes if outcome.phase.name != EVALUATION]
    moves = [] if stage is None else stage.moves
    online = isinstance(section, OnlineSection)
    ahead = isinstance(section, RLSection) and section.asynchronous is not None
    for name, (phases, metrics, timed) in MEASURED.items() if online else ():
        own = [outcome for outcome in trained if outcome.phase.name in phases]
        seconds = [*(one.step_seconds for one in own), *(move_seconds(m, machine) for m in moves if m.phase == name)]
        if not seconds and (trained or measured.seconds(*metrics) is None):
            continue
        peak = measured.peak(timed)
        if ahead and not measured.on_cpu:
            peak = {"memory_note": "not told apart: samples are made meanwhile"}
        # Of what scores while samples are made, a run measures the wait alone.
        by = () if ahead and name == REWARDS else metrics
        yield from _group(name, sum(seconds) if seconds else None, own, measured, by, peak)
    planned = step_seconds(stage, outcomes, machine) if stage is not None and trained else None
    shown = [] if online else trained
    name = trained[0].phase.name if len(shown) == 1 else "step"
    yield from _group(name, planned, trained, measured, ("step_time",), measured.peak("step"), apart=not online)
    for outcome in outcomes:
        if outcome.phase.name == EVALUATION:
            yield from _group(
                EVALUATION, None, [outcome], measured, ("timing_s/evaluation",), measured.peak(EVALUATION)
            )


def _group(
    name: str,
    planned: float | None,
    own: Sequence[Outcome],
    measured: Measured,
    metrics: Sequence[str],
    peak: Mapping[str, Any],
    *,
    apart: bool = True,
) -> Iterator[Beside]:
    """Row of phases that are measured together and, `apart`, one for each if there are several."""
    highest = max((outcome.peak for outcome in own), default=None)
    seconds: dict[str, Any] = {"planned_s": planned, "measured_s": measured.seconds(*metrics)}
    yield Beside(name=name, measured_by=" + ".join(metrics), planned_bytes=highest, **seconds, **peak)
    for outcome in own if apart and len(own) > 1 else ():
        phase = f"  {outcome.phase.role}: {outcome.phase.name}"
        yield Beside(name=phase, planned_s=outcome.step_seconds, planned_bytes=outcome.peak)


def plan_elsewhere(config: RunConfig, devices: str) -> Iterator[str]:
    """Lines of `posttrain plan --quick` for a machine, as they come. ConfigError with what the command says if it
    fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "posttrain", "plan", str(file), "--devices", devices, "--quick"]
        errors = Path(folder) / "errors"
        with (
            errors.open("wb") as stderr,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, encoding="utf-8") as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                yield line.rstrip("\n")
        if process.returncode:
            last = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            said = "\n".join(line.removeprefix("error: ") for line in last)
            raise ConfigError(said or f"plan: the process ended with code {process.returncode}")
