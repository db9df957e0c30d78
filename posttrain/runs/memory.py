"""Memory of a run by arithmetic: roles as shapes, activations that `remat: auto` saves, weights that
`mesh.gather: auto` gathers at once, and the refusal of a run that cannot fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from posttrain.batch import rows_per_pass
from posttrain.config import (
    BlockDrafts,
    DistillSection,
    MeshSection,
    ModelDrafts,
    OnlineSection,
    PlacementSection,
    Remat,
    RematName,
    RLSection,
    RolloutSection,
    RunConfig,
    SavedActivations,
    TeacherSection,
    TrainSection,
    trains_on_samples,
)
from posttrain.config.algorithm import PPO
from posttrain.config.base import Quantize
from posttrain.config.locator import Locator
from posttrain.config.model import GATHERED_AXES
from posttrain.data.image_rows import largest_bucket
from posttrain.data.images import takes_images
from posttrain.distill.features import matching_of
from posttrain.distill.teachers import own_devices, teacher_mesh
from posttrain.errors import ConfigError
from posttrain.kernels.logits.layout import VocabSharding, chunk_length
from posttrain.kernels.platform import platform_of
from posttrain.mesh import make_mesh, row_shards
from posttrain.models.activations import ATTENTION, SavedCost, saved_costs, saved_names, shown_remat
from posttrain.models.adapter import has_dropout
from posttrain.models.config import Compute, VisionConfig
from posttrain.models.decoder import Decoder
from posttrain.models.moe import SLACK
from posttrain.plan.lowered import bytes_on_device
from posttrain.plan.phases import stage_plan
from posttrain.plan.report import UPDATE, Phase, Roles, StagePlan, in_units, knob_of
from posttrain.rl.algorithms import needs_reference
from posttrain.rollout.drafting import find_drafter
from posttrain.runs.check import FLOAT32_BYTES, TrainingSize, model_outline, training_size, with_drafter
from posttrain.stages.cluster import engine_mesh
from posttrain.stages.context import RoleDevices, role_devices
from posttrain.train.layer_matching import Matching
from posttrain.train.programs import placed_shapes
from posttrain.weights.load import check_mesh, outline_of
from posttrain.weights.locate import ModelFiles, read_model_files
from posttrain.weights.scalar_head import add_scalar_head
from posttrain.weights.state import ModelWeights


@dataclass(frozen=True, kw_only=True)
class StageSetup:
    """Stage of a run on given devices, whose arrays need not be there."""

    section: TrainSection
    config: RunConfig
    files: ModelFiles
    mesh: Mesh
    devices: RoleDevices
    memory: int
    """Bytes of a device."""
    teachers: Mapping[str, Sequence[jax.Device] | None] = field(default_factory=dict)
    """Devices that teachers have for themselves, by title."""

    def outline(self, remat: Remat = "full") -> Decoder:
        """Trained model as shapes."""
        return outline_on(self.config, self.files, self.mesh, remat)

    def micro_rows(self) -> int:
        """Rows of a forward and backward pass."""
        return rows_per_pass(self.section.step_rows, self.section.pass_rows, row_shards(self.mesh))

    def plan(self, remat: Remat = "full", *, gather_once: bool = False) -> StagePlan:
        """Phases as programs of shapes. ConfigError for a stage that cannot be planned."""
        roles = self.roles(remat)
        settings: dict[str, Any] = {"gather_once": gather_once, "image": self.config.model.image}
        return stage_plan(self.section, self.outline(remat), self.mesh, self.memory, roles, **settings)

    def matching(self) -> Matching | None:
        """Layer matching of the stage, whose projections are trained beside the model."""
        if not isinstance(self.section, DistillSection) or self.section.features is None:
            return None
        teacher = self._teacher(self.section.teachers[0], self.mesh, "full")
        return matching_of(self.section.features, self.outline().config, teacher.config, seed=0)

    def roles(self, remat: Remat) -> Roles:
        """Models and devices of the roles, as `make_cluster` has them."""
        section = self.section
        if isinstance(section, DistillSection):
            live = section.teachers if section.cache is None else ()
            inside = [self._teacher(teacher, self.mesh, remat) for teacher in live if not teacher.outside]
            scorers = self._scorers([teacher for teacher in live if teacher.outside])
            return Roles(teachers=inside, scorers=scorers, draft=self._draft(section.rollout, self.mesh))
        if not isinstance(section, OnlineSection):
            return Roles()
        rollout, reference, critic = None, None, None
        sees = None if self.files.config is None else self.files.config.vision
        if self.devices.rollout is not None:
            rollout = engine_mesh(self.outline(remat), self.mesh, self.devices.rollout, section, self.memory)
        if needs_reference(section) and (self.devices.reference is not None or section.reference.path is not None):
            there = self._mesh_of(self.devices.reference)
            reference = self._other(section.reference.path, there, "none", sees=sees), there
        if isinstance(section, RLSection) and isinstance(section.algorithm, PPO):
            there = self._mesh_of(self.devices.critic)
            whole = self.config.model.model_copy(update={"lora": None, "adapter": None, "quantize": "none"})
            without = replace(self, config=self.config.model_copy(update={"model": whole}))
            seeing = sees if self.config.model.vision == "frozen" else None
            scored = without._other(section.algorithm.critic.path, there, remat, sees=seeing)
            critic = nnx.eval_shape(lambda made: _with_score(made, self.config.seed), scored), there
        scorers = self._scorers(section.teachers) if isinstance(section, RLSection) else []
        rewards = [self._reward_model(reward.model) for reward in section.rewards if reward.model is not None]
        draft = self._draft(section.rollout, rollout or self.mesh)
        roles: dict[str, Any] = {"rollout": rollout, "reference": reference, "critic": critic, "draft": draft}
        return Roles(scorers=scorers, rewards=rewards, drafter=self._learning_drafter(section.rollout, remat), **roles)

    def _learning_drafter(self, section: RolloutSection, remat: Remat) -> Decoder | None:
        """Trained model as shapes with the drafter that learns beside it."""
        drafts, outline = section.speculative, self.outline(remat)
        if not isinstance(drafts, BlockDrafts) or drafts.optimizer is None:
            return None
        return with_drafter(outline, find_drafter(drafts, outline.config).config)

    def _draft(self, section: RolloutSection, mesh: Mesh) -> Decoder | None:
        """Draft model of an engine as shapes."""
        drafts = section.speculative
        return self._other(drafts.path, mesh, "none") if isinstance(drafts, ModelDrafts) else None

    def _reward_model(self, path: Locator) -> Decoder:
        """Reward model as shapes, in the precision in which it is stored."""
        found = _files_of(path)
        assert found.config is not None and found.hf_json is not None
        stored = found.hf_json.get("dtype", found.hf_json.get("torch_dtype"))
        dtype = jnp.dtype(jnp.bfloat16 if stored == "bfloat16" else jnp.float32)
        check_mesh(outline := outline_of(found.config, Compute(dtype=dtype, mesh=self.mesh), dtype), self.mesh.shape)
        return outline

    def _scorers(self, teachers: Sequence[TeacherSection]) -> list[tuple[Decoder, Mesh]]:
        """Teachers that score on this machine, and their devices."""
        here = [teacher for teacher in teachers if teacher.url is None]
        own = self.teachers
        meshes = [self.mesh if one.mesh is None else teacher_mesh(one, own.get(one.title), self.mesh) for one in here]
        return [(self._teacher(one, mesh, "none"), mesh) for one, mesh in zip(here, meshes, strict=True)]

    def _mesh_of(self, devices: Sequence[jax.Device] | None) -> Mesh:
        return self.mesh if devices is None else make_mesh(MeshSection(fsdp=-1), devices)

    def _other(
        self,
        path: Locator | None,
        mesh: Mesh,
        remat: Remat,
        quantize: Quantize = "none",
        *,
        sees: VisionConfig | None = None,
    ) -> Decoder:
        """Model of a role as shapes: another checkpoint, or the trained one. `sees`: tower of the trained model, for
        one that reads the same patches with its own."""
        if path is None:
            return outline_on(self.config, self.files, mesh, remat)
        other = _files_of(path)
        if sees is not None and other.hf_json is not None and takes_images(other.hf_json):
            seeing = read_model_files(path.resolved, vision="frozen")
            assert seeing.config is not None
            other = seeing if sees.reads_as(seeing.config.vision) else other
        plain = self.config.model.model_copy(update={"lora": None, "adapter": None, "quantize": quantize})
        return outline_on(self.config.model_copy(update={"model": plain}), other, mesh, remat)

    def _teacher(self, section: TeacherSection, mesh: Mesh, remat: Remat) -> Decoder:
        """Teacher as shapes, in its precision. ConfigError where its vocabulary has other rows than the student's."""
        model = self.config.model
        changes: dict[str, Any] = {"dtype": section.dtype or model.dtype}
        changes["compute_dtype"] = model.compute_dtype or changes["dtype"]
        types = replace(self, config=self.config.model_copy(update={"model": model.model_copy(update=changes)}))
        assert self.files.config is not None
        teacher = types._other(section.path, mesh, remat, section.quantize, sees=self.files.config.vision)
        if teacher.config.vocab_size != self.files.config.vocab_size:
            raise ConfigError(
                f"plan: cannot plan the teacher {section.title} yet: its vocabulary has "
                f"{teacher.config.vocab_size:,} rows, the student's {self.files.config.vocab_size:,}"
            )
        return teacher


