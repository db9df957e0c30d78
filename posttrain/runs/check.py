"""Check of a run before any weights load, `posttrain check`: its stages, and mesh and memory of the model's shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from posttrain.config import (
    MESH_AXES,
    ROW_AXES,
    AnyOptimizer,
    BlockDrafts,
    DatasetSection,
    DistillSection,
    DrafterSection,
    ModelDrafts,
    ModelSection,
    Muon,
    OnlineSection,
    RewardModelSection,
    RLSection,
    RunConfig,
    SequenceSection,
    TrainSection,
    UserOptimizer,
    trains_on_samples,
)
from posttrain.config.algorithm import PPO
from posttrain.config.optimizer import WidthScaled
from posttrain.config.rollout import CriticSection
from posttrain.data.sources import FewRows, few_rows
from posttrain.errors import ConfigError, placed
from posttrain.mesh import mesh_sizes, split_axes
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.runs.prepare import prepare
from posttrain.runtime.files import check_writable
from posttrain.stages.context import num_training_devices
from posttrain.stages.inputs import Inputs
from posttrain.stages.table import check_processes, check_row_tokens, row_notes, stage_kind, stage_names
from posttrain.tracking.metrics_server import check_address
from posttrain.tracking.trackers import check_dashboards
from posttrain.train.layer_matching import Matching
from posttrain.train.objective import used_once
from posttrain.train.optimizers import state_bytes, trained_parameters
from posttrain.train.transformations import BLOCK, groups_of, make_optimizer
from posttrain.user_code import is_object_spec
from posttrain.weights.load import check_mesh, outline_of
from posttrain.weights.locate import ModelFiles, read_model_files, unreachable
from posttrain.weights.lora import attach_lora, has_lora
from posttrain.weights.peft_load import adapter_outline
from posttrain.weights.quantize import quantized_outline
from posttrain.weights.scalar_head import add_scalar_head
from posttrain.weights.state import ModelWeights

if TYPE_CHECKING:
    from posttrain.models.drafter import DrafterConfig

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class TrainingSize:
    """Parameters of a model, and bytes of its training state, in total and per device."""

    total: int
    trained: int
    weights: int
    gradient: int
    """Bytes of the gradient of one micro-batch: float32, of matrices in layers the parameters' and computation's own
    type. Several micro-batches hold their float32 sum besides."""
    optimizer: int
    """Bytes of moments, and of float32 master weights of low-precision parameters if they are kept."""
    per_device: int
    gradient_per_device: int


QUICK_ROWS, QUICK_S = 256, 20.0
"""Rows of each dataset that a quick check reads, and its time for the rows of all datasets."""


def quick_check(config: RunConfig, num_devices: int | None = None, num_processes: int = 1) -> list[str]:
    """Validate a run as `check` does, over few rows of its datasets and in a bounded time; the last lines say what was
    left out."""
    stages, notes = zip(*(_making_few(section) for section in config.stages), strict=True)
    few = config.model_copy(update={"stages": stages})
    with few_rows(FewRows(most=QUICK_ROWS, seconds=QUICK_S)) as bounds:
        lines = check(few, num_devices, num_processes)
    return lines + bounds.notes() + [note for of_stage in notes for note in of_stage]


def _making_few(section: TrainSection) -> tuple[TrainSection, list[str]]:
    """Section whose functions with an argument `count` make few rows, with notes. The rows over which `num_epochs`
    passes are all made: their number gives the steps."""
    notes: list[str] = []

    def fewer(dataset: DatasetSection) -> DatasetSection:
        count, enough = dataset.args.get("count"), dataset.skip + QUICK_ROWS
        if not is_object_spec(dataset.path) or not isinstance(count, int) or count <= enough:
            return dataset
        notes.append(f"quick: {dataset.path}: called with count={enough} in place of {count:,}")
        return dataset.model_copy(update={"args": {**dataset.args, "count": enough}})

    datasets: dict[str, Any] = {}
    if section.epochs is None:
        datasets["dataset"] = fewer(section.dataset)
    if section.epochs is None and isinstance(section, SequenceSection):
        datasets["mix"] = tuple(fewer(dataset) for dataset in section.mix)
    if section.eval_dataset is not None:
        datasets["eval_dataset"] = fewer(section.eval_dataset)
    return section.model_copy(update=datasets), notes


def check(config: RunConfig, num_devices: int | None = None, num_processes: int = 1) -> list[str]:
    """Validate a run; return lines about what it would do. Raises ConfigError for the first mistake.

    `num_devices`: devices of the target machine; None: of this machine, on which folder and trackers must open.
    `num_processes`: its hosts.
    """
    if num_devices is None:
        check_writable(Path(config.output))
        check_dashboards(tensorboard=config.tensorboard, trackers=config.trackers)
        check_address(config.metrics_server)
    mesh = mesh_of_run(config, num_devices)
    check_row_tokens(config, mesh["context"])
    shards = math.prod(mesh[axis] for axis in ROW_AXES)
    check_processes(config, num_processes, shards)
    prepared = prepare(config, offline_ok=True, estimate=True)
    lines = [f"output: {config.output}{' (exists)' if Path(config.output).exists() else ''}"]
    if (model := prepared.files.config) is not None:
        lines.append(f"model: {model.model_type}, {model.num_layers} layers, vocabulary {model.vocab_size:,}")
        inputs = next((i for i in prepared.stages if i.section is prepared.config.stages[0]), None)
        matching = stage_matching(prepared.config.stages[0], inputs, prepared.files)
        lines += describe_size(prepared.config, prepared.files, mesh, matching)
    named = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    where = f"{num_devices} devices" if num_devices is not None else "this machine; --devices N for another"
    lines.append(f"mesh: {named} ({where})")
    config = prepared.config
    for name, section in zip(stage_names(config), config.stages, strict=True):
        inputs = next((i for i in prepared.stages if i.section is section), None)
        lines.append(f"{name}: {stage_kind(section.kind).describe(section, inputs, shards)}")
        lines += describe_groups(name, section, inputs, prepared.config, prepared.files)
        if section.optimizer.qk_clip is not None and model is not None:
            heads = sum(block.attention.num_heads for block in model.blocks)
            lines.append(
                f"{name}: queries and keys of {heads:,} heads are scaled down where a logit exceeds "
                f"{section.optimizer.qk_clip:g}"
            )
        if (decay := section.optimizer.layer_decay) is not None and model is not None:
            lines.append(
                f"{name}: learning rates of layers are times {decay:g} to the power of their distance from the last: "
                f"{decay ** (model.num_layers - 1):.3g} in the first, {decay**model.num_layers:.3g} of embeddings"
            )
        if (ema := section.optimizer.ema) is not None:
            lines.append(
                f"{name}: evaluates and saves the average of weights, decay {ema.decay:g} from update {ema.start:,}"
            )
        if trains_on_samples(section):
            check_sampler_mesh(section, prepared.files, mesh)
        if isinstance(section, OnlineSection):
            lines += describe_roles(name, section, config, prepared.files, mesh)
    return lines + prepared.notes + row_notes(config, shards)


def mesh_of_run(config: RunConfig, num_devices: int | None) -> dict[str, int]:
    """Devices on each axis of the training mesh. ConfigError if their product is not the number of devices.

    `num_devices`: devices of the target machine; None: of this machine.
    """
    count = jax.device_count() if num_devices is None else num_devices
    try:
        return dict(zip(MESH_AXES, mesh_sizes(config.mesh, num_training_devices(config, count)), strict=True))
    except ConfigError as error:
        if num_devices is not None:
            raise
        raise ConfigError(f"{error}, of this machine; for another use check --devices N") from error


def describe_size(
    config: RunConfig, files: ModelFiles, mesh: Mapping[str, int], matching: Matching | None
) -> list[str]:
    """Report parameters and bytes. ConfigError if the mesh does not divide the model."""
    outline = model_outline(config, files)
    check_mesh(outline, mesh)
    size = training_size(config, outline, mesh, matching=matching)
    if config.model.adapter is not None and not has_lora(outline):
        return [f"parameters: {size.total:,} and those of the adapter"]
    trained = "all trained" if size.trained == size.total else f"{size.trained:,} trained ({_share(size)})"
    parts = f"weights {_bytes(size.weights)}, gradient {_bytes(size.gradient)}, optimiser {_bytes(size.optimizer)}"
    whole = size.weights + size.gradient + size.optimizer
    devices = math.prod(mesh.values())
    split = f" ({_bytes(size.per_device)} on each of {devices} devices)" if devices > 1 else ""
    return [
        f"parameters: {size.total:,}, {trained}",
        f"memory: {_bytes(whole)} = {parts}{split}; activations and caches come on top",
    ]


def describe_groups(
    name: str, section: TrainSection, inputs: Inputs | None, config: RunConfig, files: ModelFiles
) -> list[str]:
    """Report which parameters each part of an optimiser takes, where it has several, with the bytes of their state.
    ConfigError as in `groups_of`."""
    optimizer = section.optimizer
    if isinstance(optimizer, UserOptimizer):
        return []
    wide = isinstance(optimizer, WidthScaled) and optimizer.base_width is not None
    if not (optimizer.groups or isinstance(optimizer, Muon) or wide):
        return []
    if files.config is None:
        return []
    model = ModelWeights(model_outline(config, files))
    if config.model.adapter is not None and not has_lora(model.model):
        return []
    matching = stage_matching(section, inputs, files)
    parameters, shapes, lines = trained_parameters(model, matching), model.structs(), []
    if matching is not None:
        shapes |= {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in matching.shapes().items()}
    groups = groups_of(optimizer, model, matching)
    made = make_optimizer(optimizer, 1, seed=0, model=model.model, matching=matching)
    states = state_bytes(made, {path: shapes[path] for path in parameters})
    for group in groups:
        arrays = sum(math.prod(shapes[path].shape[: parameters[path].num_stacked]) for path in group.paths)
        numbers, held = (sum(sizes) for sizes in zip(*((shapes[p].size, states[p]) for p in group.paths), strict=True))
        names = dict.fromkeys(re.sub(BLOCK, "", path) for path in group.paths)
        lines.append(
            f"{name}: optimizer {group.label}, learning rate {group.section.learning_rate:g}, weight decay "
            f"{group.section.weight_decay:g}: {arrays:,} arrays, {numbers:,} parameters, state {_bytes(held)}: "
            f"{', '.join(names)}"
        )
    return lines


def stage_matching(section: TrainSection, inputs: Inputs | None, files: ModelFiles) -> Matching | None:
    """Layer matching of a stage, whose projections are trained beside the model; None without one, and where a model is
    not known."""
    if not isinstance(section, DistillSection) or section.features is None or files.config is None:
        return None
    from posttrain.distill.features import matching_of
    from posttrain.stages.distill import DistillInputs

    teacher = inputs.teachers[0].files.config if isinstance(inputs, DistillInputs) else None
    return None if teacher is None else matching_of(section.features, files.config, teacher, seed=0)


def check_sampler_mesh(section: OnlineSection | DistillSection, files: ModelFiles, mesh: Mapping[str, int]) -> None:
    """ConfigError if `mesh` does not divide the draft model, or `rollout.tensor` not its heads or the model's own."""
    wanted, drafts = section.rollout.tensor, section.rollout.speculative
    draft = read_model_files(drafts.path.resolved).config if isinstance(drafts, ModelDrafts) else None
    own = section.placement.rollout.devices if isinstance(section, OnlineSection) else None
    if draft is not None and own is None:
        with placed("rollout.speculative: the draft model: "):
            check_mesh(outline_of(draft, Compute.of(jnp.dtype(jnp.float32)), jnp.dtype(jnp.float32)), mesh)
    count = mesh["tensor"] if wanted == "trained" else wanted
    for name, config in (("", files.config), (", the draft model of rollout.speculative", draft)):
        if config is None or count == "auto":
            continue
        if (heads := math.gcd(*(block.attention.num_kv_heads for block in config.blocks))) % count:
            raise ConfigError(f"rollout.tensor={wanted} must divide num_kv_heads={heads} of {config.model_type}{name}")


