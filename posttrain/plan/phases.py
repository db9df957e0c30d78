"""Phases of a stage as programs of shapes: update, statistics, layout, prefill and decode, with their work."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from posttrain.batch import IMAGE_ARRAYS, Batch, ScoreLoss, TokenLoss, rows_per_pass
from posttrain.cluster.reference import FrozenModel
from posttrain.config import (
    DistillSection,
    ImageSection,
    PreferenceSection,
    RLSection,
    SFTSection,
    TrainSection,
)
from posttrain.config.algorithm import PPO
from posttrain.distill.features import distill_loss
from posttrain.distill.teachers import DEFAULT_TOP_K
from posttrain.errors import ConfigError
from posttrain.kernels.logits.chunk_stats import PLAIN
from posttrain.kernels.logits.layout import VocabSharding, chunk_length
from posttrain.losses.value import ValueLoss
from posttrain.mesh import row_shards
from posttrain.models import hf
from posttrain.models.activations import attention_flops, recomputed_flops
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.plan.lowered import batch_of, bytes_on_device, sizes_of, top_k_of, tower_flops, with_pictures
from posttrain.plan.report import (
    CACHE,
    COPY,
    CRITIC,
    CRITIC_OPTIMIZER,
    DECODE,
    DRAFT_CACHE,
    DRAFTED,
    ENCODE,
    EVALUATION,
    LAYOUT,
    OPTIMIZER,
    PREFILL,
    QUANTIZED,
    REFERENCE,
    SCORES,
    STATISTICS,
    SYNC,
    TEACHERS,
    UPDATE,
    VALUES,
    WEIGHTS,
    Held,
    Move,
    Phase,
    Roles,
    StagePlan,
    beside,
    not_counted,
    refuse,
)
from posttrain.plan.sampling import RolloutShapes, sampling_phases
from posttrain.rl.algorithms import loss_of, needs_reference
from posttrain.stages.cluster import critic_settings
from posttrain.stages.distill import terms_of
from posttrain.stages.preference import pair_loss
from posttrain.stages.sft import sft_loss, train_settings
from posttrain.train.objective import TrainSettings
from posttrain.train.programs import TrainPrograms, placed_shapes
from posttrain.train.transformations import make_optimizer
from posttrain.tree import replace
from posttrain.weights.load import outline_of
from posttrain.weights.state import ModelWeights, active_parameters


def stage_plan(
    section: TrainSection,
    model: Decoder,
    mesh: Mesh,
    memory: int,
    roles: Roles,
    *,
    gather_once: bool = False,
    image: ImageSection,
) -> StagePlan:
    """Phases of a stage on devices with `memory` bytes each; `image`: limits of pictures. Raises ConfigError for one
    that it cannot plan."""
    if isinstance(section, SFTSection):
        return _sft(section, model, mesh, gather_once, image)
    if isinstance(section, PreferenceSection):
        return _preference(section, model, mesh, gather_once, image)
    if isinstance(section, DistillSection):
        return _distill(section, model, mesh, roles, gather_once, image)
    if isinstance(section, RLSection):
        return _rl(section, model, mesh, memory, roles, gather_once, image)
    kind = type(section).__name__.removesuffix("Section")
    raise ConfigError(f"plan: a stage of the kind {kind} cannot be planned yet")


def _sft(section: SFTSection, model: Decoder, mesh: Mesh, gather_once: bool, image: ImageSection) -> StagePlan:
    settings = train_settings(section, model.config.vocab_size, dropout_seed=0)
    settings = dataclasses.replace(settings, gather_once=gather_once)
    programs = _programs(section, model, sft_loss(section), settings, mesh)
    batch = with_pictures(batch_of(section.batch_rows, section.row_tokens), section, model, image)
    phases = [_update(programs, batch, {})]
    if section.eval_dataset is not None:
        state = {OPTIMIZER: bytes_on_device(programs.opt_state)}
        phases.append(_forward(programs, batch, EVALUATION, programs.lower_evaluation, 0, state))
    tokens = section.batch_rows * section.row_tokens
    return StagePlan(phases=phases, tokens=tokens, unit="tokens of rows", **_saved(section, programs))


def _distill(
    section: DistillSection, model: Decoder, mesh: Mesh, roles: Roles, gather_once: bool, image: ImageSection
) -> StagePlan:
    teachers = roles.teachers
    refusals = {
        "on_policy": section.on_policy > 0,
        "features": section.features is not None,
        "teachers of another tokenizer": any(teacher.aligned for teacher in section.teachers),
    }
    refuse("a distillation stage", refusals)
    settings = TrainSettings.of(section, temperature=1.0, dropout_seed=0, terms=terms_of(section, {}))
    settings = dataclasses.replace(settings, gather_once=gather_once)
    programs = _programs(section, model, distill_loss(section), settings, mesh, teachers)
    rows, length = section.batch_rows, section.row_tokens
    blind = _blind(model, [*teachers, *(one for one, _ in roles.scorers)])
    batch = with_pictures(batch_of(rows, length), section, model, None if blind else image)
    if len(section.teachers) > 1:
        shares = np.broadcast_to(np.float32(0), (rows, length, len(section.teachers)))
        batch = dataclasses.replace(batch, teacher_weights=shares)
    if outside := len(section.teachers) - len(teachers):
        k = min(section.top_k or DEFAULT_TOP_K, model.config.num_tokens or model.config.vocab_size)
        batch = dataclasses.replace(batch, teachers=(top_k_of(rows, length, k),) * outside)
    held = [_held_teacher(teacher, there) for teacher, there in roles.scorers]
    there = beside(held, mesh, UPDATE)
    update, passes = _update(programs, batch, there), -(-rows // programs.micro_rows(rows))
    flops = sum(2 * active_parameters(t) * rows * length + attention_flops(t.config, rows, length) for t in teachers)
    towers = sum(tower_flops(teacher, batch, None) for teacher in teachers)
    taught = sum(bytes_on_device(placed_shapes(ModelWeights(t), mesh)) for t in teachers)
    inside = {TEACHERS: taught} if taught else {}
    work: dict[str, Any] = {
        "flops": update.flops + (flops + towers) / mesh.size,
        "tower": update.tower + towers / mesh.size,
        "read": update.read + passes * taught,
    }
    phases = [dataclasses.replace(update, **work, own={**update.own, **inside})]
    state = {OPTIMIZER: bytes_on_device(programs.opt_state)}
    if section.eval_dataset is not None:
        phases.append(_forward(programs, batch, EVALUATION, programs.lower_evaluation, 0, state | there))
    own = [Held(name=name, mesh=mesh, size=size) for name, size in phases[0].own.items()]
    phases += _of_teachers(section, roles.scorers, [*held, *own], batch)
    elsewhere = sum(h.size * h.mesh.size for h in held if not set(h.mesh.devices.flat) & set(mesh.devices.flat))
    saved = _saved(section, programs)
    return StagePlan(
        phases=phases,
        tokens=rows * length,
        unit="tokens of rows",
        elsewhere=elsewhere,
        not_counted=blind,
        **saved,
    )


def _blind(model: Decoder, others: Sequence[Decoder]) -> list[str]:
    """Line of a stage whose plan is of text alone, as one of its other models takes no images; empty for others."""
    if model.config.vision is None or all(other.config.vision is not None for other in others):
        return []
    return ["images, with the vision tower's work on them; its weights are"]


def _held_teacher(teacher: Decoder, mesh: Mesh) -> Held:
    return Held(name=TEACHERS, mesh=mesh, size=bytes_on_device(placed_shapes(ModelWeights(teacher), mesh)))


def _of_teachers(
    section: DistillSection | RLSection,
    teachers: Sequence[tuple[Decoder, Mesh]],
    held: Sequence[Held],
    like: Batch,
) -> Iterator[Phase]:
    """Scores of teachers outside of the training step: log-probabilities of samples, or the top-k of rows; of rows
    `like` those of a batch."""
    for model, mesh in teachers:
        there, own = beside(held, mesh, SCORES), _held_teacher(model, mesh).size
        # Of all teachers on these devices, the one that scores is an argument.
        left = there.pop(TEACHERS, own) - own
        there |= {"other teachers": left} if left else {}
        yield _scoring(section, model, mesh, there, "teacher", SCORES, TEACHERS, like)


def _preference(
    section: PreferenceSection, model: Decoder, mesh: Mesh, gather_once: bool, image: ImageSection
) -> StagePlan:
    loss = pair_loss(section)
    if loss.needs.squares or loss.needs.margins:
        raise ConfigError(f"plan: the loss {section.loss} cannot be planned yet; plan with loss=sigmoid")
    settings = TrainSettings.of(section, temperature=1.0, dropout_seed=0, terms=PLAIN)
    settings = dataclasses.replace(settings, gather_once=gather_once)
    programs = _programs(section, model, loss, settings, mesh)
    scored = with_pictures(batch_of(section.batch_rows, section.row_tokens), section, model, image)
    scored = replace(scored, roles=scored.segments)
    batch = replace(scored, ref_logps=scored.loss_weight) if loss.needs.reference else scored
    live = loss.needs.reference and section.reference == "live"
    kept = {REFERENCE: bytes_on_device(programs.params)} if live else {}
    state = {OPTIMIZER: bytes_on_device(programs.opt_state)}
    phases = [_update(programs, batch, kept)]
    if loss.needs.reference:
        phases.append(_forward(programs, scored, STATISTICS, programs.lower_stats, 1, state | kept))
    if section.eval_dataset is not None:
        phases.append(_forward(programs, batch, EVALUATION, programs.lower_evaluation, 0, state | kept))
    tokens = section.batch_rows * section.row_tokens
    return StagePlan(phases=phases, tokens=tokens, unit="tokens of rows", **_saved(section, programs))


def _rl(
    section: RLSection,
    model: Decoder,
    mesh: Mesh,
    memory: int,
    roles: Roles,
    gather_once: bool,
    image: ImageSection,
) -> StagePlan:
    refusals = {
        "teachers of another tokenizer": any(teacher.aligned for teacher in section.teachers),
        "reward models": any(reward.model is not None for reward in section.rewards),
        "rollout.engine": section.rollout.engine is not None,
    }
    refuse("an RL stage", refusals)
    loss = loss_of(section)
    settings = TrainSettings.of(section, temperature=section.sampling.temperature, dropout_seed=None, terms=PLAIN)
    settings = dataclasses.replace(settings, gather_once=gather_once)
    programs = _programs(section, model, loss, settings, mesh)
    reference = needs_reference(section)
    arrays = ["sampler_logps", "behaviour_logps", "advantages", "sample_shares"]
    arrays += ["old_logps"] * (section.proximal_logps != "self") + ["ref_logps"] * reference
    batch = batch_of(section.step_rows, section.row_tokens, arrays=tuple(arrays))
    others = [pair[0] for pair in (roles.reference, roles.critic, *roles.scorers) if pair is not None]
    blind = _blind(model, others + ([] if roles.draft is None else [roles.draft]))
    limits = None if blind else image
    batch = with_pictures(batch, section, model, limits)
    if section.rollout.record_routing:
        shape = section.step_rows, section.row_tokens, len(model.config.mixtures), model.config.mixtures[0].top_k
        batch = dataclasses.replace(batch, experts=np.broadcast_to(np.zeros((), np.int16), shape))
    rollout = RolloutShapes.of(section, model, roles.rollout or mesh, memory, roles.draft, limits)
    critic = None if roles.critic is None else critic_programs(section, *roles.critic)
    held = list(_held(section, programs, rollout, critic, roles, reference))
    phases = list(sampling_phases(section, rollout, held, WEIGHTS if roles.rollout is None else COPY))
    of_actor = section.proximal_logps == "trainer" or section.algorithm.top_entropy is not None
    if scored := int(of_actor) + int(reference and roles.reference is None):
        there = beside(held, mesh, STATISTICS, WEIGHTS)
        phases.append(_forward(programs, batch, STATISTICS, programs.lower_stats, scored * section.updates, there))
    if roles.reference is not None:
        there = beside(held, roles.reference[1], STATISTICS, REFERENCE)
        phases.append(_scoring(section, *roles.reference, there, "reference", STATISTICS, REFERENCE, batch))
    phases += _of_teachers(section, roles.scorers, held, batch)
    if critic is not None:
        phases += _of_critic(section, critic, held, limits)
    update = _update(programs, batch, beside(held, mesh, UPDATE, WEIGHTS, OPTIMIZER))
    phases.append(dataclasses.replace(update, runs=section.updates_per_batch))
    on_trainer = {WEIGHTS, OPTIMIZER, *update.beside}
    return StagePlan(
        phases=phases,
        tokens=section.step_rows * section.updates * section.sampling.max_tokens,
        unit="sampled tokens",
        made=bytes_on_device(rollout.weights.derived),
        elsewhere=sum(h.size * h.mesh.size for h in held if h.name not in on_trainer),
        sampler_programs=rollout.num_programs,
        moves=list(_moves(section, programs, held, roles)),
        overlaps=section.samples_ahead and roles.rollout is not None,
        not_counted=[*not_counted(section), *blind],
        **_saved(section, programs, critic),
    )


def _held(
    section: RLSection,
    programs: TrainPrograms,
    rollout: RolloutShapes,
    critic: TrainPrograms | None,
    roles: Roles,
    reference: bool,
) -> Iterator[Held]:
    """Arrays of the roles between their programs, see `Cluster`; `reference`: there is one."""
    mesh, place = programs.mesh, section.placement
    yield Held(name=WEIGHTS, mesh=mesh, size=bytes_on_device(programs.weights))
    # All optimizers are on the devices in the updates of any.
    during = [UPDATE] if place.optimizer.offload else None
    yield Held(name=OPTIMIZER, mesh=mesh, size=bytes_on_device(programs.opt_state), only_in=during)
    during = [STATISTICS] if place.reference.offload else None
    if roles.reference is not None:
        weights = placed_shapes(ModelWeights(roles.reference[0]), roles.reference[1])
        yield Held(name=REFERENCE, mesh=roles.reference[1], size=bytes_on_device(weights), only_in=during)
    elif reference and section.reference.model != "base":
        yield Held(name=REFERENCE, mesh=mesh, size=bytes_on_device(programs.params), only_in=during)
    if critic is not None:
        yield Held(name=CRITIC, mesh=critic.mesh, size=bytes_on_device(critic.weights))
        during = [UPDATE] if place.critic.offload else None
        size = bytes_on_device(critic.opt_state)
        yield Held(name=CRITIC_OPTIMIZER, mesh=critic.mesh, size=size, only_in=during)
    # A step that samples and then learns gives up the cache in between.
    during = [LAYOUT, ENCODE, PREFILL, DECODE, DRAFTED] if section.asynchronous is None else None
    pool = bytes_on_device(rollout.runner.pool_shapes(rollout.loaded))
    yield Held(name=CACHE, mesh=rollout.mesh, size=pool, only_in=during)
    if roles.rollout is not None:
        yield Held(name=COPY, mesh=rollout.mesh, size=bytes_on_device(rollout.base))
    elif section.samples_while_updating:
        yield Held(name=COPY, mesh=mesh, size=bytes_on_device(programs.params))
    if rollout.copy is not None:
        yield Held(name=QUANTIZED, mesh=rollout.mesh, size=bytes_on_device(rollout.copy.own))
    for name, size in rollout.draft_sizes.items():
        yield Held(name=name, mesh=rollout.mesh, size=size, only_in=during if name == DRAFT_CACHE else None)
    yield from itertools.starmap(_held_teacher, roles.scorers)


def _moves(section: RLSection, programs: TrainPrograms, held: Sequence[Held], roles: Roles) -> Iterator[Move]:
    """Transfers of a step: what is offloaded, to the host and back, and new weights to the engine's devices."""
    for h in held:
        if h.only_in is not None and h.name in (OPTIMIZER, CRITIC_OPTIMIZER):
            yield Move(name=f"{h.name} to the host's memory and back", size=h.size, times=2, by="host", phase=UPDATE)
        elif h.only_in is not None and h.name == REFERENCE:
            name = f"{h.name} from the host's memory"
            yield Move(name=name, size=h.size, times=section.updates, by="host", phase=STATISTICS)
    if roles.rollout is not None:
        weights = ModelWeights(programs.structure.model)
        there = {path: x for path, x in placed_shapes(weights, roles.rollout).items() if path in programs.trainable}
        name = "new weights to the devices of the sampler"
        yield Move(name=name, size=bytes_on_device(there), by="wire", phase=SYNC)