def _files_of(path: Locator) -> ModelFiles:
    """Description of another model of a stage. ConfigError where it is not there."""
    found = read_model_files(path.resolved)
    if found.config is None:
        raise ConfigError(f"plan: no network to read the config.json of {path}; give a folder")
    return found


def _with_score(model: Decoder, seed: int) -> Decoder:
    add_scalar_head(model, seed=seed, saved=False)
    return model


def outline_on(config: RunConfig, files: ModelFiles, mesh: Mesh, remat: Remat) -> Decoder:
    """Trained model as shapes on a mesh."""
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


HEADROOM = 0.08
"""Share of the memory that `remat: auto` leaves free for what its estimate does not see."""

KERNEL_TIME = 2.0
"""Time of an operation in the attention kernel relative to one in a matrix product."""

LOGITS_COPIES, OTHER_LOGITS_COPIES = {"tpu": 1}, 3
"""Float32 arrays of a chunk's logits at once: TPU's compiler keeps one; what others keep was not read."""

LAYER_COPIES = 2.7
"""Bytes of a layer's backward pass, beside its weights, relative to its named activations: by the peaks of TPU's
compiler for Qwen3-8B with 1,024 and 4,096 tokens."""

EMBEDDING, HEAD = "embed.embedding", "head.kernel"
"""Paths of the parameters of the vocabulary."""

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

    @property
    def bytes(self) -> float:
        """Bytes on a device of what is saved there, by estimate."""
        if self.remat == "none":
            return PLAIN_FACTOR * sum((cost.bytes for cost in self.costs.values()), 0.0)
        offloaded = self.remat.offload if isinstance(self.remat, SavedActivations) else ()
        names = set(saved_names(self.remat)) - set(offloaded)
        return sum((cost.bytes for name, cost in self.costs.items() if name in names), 0.0)

    def lines(self) -> Iterator[str]:
        """Lines on each activation, with its cost."""
        saved = list(self.costs) if self.remat == "none" else saved_names(self.remat)
        spare = "" if self.spare is None else f", by auto for {in_units(max(0, self.spare))} to spare by estimate"
        yield f"  remat: {shown_remat(self.remat)}{spare}; for a step, per device:"
        for name, cost in self.costs.items():
            state = "saved" if name in saved else "computed again"
            yield f"    {name:<10}  {in_units(cost.bytes):>10}  {cost.flops / 1e12:8.3g} TFLOP  {state}"