def describe_roles(
    name: str, section: OnlineSection, config: RunConfig, files: ModelFiles, mesh: Mapping[str, int]
) -> list[str]:
    """Report devices of roles that have their own, and the bytes of a critic that begins as the actor's model."""
    own = {role: getattr(section.placement, role).devices for role in ("rollout", "reference", "critic")}
    named = [f"{role} {count}" for role, count in own.items() if count is not None]
    lines = [f"{name}: devices of their own: {', '.join(named)}"] if named else []
    critic = section.algorithm.critic if isinstance(section, RLSection) and isinstance(section.algorithm, PPO) else None
    if critic is not None and critic.path is None and files.config is not None:
        alone = {**dict.fromkeys(mesh, 1), "fsdp": own["critic"] or 1}
        with placed("algorithm.critic."):
            size = critic_size(critic, config, files, mesh if own["critic"] is None else alone)
        whole = size.weights + size.gradient + size.optimizer
        lines.append(f"{name}: critic: {size.total:,} parameters, {_bytes(whole)} beside the actor's memory")
    drafts, optimizer = section.rollout.speculative, section.rollout.drafter_optimizer
    if optimizer is not None and files.config is not None:
        from posttrain.rollout.drafting import find_drafter

        assert isinstance(drafts, BlockDrafts)
        sizes = find_drafter(drafts, files.config).config
        with placed("rollout.speculative."):
            size = training_size(config, with_drafter(model_outline(config, files), sizes), mesh, optimizer)
        whole = sizes.num_parameters * jnp.dtype(config.model.dtype).itemsize + size.gradient + size.optimizer
        lines.append(f"{name}: drafter: {size.trained:,} parameters, {_bytes(whole)} beside the actor's memory")
    return lines


