"""Plan of a run for a machine that need not be there: `posttrain plan CONFIG --devices v5e-8`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from posttrain.batch import rows_per_pass
from posttrain.config import (
    MESH_AXES,
    DistillSection,
    MeshSection,
    OnlineSection,
    Remat,
    RematName,
    RLSection,
    RunConfig,
    SavedActivations,
    TeacherSection,
    TrainSection,
)
from posttrain.config.algorithm import PPO
from posttrain.config.base import Quantize
from posttrain.config.locator import Locator
from posttrain.config.yaml_file import dump_config
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError
from posttrain.kernels.logits.layout import VocabSharding, chunk_length
from posttrain.mesh import make_mesh, row_shards, torus_note
from posttrain.models.activations import ATTENTION, SavedCost, saved_costs, saved_names, shown_remat
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.models.moe import SLACK
from posttrain.plan.lowered import Figures, bytes_on_device, figures_of
from posttrain.plan.machine import GIB, Machine, libtpu_version
from posttrain.plan.phases import stage_plan
from posttrain.plan.report import UPDATE, Outcome, Roles, StagePlan, in_units, moments, report, report_process
from posttrain.rl.algorithms import needs_reference
from posttrain.runs.check import FLOAT32_BYTES, model_outline, training_size
from posttrain.runs.prepare import fit_lengths
from posttrain.stages.cluster import engine_mesh
from posttrain.stages.context import RoleDevices, devices_of_teachers, num_training_devices, role_devices
from posttrain.stages.online import one_process
from posttrain.stages.table import check_row_tokens, stage_names
from posttrain.train.programs import placed_shapes
from posttrain.weights.load import check_mesh, random_weights
from posttrain.weights.locate import ModelFiles, read_model_files, tokenizer_name, trained_model_files
from posttrain.weights.scalar_head import add_scalar_head
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
        stage = _stage(section, config, files, mesh, machine)
        yield f"{name}:"
        own = _role_devices(section, config, machine)
        yield from choose_remat(section, config, files, mesh, own, chip.memory).lines()
        try:
            outcomes = _compiled(stage, machine)
        except MemoryError as error:
            yield f"  does not fit: {error}"
            outcomes = []
        else:
            yield from report(stage, outcomes, machine)
            if isinstance(section, OnlineSection) and machine.num_hosts > 1:
                yield f"  not counted: the copies of the weights with which the {machine.num_hosts} processes sample"
            if chip.platform == "cpu":
                read = _loading(config, files, mesh, machine)
                yield from report_process(moments(stage, outcomes, read))
        if outcomes and all(outcome.fits for outcome in outcomes):
            yield "  it fits"
        elif search:
            yield "  " + _nearest(section, config, files, machine)


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
    outline = _outline(config, files, mesh, "full")
    if config.model.init is None:
        sizes = [bytes_on_device(array) for array in placed_shapes(ModelWeights(outline), mesh).values()]
        return sum(sizes) + max(sizes)
    dtype = jnp.dtype(config.model.dtype)
    _, draw = random_weights(outline.config, outline.compute, dtype, config.model.quantize)
    return figures_of(draw.lower(jax.ShapeDtypeStruct((), jnp.uint32)), machine, mesh)


def _model_files(config: RunConfig) -> ModelFiles:
    section = config.model
    sized = section.init is None or "vocab_size" in section.init
    files = trained_model_files(section, None if sized else load_tokenizer(tokenizer_name(section)))
    if files.config is None:
        raise ConfigError(f"plan: no network to read the config.json of model.path={section.path}; give a folder")
    return files


def _mesh(config: RunConfig, machine: Machine) -> Mesh:
    if devices_of_teachers(config, machine.num_devices):
        raise ConfigError("plan: cannot plan teachers on devices of their own yet; remove their mesh for the plan")
    devices = machine.devices()[: num_training_devices(config, machine.num_devices)]
    whole = machine.chip.platform == "tpu" and len(devices) == machine.num_devices
    if whole and config.mesh.slices != machine.num_slices:
        raise ConfigError(
            f"mesh.slices={config.mesh.slices}: the machine has {machine.num_slices}; "
            + ("set mesh.slices" if machine.num_slices > 1 else f"plan for {config.mesh.slices}x{machine.name}")
        )
    return make_mesh(config.mesh, machine.part(devices))


def _stage(section: TrainSection, config: RunConfig, files: ModelFiles, mesh: Mesh, machine: Machine) -> StagePlan:
    remat, own, memory = config.model.remat, _role_devices(section, config, machine), machine.chip.memory
    if remat == "auto":
        remat = choose_remat(section, config, files, mesh, own, memory).remat
    roles = _roles(section, config, files, mesh, own, memory, remat)
    return stage_plan(section, _outline(config, files, mesh, remat), mesh, memory, roles)


def _role_devices(section: TrainSection, config: RunConfig, machine: Machine) -> RoleDevices:
    """Devices of the roles. ConfigError for roles that a machine of several processes cannot have."""
    if not isinstance(section, OnlineSection):
        return RoleDevices()
    if machine.num_hosts > 1 and (reason := one_process(section)) is not None:
        raise ConfigError(f"plan: {machine.name} has {machine.num_hosts} hosts with a process each, and {reason}")
    found = vars(role_devices(config, section.placement, machine.devices()))
    return RoleDevices(**{role: None if own is None else machine.part(own) for role, own in found.items()})


def _roles(
    section: TrainSection,
    config: RunConfig,
    files: ModelFiles,
    mesh: Mesh,
    own: RoleDevices,
    memory: int,
    remat: Remat,
) -> Roles:
    """Models and devices of the roles of a stage, as `make_cluster` has them."""
    if isinstance(section, DistillSection):
        inside = [teacher for teacher in section.teachers if not teacher.outside and section.cache is None]
        return Roles(teachers=[_teacher(teacher, config, files, mesh, remat) for teacher in inside])
    if not isinstance(section, RLSection):
        return Roles()
    model, rollout, reference, critic = _outline(config, files, mesh, remat), None, None, None
    if own.rollout is not None:
        rollout = engine_mesh(model, mesh, own.rollout, section, memory)
    if needs_reference(section) and (own.reference is not None or section.reference.path is not None):
        there = mesh if own.reference is None else make_mesh(MeshSection(fsdp=-1), own.reference)
        reference = _other(section.reference.path, config, files, there, "none"), there
    if isinstance(section.algorithm, PPO):
        there = mesh if own.critic is None else make_mesh(MeshSection(fsdp=-1), own.critic)
        whole = config.model.model_copy(update={"lora": None, "adapter": None, "quantize": "none"})
        without = config.model_copy(update={"model": whole})
        scored = _other(section.algorithm.critic.path, without, files, there, remat)
        critic = nnx.eval_shape(lambda made: _with_score(made, config.seed), scored), there
    return Roles(rollout=rollout, reference=reference, critic=critic)


def _with_score(model: Decoder, seed: int) -> Decoder:
    add_scalar_head(model, seed=seed)
    return model


def _other(
    path: Locator | None, config: RunConfig, files: ModelFiles, mesh: Mesh, remat: Remat, quantize: Quantize = "none"
) -> Decoder:
    """Model of a role as shapes: another checkpoint, or the trained one."""
    if path is None:
        return _outline(config, files, mesh, remat)
    other = read_model_files(path.resolved)
    if other.config is None:
        raise ConfigError(f"plan: no network to read the config.json of {path}; give a folder")
    plain = config.model.model_copy(update={"lora": None, "adapter": None, "quantize": quantize})
    return _outline(config.model_copy(update={"model": plain}), other, mesh, remat)


def _outline(config: RunConfig, files: ModelFiles, mesh: Mesh, remat: Remat) -> Decoder:
    outline, section = model_outline(config, files), config.model
    check_mesh(outline, mesh.shape)
    outline.compute = Compute(
        dtype=jnp.dtype(section.compute_dtype or section.dtype),
        remat=remat,
        attention=section.attention,
        decode_attention=section.decode_attention,
        grouped_matmul=section.grouped_matmul,
        mesh=mesh,
    )
    return outline


def _teacher(section: TeacherSection, config: RunConfig, files: ModelFiles, mesh: Mesh, remat: Remat) -> Decoder:
    """Teacher as shapes, in its precision. ConfigError where its vocabulary has other rows than the student's."""
    changes: dict[str, Any] = {"dtype": section.dtype or config.model.dtype}
    changes["compute_dtype"] = config.model.compute_dtype or changes["dtype"]
    types = config.model_copy(update={"model": config.model.model_copy(update=changes)})
    teacher = _other(section.path, types, files, mesh, remat, section.quantize)
    assert files.config is not None
    if teacher.config.vocab_size != files.config.vocab_size:
        raise ConfigError(
            f"plan: cannot plan the teacher {section.title} yet: its vocabulary has {teacher.config.vocab_size:,} "
            f"rows, the student's {files.config.vocab_size:,}"
        )
    return teacher