def choose_remat(setup: StageSetup) -> RematChoice:
    """Costs of a stage's activations and, for `remat: auto`, those that fit the memory of a device, the one that spares
    most time per byte first. ConfigError for a stage whose memory is not known."""
    section, mesh, wanted, outline = setup.section, setup.mesh, setup.config.model.remat, setup.outline()
    rows, micro = section.step_rows, setup.micro_rows()
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
    spare = left = _spare(setup, costs)
    saved: list[RematName] = []
    for name, cost in costs.items():
        if cost.bytes <= left:
            saved.append(name)
            left -= int(cost.bytes)
    remat: Remat = SavedActivations(save=tuple(saved)) if saved else "full"
    return RematChoice(remat="none" if PLAIN_FACTOR * held <= spare else remat, spare=spare, costs=costs)


def _spare(setup: StageSetup, costs: Mapping[RematName, SavedCost]) -> int:
    """Bytes of a device that an update with `remat: full` leaves free, by estimate. ConfigError where it is not
    known."""
    held = sum(cost.bytes for cost in costs.values())
    return int((1 - HEADROOM) * setup.memory - _full_bytes(setup, held) - _beside(setup))


@dataclass(frozen=True, kw_only=True)
class GatherChoice:
    """Time at which weights are gathered, with what it needs and what a device sends, by arithmetic."""

    once: bool
    chosen: bool
    """True if `auto` chose."""
    spare: int | None
    """Bytes of a device beyond those of the activations; None: not known."""
    needed: int
    """Bytes of whole weights and float32 gradients, beyond the device's parts of them."""
    passes: int
    layer: float
    """Bytes that a device sends in each micro-batch if weights are gathered in each layer, forward and backward."""
    update: float
    """Bytes that a device sends in an update if weights are gathered once."""

    def lines(self) -> Iterator[str]:
        """Line on the choice, and one on what each sends."""
        spare = "not known" if self.spare is None else in_units(max(0, self.spare))
        why = f", by auto: update needs {in_units(self.needed)}, and by estimate {spare} is to spare"
        chosen = f"{'update' if self.once else 'layer'}{why if self.chosen else ''}"
        yield f"  gather: {chosen}; wire by arithmetic at least:"
        each = f"{self.passes} x {in_units(self.layer)} in micro-batches" if self.passes > 1 else "one micro-batch"
        yield f"    layer {in_units(self.passes * self.layer)} an update ({each}), update {in_units(self.update)}"