def critic_size(section: CriticSection, config: RunConfig, files: ModelFiles, mesh: Mapping[str, int]) -> TrainingSize:
    """Count parameters and bytes of a critic that begins as the actor's model without an adapter."""
    whole = config.model.model_copy(update={"lora": None, "adapter": None, "quantize": "none"})
    alone = config.model_copy(update={"model": whole})

    def scored(decoder: Decoder) -> Decoder:
        add_scalar_head(decoder, seed=0, saved=False)
        return decoder

    outline = nnx.eval_shape(scored, model_outline(alone, files))
    return training_size(alone, outline, mesh, section.optimizer)


def training_size(
    config: RunConfig,
    outline: Decoder,
    mesh: Mapping[str, int],
    optimizer_section: AnyOptimizer | None = None,
    matching: Matching | None = None,
) -> TrainingSize:
    """Count parameters and bytes of training for a model of shapes. `optimizer_section`: None: the first stage's.
    `matching`: the stage's layer matching, whose projections are not counted."""
    arrays = {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(nnx.state(outline))}
    weights = ModelWeights(outline)
    trainable, dims = weights.trainable(), weights.dims()
    parts = {path: math.prod(mesh[axis] for axis in _axes(dims[path], p.shape, mesh)) for path, p in arrays.items()}
    section = optimizer_section or config.stages[0].optimizer
    optimizer = make_optimizer(section, 1, seed=0, model=outline, matching=matching)
    states = state_bytes(optimizer, {path: arrays[path] for path in trainable})
    held = {path: p.size * p.dtype.itemsize for path, p in arrays.items()}
    once, dtype = used_once(weights), jnp.dtype(config.model.compute_dtype or config.model.dtype)
    narrow = {path for path in once if arrays[path].dtype == dtype}
    gradient = {path: arrays[path].size * (dtype.itemsize if path in narrow else FLOAT32_BYTES) for path in trainable}
    each = sum((held[path] + gradient.get(path, 0) + states.get(path, 0)) // parts[path] for path in arrays)
    return TrainingSize(
        total=sum(p.size for path, p in arrays.items() if not path.endswith((".lora_scale", ".scales"))),
        trained=sum(arrays[path].size for path in trainable if not path.endswith(".lora_scale")),
        weights=sum(held.values()),
        gradient=sum(gradient.values()),
        optimizer=sum(states.values()),
        per_device=each,
        gradient_per_device=sum(size // parts[path] for path, size in gradient.items()),
    )


def model_outline(config: RunConfig, files: ModelFiles) -> Decoder:
    """Trained model as shapes; without its adapter if that is on a hub that cannot be reached."""
    section: ModelSection = config.model
    dtype = jnp.dtype(section.dtype)
    assert files.config is not None
    outline = outline_of(files.config, Compute.of(dtype), dtype)
    if section.quantize != "none":
        outline = quantized_outline(outline, section.quantize)
    if section.adapter is not None and not unreachable(section.adapter.resolved):
        text_name = files.wrapper.text_name if files.wrapper else None
        outline = adapter_outline(outline, section.adapter.resolved, text_name=text_name)
    lora, drafted, scored = section.lora, config.stages[-1], isinstance(config.stages[-1], RewardModelSection)

    def changed(decoder: Decoder) -> Decoder:
        if lora is not None:
            attach_lora(decoder, lora, seed=0)
        if scored:
            add_scalar_head(decoder, seed=0)
        return decoder

    if lora is not None or scored:
        outline = nnx.eval_shape(changed, outline)
    if isinstance(drafted, DrafterSection):
        from posttrain.weights.drafter import drafter_config

        return with_drafter(outline, drafter_config(drafted, outline.config))
    return outline


def with_drafter(outline: Decoder, sizes: DrafterConfig) -> Decoder:
    """Model of shapes with a drafter beside it."""
    from posttrain.weights.drafter import attach_drafter

    def drafted(decoder: Decoder) -> Decoder:
        attach_drafter(decoder, sizes, seed=0)
        return decoder

    return nnx.eval_shape(drafted, outline)


def _axes(dims: tuple[str, ...], shape: tuple[int, ...], mesh: Mapping[str, int]) -> list[str]:
    """Mesh axes that split a parameter."""
    return [axis for dim, size in zip(dims, shape, strict=True) for axis in split_axes(dim, size, mesh)]


def _share(size: TrainingSize) -> str:
    return f"{size.trained / size.total:.2%}"


def _bytes(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count / 2**10:,.1f} KiB"
