"""Cluster of an online stage: each role on the devices that the configuration gives it, and the use of its engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from posttrain.cluster.cluster import Cluster, Critic, DrafterLearner
from posttrain.cluster.reference import ModelReference, Reference, ReferencePolicy, Scorer, WithoutAdapter
from posttrain.cluster.sync import ColocatedReplica, PerProcessReplica, Replica, ReshardedReplica, Shared
from posttrain.config import BlockDrafts, MeshSection, OnlineSection, RLSection, RolloutSection
from posttrain.config.algorithm import PPO
from posttrain.config.optimizer import AnyOptimizer
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError, placed
from posttrain.losses.distill import BlockDraftLoss
from posttrain.losses.value import ValueLoss
from posttrain.mesh import make_mesh
from posttrain.models.config import MoEConfig
from posttrain.models.decoder import Decoder
from posttrain.rl.agreement import EXACT, ROUNDED, SamplerGate
from posttrain.rl.sampler import Sampler
from posttrain.rollout.decode_weights import best_mesh, device_memory
from posttrain.rollout.drafting import find_drafter
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.programs import Expected
from posttrain.rollout.trajectory import Example
from posttrain.rollout.types import EngineFactory, RolloutEngine
from posttrain.runtime import processes
from posttrain.stages.context import RoleDevices, StageRun
from posttrain.stages.prompts import RolloutInputs
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.weights.drafter import attach_drafter
from posttrain.weights.load import load_model
from posttrain.weights.lora import has_lora
from posttrain.weights.scalar_head import add_scalar_head
from posttrain.weights.state import ModelWeights, is_quantized

HALF, QUARTER = 2, 4
"""Parts of a device's memory, one over these, that weights may take on devices for sampling alone, and on others."""


def make_cluster(
    stage: StageRun,
    inputs: RolloutInputs,
    trainer: Trainer,
    *,
    keep_reference: bool,
    teachers: Sequence[Scorer],
    critic: Critic | None,
) -> Cluster:
    """Make replica, engine, reference and cluster. ConfigError for devices that do not fit the model."""
    section, devices = inputs.section, stage.devices
    replica = make_replica(trainer, devices, section)
    engine = make_engine(
        replica.model,
        stage.tokenizer,
        section.rollout,
        inputs.make_engine,
        slots=engine_slots(section),
        max_length=section.sequence_tokens,
    )
    reference = make_reference(stage, section, trainer) if keep_reference else None
    if reference is not None:
        trainer.companions["reference"] = reference
    if critic is not None:
        trainer.companions["critic"] = critic
    drafter = make_drafter(stage, section, trainer)
    if drafter is not None:
        trainer.companions["drafter"] = drafter
    roles: dict[str, Any] = {"reference": reference, "critic": critic, "drafter": drafter}
    return Cluster(trainer, engine, replica, teachers=teachers, **roles)


def make_replica(trainer: Trainer, devices: RoleDevices, section: OnlineSection) -> Replica:
    """The actor's model for the engine: shared, copied beside it where samples go on during updates, copied to the
    engine's own devices, or to those of each process."""
    with placed("placement.rollout: "):
        if processes.count() > 1:
            tensor = choose_tensor(trainer.model, trainer.mesh, jax.local_devices(), section, device_memory(), QUARTER)
            return PerProcessReplica(trainer, tensor)
        if devices.rollout is None:
            return ColocatedReplica(trainer) if section.samples_while_updating else Shared(trainer)
        mesh = engine_mesh(trainer.model, trainer.mesh, devices.rollout, section, device_memory())
        return ReshardedReplica(trainer, mesh)


def engine_mesh(
    model: Decoder, trained: Mesh, devices: Sequence[jax.Device], section: OnlineSection, memory: int | None
) -> Mesh:
    """Mesh of an engine with devices of its own, see `choose_tensor`."""
    tensor = choose_tensor(model, trained, devices, section, memory, HALF)
    return make_mesh(MeshSection(data=-1, fsdp=1, tensor=tensor), devices)