def choose_gather(setup: StageSetup, remat: RematChoice, *, platform: str) -> GatherChoice | None:
    """`mesh.gather` of a stage; `auto`, not on CPU, is decided by what `remat` leaves of the memory. None where it is
    `layer` and nothing else can be."""
    section, config, mesh, outline = setup.section, setup.config, setup.mesh, setup.outline()
    dropout = has_dropout(outline) and not trains_on_samples(section)
    others = any(size > 1 for axis, size in mesh.shape.items() if axis not in GATHERED_AXES)
    if mesh.shape["fsdp"] == 1 or others or dropout:
        if config.mesh.gather == "update":
            raise ConfigError(
                "mesh.gather=update needs fsdp above 1, no axis but data beside it and no adapter dropout; set "
                "mesh.gather=layer"
            )
        return None
    passes = -(-section.step_rows // setup.micro_rows())
    size = training_size(config, outline, mesh.shape, section.optimizer, setup.matching())
    choice = _gather_costs(size, outline, mesh, passes)
    if config.mesh.gather != "auto" or passes == 1:
        return GatherChoice(once=config.mesh.gather == "update", chosen=False, spare=None, **choice)
    try:
        spare = _spare(setup, remat.costs) - int(remat.bytes)
    except ConfigError:
        return GatherChoice(once=False, chosen=True, spare=None, **choice)
    fits = passes > 1 and platform != "cpu" and choice["needed"] <= spare
    return GatherChoice(once=fits, chosen=True, spare=spare, **choice)


def _gather_costs(size: TrainingSize, outline: Decoder, mesh: Mesh, passes: int) -> dict[str, Any]:
    """Memory and traffic of both ways: a weight is sent in the type of the computation, if that is smaller."""
    fsdp, data, width = mesh.shape["fsdp"], mesh.shape["data"], outline.compute.dtype.itemsize
    weights = sum(x.size * min(x.dtype.itemsize, width) for x in ModelWeights(outline).structs().values())
    low, wide = size.trained * width, size.trained * FLOAT32_BYTES
    share = (fsdp - 1) / fsdp

    def reduced(gradient: int) -> float:
        """Reduce-scatter over `fsdp`, all-reduce of the parts over `data`."""
        return share * gradient + 2 * (data - 1) / data * gradient / fsdp

    return {
        "passes": passes,
        "layer": 2 * share * weights + reduced(low),
        "update": share * weights + reduced(wide),
        # Of the gradient of a micro-batch, and the sum.
        "needed": int(weights + share * (size.gradient + wide)),
    }


def _full_bytes(setup: StageSetup, held: float) -> float:
    """Bytes on a device of an update with `remat: full`, by estimate; `held`: bytes of all named activations."""
    section, config, mesh, micro, outline = setup.section, setup.config, setup.mesh, setup.micro_rows(), setup.outline()
    model, size = outline.config, outline.compute.dtype.itemsize
    state = training_size(config, outline, mesh.shape, section.optimizer, setup.matching())
    sums = FLOAT32_BYTES * state.trained / mesh.size if micro < section.step_rows else 0.0
    inputs = model.num_layers * micro * section.row_tokens * model.embed_dim * size / mesh.size
    rows = micro / row_shards(mesh)
    kept, passing = _tower_bytes(section, outline, rows, section.step_rows / row_shards(mesh))
    weights = ModelWeights(outline)
    shapes, trained = placed_shapes(weights, mesh), weights.trainable()
    sizes = {path: math.prod(x.sharding.shard_shape(x.shape)) for path, x in shapes.items()}
    wide = {path: FLOAT32_BYTES * size * (path in trained) for path, size in sizes.items()}
    # The gradients of the layers, and of an embedding that is no head, are not there before those of the logits are
    # gone.
    head, early = (EMBEDDING, 0) if model.tie_embeddings else (HEAD, wide[EMBEDDING])
    sharding = VocabSharding.of(mesh)
    chunk = chunk_length(micro, section.row_tokens, model.vocab_size, sharding) * micro / sharding.groups
    copies = LOGITS_COPIES.get(platform_of(mesh), OTHER_LOGITS_COPIES)
    logits = copies * FLOAT32_BYTES * chunk * model.vocab_size / sharding.shards
    vocabulary = logits + wide.get(head, 0) + size * sizes.get(head, 0)
    layers = sum(x.size for path, x in shapes.items() if path.startswith("stages."))
    gathered = size * layers / (mesh.shape["tensor"] * mesh.shape["expert"])
    gradient = state.gradient_per_device
    layer = gradient - early + (LAYER_COPIES * held + gathered) / model.num_layers
    tower = passing + gradient * (weights.tower_training[0] == "tower")
    return state.per_device - gradient + sums + inputs + kept + max(vocabulary, layer, gradient, tower)


def _tower_bytes(section: TrainSection, outline: Decoder, rows: float, all_rows: float) -> tuple[float, float]:
    """Bytes on a device of a vision tower's pixels, features and inputs of layers for the backward pass, and of one
    layer, by estimate; of features alone where they are made before. `rows`: on the device, which are not split
    further, in a forward pass; `all_rows`: in a step."""
    vision, size = outline.config.vision, outline.compute.dtype.itemsize
    if vision is None:
        return 0.0, 0.0
    patches = rows * largest_bucket(section, vision.merge)
    features = patches / vision.merge**2 * outline.config.embed_dim * size
    pixels = 3 * vision.patch_size**2 * patches
    reach = ModelWeights(outline).tower_training[0]
    if reach == "frozen" and section.kept_images_mib:
        return features * (1 + outline.config.deepstack) * all_rows / rows, 0.0
    trained = reach == "tower"
    layer = patches * size * (5 * vision.width + 4 * vision.attention_dim + 2 * vision.mlp_dim)
    kept = pixels + features + trained * vision.depth * patches * vision.width * size
    return kept, max((1 + trained) * layer, FLOAT32_BYTES * pixels)


def _beside(setup: StageSetup) -> int:
    """Bytes on a device beside an update. ConfigError for a stage whose memory is not known."""
    try:
        teachers, phases = setup.roles("full").teachers, setup.plan().phases
    except ConfigError as error:
        raise ConfigError(f"model.remat=auto: name the activations to save; {error}") from None
    taught = sum(bytes_on_device(placed_shapes(ModelWeights(teacher), setup.mesh)) for teacher in teachers)
    return taught + next(phase.bytes_beside for phase in phases if (phase.role, phase.name) == ("trainer", UPDATE))


def check_memory(name: str, phases: Sequence[Phase], limit: int) -> None:
    """ConfigError if arrays that lie on a device at once take more than `limit` bytes of it: weights, optimizer state,
    cache and other models, by their shapes, without any temporary."""
    fullest = max(phases, key=lambda phase: phase.held, default=None)
    if fullest is None or fullest.held <= limit:
        return
    parts = sorted({**fullest.own, **fullest.beside}.items(), key=lambda part: -part[1])
    shown = ", ".join(f"{part} {in_units(size)}" for part, size in parts)
    raise ConfigError(
        f"{name}: {fullest.role}: {fullest.name} needs at least {in_units(fullest.held)} of a device, which has "
        f"{in_units(limit)}: {shown}, before any activation; change {knob_of(parts[0][0])}, or take more devices. "
        "posttrain plan shows every phase; --force (in Python fit(force=True)) tries all the same"
    )


def choices_of(
    name: str,
    section: TrainSection,
    config: RunConfig,
    files: ModelFiles,
    mesh: Mesh,
    memory: int,
    limit: int | None,
) -> tuple[Remat, bool | None]:
    """Activations that a stage saves, and whether it gathers weights once an update (None: it cannot), on the devices
    of this run. ConfigError for a stage that does not fit `limit` bytes of a device."""
    own = role_devices(config, getattr(section, "placement", PlacementSection()), jax.devices())
    taught = own_devices(getattr(section, "teachers", ()), jax.devices())
    setup = StageSetup(
        section=section, config=config, files=files, mesh=mesh, devices=own, memory=memory, teachers=taught
    )
    if limit is not None:
        check_memory(name, _phases(setup), limit)
    if config.model.remat != "auto" and config.mesh.gather != "update" and platform_of(mesh) == "cpu":
        return config.model.remat, None
    saved = choose_remat(setup)
    gather = choose_gather(setup, saved, platform=platform_of(mesh))
    return saved.remat, None if gather is None else gather.once


def _phases(setup: StageSetup) -> Sequence[Phase]:
    """Phases of a stage as shapes; none of one that cannot be planned."""
    try:
        return setup.plan().phases
    except ConfigError:
        return ()