HEADROOM = 0.08
"""Share of the memory that `remat: auto` leaves free for what its estimate does not see."""

KERNEL_TIME = 2.0
"""Time of an operation in the attention kernel relative to one in a matrix product."""

PLAIN_FACTOR = 4.0
"""Bytes that `remat: none` saves, relative to those of all named activations."""


@dataclass(frozen=True, kw_only=True)
class RematChoice:
    """Activations that a stage saves on a machine, and what `auto` weighs."""

    remat: Remat
    spare: int | None
    """Bytes on a device that `auto` may fill, beyond what `full` needs by estimate; None: `remat` was set."""
    costs: Mapping[RematName, SavedCost]
    """Costs of each activation on a device and in a step, in the order in which `auto` saves them."""

    def lines(self) -> Iterator[str]:
        """Lines on each activation, with its cost."""
        saved = list(self.costs) if self.remat == "none" else saved_names(self.remat)
        spare = "" if self.spare is None else f", by auto for {in_units(max(0, self.spare))} to spare by estimate"
        yield f"  remat: {shown_remat(self.remat)}{spare}; for a step, per device:"
        for name, cost in self.costs.items():
            state = "saved" if name in saved else "computed again"
            yield f"    {name:<10}  {in_units(cost.bytes):>10}  {cost.flops / 1e12:8.3g} TFLOP  {state}"