def _scoring(
    section: DistillSection | RLSection,
    model: Decoder,
    mesh: Mesh,
    there: Mapping[str, int],
    role: str,
    name: str,
    held: str,
    like: Batch,
) -> Phase:
    """Scores of a model with all of its weights, `held` by a name: log-probabilities of samples, or the top-k of
    rows; `like` those of a batch."""
    length, total, of_samples = section.row_tokens, section.step_rows, isinstance(section, RLSection)
    rows = rows_per_pass(total, section.pass_rows, row_shards(mesh))
    temperature = section.sampling.temperature if isinstance(section, RLSection) else section.temperature
    k = 1 if isinstance(section, RLSection) else section.top_k or DEFAULT_TOP_K
    k = min(k, model.config.num_tokens or model.config.vocab_size)
    frozen = FrozenModel(model, mesh, temperature=temperature, rows=rows, k=k)
    weights = placed_shapes(ModelWeights(model), mesh)
    flops = 2 * active_parameters(model) * rows * length + attention_flops(model.config, rows, length)
    pictures = {name: None if (x := getattr(like, name)) is None else x[:rows] for name in IMAGE_ARRAYS}
    batch = replace(batch_of(rows, length), **pictures)
    tower = tower_flops(model, batch, None)
    lower = frozen.lower_logps if of_samples else frozen.lower_top_k
    return Phase(
        role=role,
        name=name,
        lower=lambda: lower(weights, batch),
        runs=-(-total // rows) * (section.updates if isinstance(section, RLSection) else 1),
        trips=(vocabulary_trips(mesh, rows, length, model.config.vocab_size),),
        flops=(flops + tower) / mesh.size,
        tower=tower / mesh.size,
        read=float(bytes_on_device(weights)),
        own={held: bytes_on_device(weights)},
        parameters=sizes_of(weights),
        mesh=mesh,
        beside=there,
    )


def critic_programs(section: RLSection, model: Decoder, mesh: Mesh) -> TrainPrograms:
    """Programs of a critic as shapes."""
    algorithm = section.algorithm
    assert isinstance(algorithm, PPO)
    optimizer = make_optimizer(algorithm.critic.optimizer, section.num_steps, seed=0, model=model)
    loss = ValueLoss(clip=algorithm.value_clip)
    return TrainPrograms(model, loss, optimizer, critic_settings(section, algorithm), mesh=mesh)


def _of_critic(
    section: RLSection, critic: TrainPrograms, held: Sequence[Held], image: ImageSection | None
) -> Iterator[Phase]:
    scored = batch_of(section.step_rows, section.row_tokens)
    scored = with_pictures(scored, section, critic.structure.model, image)
    batch = dataclasses.replace(scored, returns=scored.loss_weight, old_values=scored.loss_weight)
    there = beside(held, critic.mesh, VALUES, CRITIC)
    values = _forward(critic, scored, VALUES, critic.lower_stats, section.updates, there)
    weights = bytes_on_device(critic.weights)
    yield dataclasses.replace(values, role="critic", own={CRITIC: weights})
    update = _update(critic, batch, beside(held, critic.mesh, UPDATE, CRITIC, CRITIC_OPTIMIZER))
    own = {CRITIC: weights, CRITIC_OPTIMIZER: bytes_on_device(critic.opt_state)}
    yield dataclasses.replace(update, role="critic", runs=section.updates_per_batch, own=own)


def _programs(
    section: TrainSection,
    model: Decoder,
    loss: TokenLoss | ScoreLoss,
    settings: TrainSettings,
    mesh: Mesh,
    teachers: Sequence[Decoder] = (),
) -> TrainPrograms:
    optimizer = make_optimizer(section.optimizer, section.num_steps or 1000, seed=0, model=model)
    return TrainPrograms(model, loss, optimizer, settings, mesh=mesh, teachers=teachers)


def _saved(section: TrainSection, programs: TrainPrograms, critic: TrainPrograms | None = None) -> dict[str, Any]:
    """Fields of a plan on checkpoints."""
    saved = jax.tree.leaves((programs.params, programs.opt_state))
    others = [] if critic is None else jax.tree.leaves((critic.params, critic.opt_state))
    devices = programs.mesh.size
    return {
        "state": bytes_on_device(saved) + (bytes_on_device(others) * critic.mesh.size // devices if critic else 0),
        "largest": max(map(bytes_on_device, [*saved, *others])),
        "saves_between": section.checkpoint_every < (section.num_steps or math.inf),
        "rounds_at_once": programs.optimizer.rounds and not programs.optimizer.elementwise,
    }


def _update(programs: TrainPrograms, batch: Batch, there: Mapping[str, int]) -> Phase:
    rows, length = batch.shape
    model = programs.structure.model
    active = active_parameters(model)
    micro = programs.micro_rows(rows)
    passes = -(-rows // micro)
    flops = 2 * programs.language_factor * active * rows * length + 3.5 * attention_flops(model.config, rows, length)
    flops += recomputed_flops(model.config, model.compute.remat, rows, length)
    tower = tower_flops(model, batch, model.compute.remat)
    weights = bytes_on_device(programs.weights)
    state = bytes_on_device(programs.opt_state)
    chunks = vocabulary_trips(programs.mesh, micro, length, model.config.vocab_size)
    return Phase(
        role="trainer",
        name=UPDATE,
        lower=lambda: programs.lower_update(batch),
        runs=1,
        trips=(chunks,) if passes == 1 else (passes, chunks),
        flops=(flops + tower) / programs.mesh.size,
        tower=tower / programs.mesh.size,
        read=float(3 * passes * weights + 2 * state),
        own={WEIGHTS: weights, OPTIMIZER: state},
        parameters=sizes_of(programs.weights),
        mesh=programs.mesh,
        beside=there,
    )


def _forward(
    programs: TrainPrograms,
    batch: Batch,
    name: str,
    lower: Callable[[Batch], jax.stages.Lowered],
    runs: int,
    there: Mapping[str, int],
) -> Phase:
    rows, length = batch.shape
    model = programs.structure.model
    micro = programs.micro_rows(rows)
    flops = 2 * active_parameters(model) * rows * length + attention_flops(model.config, rows, length)
    tower = tower_flops(model, batch, None)
    chunks = vocabulary_trips(programs.mesh, micro, length, model.config.vocab_size)
    return Phase(
        role="trainer",
        name=name,
        lower=lambda: lower(batch),
        runs=runs,
        trips=(-(-rows // micro), chunks),
        flops=(flops + tower) / programs.mesh.size,
        tower=tower / programs.mesh.size,
        read=float(-(-rows // micro) * bytes_on_device(programs.weights)),
        own={WEIGHTS: bytes_on_device(programs.weights)},
        parameters=sizes_of(programs.weights),
        mesh=programs.mesh,
        beside=there,
    )


def vocabulary_trips(mesh: Mesh, rows: int, length: int, vocab_size: int) -> int:
    """Chunks of the loss over the vocabulary if every token of the fullest row counts."""
    return -(-(length - 1) // chunk_length(rows, length, vocab_size, VocabSharding.of(mesh)))


POLICY_ARRAYS = ("old_logps", "sampler_logps", "behaviour_logps", "ref_logps", "advantages", "sample_shares")
"""Float arrays of a batch of samples."""


def model_of(fields: Mapping[str, Any], compute: Compute, dtype: np.dtype) -> Decoder:
    """Model as shapes from the fields of a `config.json`."""
    return outline_of(hf.config_from_hf(dict(fields)), compute, dtype)