def choose_tensor(
    model: Decoder,
    trained: Mesh,
    devices: Sequence[jax.Device],
    section: OnlineSection,
    memory: int | None,
    part: int,
) -> int:
    """Number of the engine's devices that split each weight: for `trained` that of the actor's mesh, for `auto` that of
    `best_mesh` with which the weights take at most 1 / `part` of a device with `memory` bytes (None: any fits), all
    where none does. ConfigError unless it divides devices and heads."""
    wanted, source, num_devices = section.rollout.tensor, ModelWeights(model), len(devices)
    heads = min(block.attention.num_kv_heads for block in model.config.blocks)
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0 and heads % size == 0]
    if wanted == "auto":
        meshes = [make_mesh(MeshSection(data=-1, fsdp=1, tensor=size), devices) for size in sizes]
        limit = None if memory is None else memory // part
        best = best_mesh(meshes, source, source.structs(), limit, engine_slots(section))
        return sizes[-1] if best is None else best.shape["tensor"]
    chosen = trained.shape["tensor"] if wanted == "trained" else wanted
    if chosen not in sizes:
        raise ConfigError(
            f"rollout.tensor={chosen} must divide the {num_devices} devices that sample and num_kv_heads={heads}; "
            f"use one of {sizes}"
        )
    return chosen