def choose_remat(
    section: TrainSection,
    config: RunConfig,
    files: ModelFiles,
    mesh: Mesh,
    own: RoleDevices,
    memory: int,
) -> RematChoice:
    """Costs of a stage's activations and, for `remat: auto`, those that fit `memory` bytes of a device, the one that
    spares most time per byte first. ConfigError for a stage whose memory is not known."""
    outline, wanted = _outline(config, files, mesh, "full"), config.model.remat
    rows = section.step_rows
    micro = rows_per_pass(rows, section.pass_rows, row_shards(mesh))
    size, slack = outline.compute.dtype.itemsize, SLACK if mesh.shape["expert"] > 1 else 1.0
    step = saved_costs(outline.config, size, rows, section.row_tokens, slack)

    def value(name: RematName) -> float:
        return step[name].flops * (KERNEL_TIME if name == ATTENTION else 1.0) / step[name].bytes

    costs = {
        name: SavedCost(bytes=step[name].bytes * micro / rows / mesh.size, flops=step[name].flops / mesh.size)
        for name in sorted(step, key=lambda name: -value(name))
    }
    if wanted != "auto":
        return RematChoice(remat=wanted, spare=None, costs=costs)
    held = sum(cost.bytes for cost in costs.values())
    beside = _beside(section, config, files, mesh, own, memory)
    needed = _full_bytes(section, config, outline, mesh, micro, held) + beside
    spare = left = int((1 - HEADROOM) * memory - needed)
    saved: list[RematName] = []
    for name, cost in costs.items():
        if cost.bytes <= left:
            saved.append(name)
            left -= int(cost.bytes)
    remat: Remat = SavedActivations(save=tuple(saved)) if saved else "full"
    return RematChoice(remat="none" if PLAIN_FACTOR * held <= spare else remat, spare=spare, costs=costs)


def _full_bytes(
    section: TrainSection, config: RunConfig, outline: Decoder, mesh: Mesh, micro: int, held: float
) -> float:
    """Bytes on a device of an update with `remat: full`, by estimate; `held`: bytes of all named activations."""
    model, size = outline.config, outline.compute.dtype.itemsize
    state = training_size(config, outline, mesh.shape, section.optimizer)
    sums = FLOAT32_BYTES * state.trained / mesh.size if micro < section.step_rows else 0.0
    shapes = placed_shapes(ModelWeights(outline), mesh)
    layers = sum(x.size for path, x in shapes.items() if path.startswith("stages."))
    gathered = size * layers / (mesh.shape["tensor"] * mesh.shape["expert"])
    # In the backward pass of a layer: its activations and weights, with the gradients of both.
    layer = 2 * (held + gathered) / model.num_layers
    sharding = VocabSharding.of(mesh)
    chunk = chunk_length(micro, section.row_tokens, model.vocab_size, sharding) * micro / sharding.groups
    logits = 3 * FLOAT32_BYTES * chunk * model.vocab_size / sharding.shards
    inputs = model.num_layers * micro * section.row_tokens * model.embed_dim * size / mesh.size
    return state.per_device + sums + inputs + max(layer, logits)


def _beside(
    section: TrainSection,
    config: RunConfig,
    files: ModelFiles,
    mesh: Mesh,
    own: RoleDevices,
    memory: int,
) -> int:
    """Bytes on a device beside an update. ConfigError for a stage whose memory is not known."""
    try:
        roles = _roles(section, config, files, mesh, own, memory, "full")
        phases = stage_plan(section, _outline(config, files, mesh, "full"), mesh, memory, roles).phases
    except ConfigError as error:
        raise ConfigError(f"model.remat=auto: name the activations to save; {error}") from None
    teachers = sum(bytes_on_device(placed_shapes(ModelWeights(teacher), mesh)) for teacher in roles.teachers)
    return teachers + next(phase.bytes_beside for phase in phases if (phase.role, phase.name) == ("trainer", UPDATE))


def _nearest(section: TrainSection, config: RunConfig, files: ModelFiles, machine: Machine) -> str:
    """Nearest setting that fits, of those that change one thing or build on the change before."""
    tried = []
    for changes in list(_changes(section, config, machine))[:MAX_TRIED]:
        changed, stage = _changed(config, section, changes)
        names = " ".join(f"{name}={value}" for name, value in changes.items())
        try:
            mesh = _mesh(changed, machine)
            outcomes = _compiled(_stage(stage, changed, files, mesh, machine), machine)
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