def engine_slots(section: OnlineSection) -> int:
    """Samples that the engine of a process generates at once, without `rollout.slots` all of a step."""
    return section.rollout.slots or -(-section.samples_in_flight // processes.count())


def make_reference(stage: StageRun, section: OnlineSection, trainer: Trainer) -> ReferencePolicy:
    """Reference policy of the configuration. ConfigError if the actor cannot give it."""
    wanted, place, devices = section.reference, section.placement.reference, stage.devices.reference
    moving: dict[str, Any] = {"refresh_every": wanted.refresh_every, "mixup": wanted.mixup, "offload": place.offload}
    mesh = stage.mesh if devices is None else make_mesh(MeshSection(fsdp=-1), devices)
    scoring: dict[str, Any] = {"temperature": section.sampling.temperature, "rows": section.pass_rows}
    if wanted.path is not None:
        types = stage.model
        model = load_model(
            wanted.path.resolved,
            dtype=types.dtype,
            compute_dtype=types.compute_dtype,
            mesh=mesh,
            vision="none" if trainer.model.config.vision is None else "frozen",
        )
        if model.config.vocab_size != trainer.model.config.vocab_size:
            raise ConfigError(
                f"reference.path={wanted.path}: its vocabulary has {model.config.vocab_size:,} ids, the actor's "
                f"{trainer.model.config.vocab_size:,}; use a model with the actor's tokenizer"
            )
        check_tower(f"reference.path={wanted.path}", model, trainer.model)
        return ModelReference(model, mesh, offload=place.offload, **scoring)
    if wanted.model == "base":
        if not has_lora(trainer.model):
            raise ConfigError("reference.model=base: the actor has no LoRA adapter; use start")
        return WithoutAdapter(trainer)
    if devices is not None:
        return ModelReference.of_actor(trainer, mesh, **scoring, **moving)
    return Reference(trainer, **moving)


def check_tower(what: str, model: Decoder, actor: Decoder) -> None:
    """ConfigError for another model whose tower reads other patches than the actor's."""
    own, theirs = actor.config.vision, model.config.vision
    if own is not None and not own.reads_as(theirs):
        raise ConfigError(
            f"{what}: its vision tower reads other patches of pictures than the actor's {own.model_type}; use a "
            "checkpoint of this family with the same patch size"
        )


def make_critic(stage: StageRun, section: RLSection, loss: ValueLoss, actor: Decoder) -> Critic:
    """Critic of the configuration, with a new scalar head unless its model has one."""
    assert isinstance(section.algorithm, PPO)
    devices, settings = stage.devices.critic, section.algorithm.critic
    mesh = stage.mesh if devices is None else make_mesh(MeshSection(fsdp=-1), devices)
    whole = stage.model.model_copy(update={"lora": None, "adapter": None, "quantize": "none"})
    start: dict[str, Any] = {}
    if settings.path is not None:
        start = {"source": None, "source_name": settings.path.resolved}
        whole = whole.grown
    model = replace(stage, mesh=mesh, model=whole, adapter=None, **start).load_model()
    ids, rows = stage.tokenizer.num_ids, model.config.vocab_size
    if rows < min(ids, stage.tokenizer.num_rows or ids):
        raise ConfigError(
            f"critic: its model has {rows:,} rows for tokens, and the actor's tokens need more; set critic.path to a "
            "model with the actor's tokenizer"
        )
    check_tower(f"critic.path={settings.path}", model, actor)
    add_scalar_head(model, seed=stage.seed, mesh=mesh, saved=False)
    trainer = Trainer(
        model,
        loss,
        make_optimizer(settings.optimizer, section.steps, stage.seed, model=model),
        critic_settings(section, section.algorithm),
        mesh=mesh,
    )
    return Critic(trainer, warmup=settings.warmup, own_tower=settings.path is not None)


def critic_settings(section: RLSection, algorithm: PPO) -> TrainSettings:
    return TrainSettings(
        temperature=1.0,
        max_grad_norm=algorithm.critic.optimizer.max_grad_norm,
        qk_clip=algorithm.critic.optimizer.qk_clip,
        micro_batch_rows=section.pass_rows,
        image_cache_bytes=section.kept_images_mib * 2**20,
        offload_optimizer=section.placement.critic.offload,
    )


def make_drafter(stage: StageRun, section: OnlineSection, actor: Trainer) -> DrafterLearner | None:
    """Block drafter that learns beside the actor, if the section trains one."""
    drafts, optimizer = section.rollout.speculative, section.rollout.drafter_optimizer
    if optimizer is None:
        return None
    assert isinstance(drafts, BlockDrafts)
    found, source = find_drafter(drafts, actor.model.config), ModelWeights(actor.model)
    model = source.bind(source.read())
    attach_drafter(model, found.config, seed=stage.seed, mesh=actor.mesh, arrays=found.arrays)
    with placed("rollout.speculative."):
        made = make_optimizer(optimizer, section.steps, stage.seed, model=model)
    settings = drafter_settings(section, optimizer, gather_once=stage.gather_once)
    return DrafterLearner(Trainer(model, BlockDraftLoss(), made, settings, mesh=actor.mesh), actor)


def drafter_settings(section: OnlineSection, optimizer: AnyOptimizer, *, gather_once: bool) -> TrainSettings:
    """Settings of a drafter's updates; `gather_once`: the actor's, whose gathered weights are the same."""
    return TrainSettings(
        temperature=1.0,
        max_grad_norm=optimizer.max_grad_norm,
        micro_batch_rows=section.pass_rows,
        gather_once=gather_once,
    )


def sampler_gate(model: Decoder, section: RolloutSection) -> SamplerGate:
    """Veto on updates of a model with samples of this engine, by the precision of its numbers.

    A mixture of experts counts as rounded: rounding may send a token to another expert.
    """
    plain = section.rounds is None and not is_quantized(model) and model.compute.dtype == jnp.float32
    mixture = any(isinstance(block.mlp, MoEConfig) for stage in model.config.stages for block in stage.blocks)
    # Accelerators multiply float32 in lower precision by default.
    exact = plain and not mixture and jax.default_backend() == "cpu"
    exact &= all(struct.dtype == jnp.float32 for struct in ModelWeights(model).structs().values())
    return SamplerGate(rounding=EXACT if exact else ROUNDED)


def warm_up(
    engine: RolloutEngine,
    section: RolloutSection,
    prompts: Sequence[tuple[Sampler, Sequence[Example]]],
    *,
    rereads: bool = False,
) -> None:
    """Compile the programs that the built-in engine needs for these prompts, if the section enables it. `rereads`:
    samples may be resumed by later steps."""
    if section.warm_up and isinstance(engine, NativeEngine):
        expected = []
        for sampler, examples in prompts:
            lengths = [len(example.prompt_tokens) for example in examples]
            turns = sampler.conversations
            longest = max(lengths) if turns is None else turns.row_tokens - 1
            expected.append(Expected(params=sampler.params(0, 0), shortest=min(lengths), longest=longest))
        # A failed sample ends the step, discarding the samples beside it.
        engine.warm_up(expected, rereads=rereads)


def engine_metrics(engine: RolloutEngine) -> dict[str, float]:
    """Metrics of the built-in engine; none of others."""
    return engine.metrics() if isinstance(engine, NativeEngine) else {}


def forget_prompts(engine: RolloutEngine) -> None:
    """Clear the built-in engine's prefix cache after other prompts than those of training: keys and values in it would
    change the rounding of training samples."""
    if isinstance(engine, NativeEngine):
        engine.forget_prompts()


def make_engine(
    model: Decoder,
    tokenizer: Tokenizer,
    section: RolloutSection,
    factory: EngineFactory | None,
    *,
    slots: int,
    max_length: int,
) -> RolloutEngine:
    """Make the rollout engine by a factory; None: the built-in one. `slots`: its default."""
    if factory is None:
        return NativeEngine.of(model, tokenizer, section, slots=slots, max_length=max_length)
    engine = factory(model, tokenizer, section)
    if not isinstance(engine, RolloutEngine):
        raise ConfigError(f"rollout.engine: {section.engine} made a {type(engine).__name__}, no RolloutEngine")
    return engine
