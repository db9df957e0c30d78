"""Phases of a stage as programs of shapes: update, statistics, layout, prefill and decode, with their work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from posttrain.batch import Batch, DraftLoss, TokenLoss, model_inputs
from posttrain.config import (
    DistillSection,
    DrafterSection,
    ImageSection,
    OnlinePreferenceSection,
    OnlineSection,
    PreferenceSection,
    RewardModelSection,
    RLSection,
    SFTSection,
    TrainSection,
)
from posttrain.config.algorithm import PPO
from posttrain.distill.features import distill_loss, matching_of
from posttrain.errors import ConfigError
from posttrain.kernels.logits.chunk_stats import PLAIN, Terms
from posttrain.losses.distill import BlockDraftLoss
from posttrain.models.activations import attention_flops, recomputed_flops
from posttrain.models.decoder import Decoder
from posttrain.plan.lowered import (
    asked_batch,
    batch_of,
    bytes_on_device,
    critic_programs,
    drafter_programs,
    encode_work,
    sampled_batch,
    sizes_of,
    taught_batch,
    tower_flops,
    train_programs,
    vocabulary_trips,
    with_features,
    with_pairs,
    with_pictures,
)
from posttrain.plan.report import (
    COPY,
    CRITIC,
    CRITIC_OPTIMIZER,
    DRAFTER,
    DRAFTER_OPTIMIZER,
    ENCODE,
    EVALUATION,
    OPTIMIZER,
    REFERENCE,
    REWARD_MODELS,
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
)
from posttrain.plan.sampling import (
    RolloutShapes,
    Sampled,
    held_by_engine,
    held_scorer,
    reference_phase,
    reward_phases,
    sampling_phases,
    teacher_phases,
)
from posttrain.rl.algorithms import loss_of, needs_reference
from posttrain.rl.online_dpo import OnlineLoss
from posttrain.stages.cluster import sampler_gate
from posttrain.stages.distill import terms_of
from posttrain.stages.online_preference import online_loss
from posttrain.stages.preference import pair_loss
from posttrain.stages.sft import sft_loss, train_settings
from posttrain.train.objective import TrainSettings
from posttrain.train.optimizers import is_low
from posttrain.train.programs import TrainPrograms, placed_shapes
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
        settings = train_settings(section, model.config.vocab_size, dropout_seed=0)
        settings = dataclasses.replace(settings, gather_once=gather_once)
        return _sequences(section, model, mesh, sft_loss(section), settings, image)
    if isinstance(section, DrafterSection):
        settings = TrainSettings.of(section, temperature=1.0, dropout_seed=0, terms=PLAIN)
        settings = dataclasses.replace(settings, gather_once=gather_once)
        return _sequences(section, model, mesh, BlockDraftLoss(), settings, image)
    if isinstance(section, PreferenceSection | RewardModelSection):
        return _pairs(section, model, mesh, gather_once, image)
    if isinstance(section, DistillSection):
        return _distill(section, model, mesh, memory, roles, gather_once, image)
    if isinstance(section, RLSection | OnlinePreferenceSection):
        return _online(section, model, mesh, memory, roles, gather_once, image)
    raise AssertionError(f"no stage of {type(section).__name__}")


def _refuse(section: DistillSection | RLSection | OnlinePreferenceSection) -> None:
    """ConfigError with what cannot be planned."""
    taught = section.teachers if isinstance(section, DistillSection | RLSection) else ()
    refusals = {
        "teachers of another tokenizer, the length of whose rows only the data tells": any(t.aligned for t in taught),
        "rollout.engine, whose memory only it knows": section.rollout.engine is not None,
    }
    if refused := [name for name, is_set in refusals.items() if is_set]:
        raise ConfigError(f"plan: cannot plan {section.kind} with {'; with '.join(refused)}; remove it for the plan")


def _sequences(
    section: SFTSection | DrafterSection,
    model: Decoder,
    mesh: Mesh,
    loss: TokenLoss | DraftLoss,
    settings: TrainSettings,
    image: ImageSection,
) -> StagePlan:
    programs = train_programs(section, model, loss, settings, mesh)
    pictured = with_pictures(batch_of(section.batch_rows, section.row_tokens), section, model, image)
    batch = with_features(pictured, programs)
    state = {OPTIMIZER: bytes_on_device(programs.opt_state)}
    phases = [*_encode(programs, pictured, state), _update(programs, batch, {})]
    if section.eval_dataset is not None:
        phases.append(_forward(programs, batch, EVALUATION, programs.lower_evaluation, 0, state))
    tokens = section.batch_rows * section.row_tokens
    return StagePlan(phases=phases, tokens=tokens, unit="tokens of rows", **_saved(section, programs))


def _distill(
    section: DistillSection,
    model: Decoder,
    mesh: Mesh,
    memory: int,
    roles: Roles,
    gather_once: bool,
    image: ImageSection,
) -> StagePlan:
    _refuse(section)
    teachers, sampled, features = roles.teachers, Sampled.of(section) if section.on_policy else None, section.features
    settings = TrainSettings.of(section, temperature=1.0, dropout_seed=0, terms=terms_of(section, {}))
    settings = dataclasses.replace(
        settings,
        gather_once=gather_once,
        matching=None if features is None else matching_of(features, model.config, teachers[0].config, 0),
        skip_update=None if sampled is None else sampler_gate(model, section.rollout),
    )
    programs = train_programs(section, model, distill_loss(section), settings, mesh, teachers)
    blind = _blind(model, [*teachers, *(one for one, _ in roles.scorers)])
    limits = None if blind or sampled is not None else image
    pictured = taught_batch(section, model, limits, len(section.teachers) - len(teachers))
    batch = with_features(pictured, programs)
    rollout = None if sampled is None else RolloutShapes.of(sampled, model, mesh, memory, roles.draft)
    held = [held_scorer(*scorer) for scorer in roles.scorers]
    held += [] if rollout is None else held_by_engine(rollout, given_up=True)
    there = beside(held, mesh, UPDATE)
    update = _with_teachers(_update(programs, batch, there), programs, teachers, batch)
    state = {OPTIMIZER: bytes_on_device(programs.opt_state)}
    besides = there | {name: size for name, size in update.own.items() if name != WEIGHTS}
    phases = [*_encode(programs, pictured, besides), update]
    if section.eval_dataset is not None and section.on_policy < 1:
        phases.append(_forward(programs, batch, EVALUATION, programs.lower_evaluation, 0, state | there))
    held += [Held(name=name, mesh=mesh, size=size) for name, size in update.own.items()]
    if sampled is not None and rollout is not None:
        phases[:0] = sampling_phases(sampled, rollout, held, WEIGHTS)
    phases += teacher_phases(section, roles.scorers, held, pictured)
    on_trainer = {*update.own, *update.beside}
    elsewhere = sum(h.size * h.mesh.size for h in held if not _on(h, mesh) or h.name not in on_trainer)
    if sampled is not None and model.config.vision is not None:
        blind = [TEXT_ALONE]
    evaluated = ["the evaluation of samples"] if sampled is not None and section.eval_dataset is not None else []
    return StagePlan(
        phases=phases,
        tokens=batch.tokens.size,
        unit="tokens of rows",
        made=0 if rollout is None else bytes_on_device(rollout.weights.derived),
        elsewhere=elsewhere,
        sampler_programs=0 if rollout is None else rollout.num_programs,
        not_counted=[*evaluated, *blind],
        **_saved(section, programs),
    )


def _on(held: Held, mesh: Mesh) -> bool:
    return bool(set(held.mesh.devices.flat) & set(mesh.devices.flat))


TEXT_ALONE = "images, with the vision tower's work on them; its weights are"
"""Line on a plan of text alone."""


def _blind(model: Decoder, others: Sequence[Decoder]) -> list[str]:
    """Line of a stage whose plan is of text alone, as one of its other models takes no images; empty for others."""
    if model.config.vision is None or all(other.config.vision is not None for other in others):
        return []
    return [TEXT_ALONE]


def _pairs(
    section: PreferenceSection | RewardModelSection, model: Decoder, mesh: Mesh, gather_once: bool, image: ImageSection
) -> StagePlan:
    loss = pair_loss(section)
    terms = Terms(squares=loss.needs.squares)
    settings = TrainSettings.of(section, temperature=1.0, dropout_seed=0, terms=terms)
    settings = dataclasses.replace(settings, gather_once=gather_once)
    programs = train_programs(section, model, loss, settings, mesh)
    pictured = with_pictures(batch_of(section.batch_rows, section.row_tokens), section, model, image)
    scored = with_pairs(with_features(pictured, programs), section, loss.needs, model, mesh)
    batch = dataclasses.replace(scored, ref_logps=scored.loss_weight) if loss.needs.reference else scored
    live = loss.needs.reference and isinstance(section, PreferenceSection) and section.reference == "live"
    kept = {REFERENCE: bytes_on_device(programs.params)} if live else {}
    state = {OPTIMIZER: bytes_on_device(programs.opt_state)}
    phases = [*_encode(programs, pictured, state | kept), _update(programs, batch, kept)]
    if loss.needs.reference:
        phases.append(_forward(programs, scored, STATISTICS, programs.lower_stats, 1, state | kept))
    if section.eval_dataset is not None:
        phases.append(_forward(programs, batch, EVALUATION, programs.lower_evaluation, 0, state | kept))
    return StagePlan(phases=phases, tokens=batch.tokens.size, unit="tokens of rows", **_saved(section, programs))


def _online(
    section: RLSection | OnlinePreferenceSection,
    model: Decoder,
    mesh: Mesh,
    memory: int,
    roles: Roles,
    gather_once: bool,
    image: ImageSection,
) -> StagePlan:
    _refuse(section)
    sampled, loss = Sampled.of(section), _online_loss(section)
    terms = Terms(squares=loss.pairs.needs.squares) if isinstance(loss, OnlineLoss) else PLAIN
    settings = TrainSettings.of(section, temperature=section.sampling.temperature, dropout_seed=None, terms=terms)
    gate = sampler_gate(model, section.rollout)
    settings = dataclasses.replace(settings, gather_once=gather_once, skip_update=gate)
    programs = train_programs(section, model, loss, settings, mesh)
    reference, of_actor = needs_reference(section), False
    updates, per_batch = 1, 1
    if isinstance(section, RLSection):
        of_actor = section.proximal_logps == "trainer" or section.algorithm.top_entropy is not None
        updates, per_batch = section.updates, section.updates_per_batch
    others = [pair[0] for pair in (roles.reference, roles.critic, *roles.scorers) if pair is not None]
    blind = _blind(model, [*others, *roles.rewards, *([] if roles.draft is None else [roles.draft])])
    limits = None if blind else image
    pictured = sampled_batch(section, loss, model, mesh, limits)
    batch = with_features(pictured, programs)
    rollout = RolloutShapes.of(sampled, model, roles.rollout or mesh, memory, roles.draft, limits)
    critic = None
    if isinstance(section, RLSection) and roles.critic is not None:
        critic = critic_programs(section, *roles.critic)
    drafter = None if roles.drafter is None else drafter_programs(section, roles.drafter, mesh, gather_once)
    held = list(_held(section, programs, rollout, critic, drafter, roles, reference))
    phases = list(sampling_phases(sampled, rollout, held, WEIGHTS if roles.rollout is None else COPY))
    phases += reward_phases(sampled, roles.rewards, mesh, held)
    asked = asked_batch(section, model, limits)
    phases += _encode(programs, asked, beside(held, mesh, ENCODE, WEIGHTS))
    if scored := int(of_actor) + int(reference and roles.reference is None):
        there = beside(held, mesh, STATISTICS, WEIGHTS)
        phases.append(_forward(programs, batch, STATISTICS, programs.lower_stats, scored * updates, there))
    if roles.reference is not None:
        phases.append(reference_phase(section, *roles.reference, held, pictured))
    if isinstance(section, RLSection):
        phases += teacher_phases(section, roles.scorers, held, pictured)
        phases += [] if critic is None else _of_critic(section, critic, held, limits)
    update = _update(programs, batch, beside(held, mesh, UPDATE, WEIGHTS, OPTIMIZER))
    phases.append(dataclasses.replace(update, runs=per_batch))
    phases += [] if drafter is None else [_of_drafter(drafter, held, batch, per_batch)]
    on_trainer = {WEIGHTS, OPTIMIZER, *update.beside}
    return StagePlan(
        phases=phases,
        tokens=section.step_rows * updates * section.sampling.max_tokens,
        unit="sampled tokens",
        made=bytes_on_device(rollout.weights.derived),
        elsewhere=sum(h.size * h.mesh.size for h in held if h.name not in on_trainer),
        sampler_programs=rollout.num_programs,
        moves=list(_moves(programs, held, roles, updates)),
        overlaps=isinstance(section, RLSection) and section.samples_ahead and roles.rollout is not None,
        not_counted=[*_not_counted(section), *blind],
        **_saved(section, programs, critic, drafter),
    )


def _online_loss(section: RLSection | OnlinePreferenceSection) -> Any:
    return loss_of(section) if isinstance(section, RLSection) else OnlineLoss(pairs=online_loss(section))


def _not_counted(section: OnlineSection) -> list[str]:
    """Memory and time that such a stage takes beside its phases."""
    drafts = section.rollout.speculative
    turns = "the turns of conversations after the first: their prompts, tools and environments"
    every = section.reference.refresh_every if isinstance(section, RLSection) else None
    found = {
        turns: isinstance(section, RLSection) and section.converses,
        f"the second copy of the reference at its refresh, every {every} versions": every is not None,
        "rollout.speculative: the time that accepted drafts save and a draft model takes": drafts is not None,
    }
    return [name for name, is_met in found.items() if is_met]


def _held(
    section: OnlineSection,
    programs: TrainPrograms,
    rollout: RolloutShapes,
    critic: TrainPrograms | None,
    drafter: TrainPrograms | None,
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
    # The float32 average of a reference that moves by shares, beside what it is read in.
    moving = isinstance(section, RLSection) and section.reference.refresh_every is not None
    averaged = {path: x for path, x in programs.params.items() if is_low(x)}
    if not moving or section.reference.mixup == 1.0:
        averaged = {}
    wide = {path: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding) for path, x in averaged.items()}
    if roles.reference is not None:
        held = held_scorer(*roles.reference, REFERENCE)
        share = programs.mesh.size / held.mesh.size
        yield dataclasses.replace(held, size=held.size + round(bytes_on_device(wide) * share), only_in=during)
    elif reference and section.reference.model != "base":
        size = bytes_on_device(programs.params) + bytes_on_device(wide)
        yield Held(name=REFERENCE, mesh=mesh, size=size, only_in=during)
    if critic is not None:
        yield Held(name=CRITIC, mesh=critic.mesh, size=bytes_on_device(critic.weights))
        during = [UPDATE] if place.critic.offload else None
        size = bytes_on_device(critic.opt_state)
        yield Held(name=CRITIC_OPTIMIZER, mesh=critic.mesh, size=size, only_in=during)
    if drafter is not None:
        yield Held(name=DRAFTER, mesh=mesh, size=bytes_on_device(drafter.params))
        yield Held(name=DRAFTER_OPTIMIZER, mesh=mesh, size=bytes_on_device(drafter.opt_state))
    if roles.rollout is not None:
        yield Held(name=COPY, mesh=rollout.mesh, size=bytes_on_device(rollout.base))
    elif section.samples_while_updating:
        yield Held(name=COPY, mesh=mesh, size=bytes_on_device(programs.params))
    yield from held_by_engine(
        rollout, given_up=not (isinstance(section, RLSection) and section.asynchronous is not None)
    )
    yield from (held_scorer(*scorer) for scorer in roles.scorers)
    yield from (held_scorer(model, mesh, REWARD_MODELS) for model in roles.rewards)


def _moves(programs: TrainPrograms, held: Sequence[Held], roles: Roles, updates: int) -> Iterator[Move]:
    """Transfers of a step of `updates` parts: what is offloaded, to the host and back, and new weights to the engine's
    devices."""
    for h in held:
        if h.only_in is not None and h.name in (OPTIMIZER, CRITIC_OPTIMIZER):
            yield Move(name=f"{h.name} to the host's memory and back", size=h.size, times=2, by="host", phase=UPDATE)
        elif h.only_in is not None and h.name == REFERENCE:
            name = f"{h.name} from the host's memory"
            yield Move(name=name, size=h.size, times=updates, by="host", phase=STATISTICS)
    if roles.rollout is not None:
        weights = ModelWeights(programs.structure.model)
        there = {path: x for path, x in placed_shapes(weights, roles.rollout).items() if path in programs.trainable}
        name = "new weights to the devices of the sampler"
        yield Move(name=name, size=bytes_on_device(there), by="wire", phase=SYNC)


def _of_critic(
    section: RLSection, critic: TrainPrograms, held: Sequence[Held], image: ImageSection | None
) -> Iterator[Phase]:
    algorithm, weights = section.algorithm, bytes_on_device(critic.weights)
    assert isinstance(algorithm, PPO)
    scored = batch_of(section.step_rows, section.row_tokens)
    pictured = with_pictures(scored, section, critic.structure.model, image)
    if algorithm.critic.path is not None:
        asked = asked_batch(section, critic.structure.model, image)
        for phase in _encode(critic, asked, beside(held, critic.mesh, ENCODE, CRITIC)):
            yield dataclasses.replace(phase, role="critic", own={CRITIC: weights})
    scored = with_features(pictured, critic)
    batch = dataclasses.replace(scored, returns=scored.loss_weight, old_values=scored.loss_weight)
    there = beside(held, critic.mesh, VALUES, CRITIC)
    values = _forward(critic, scored, VALUES, critic.lower_stats, section.updates, there)
    yield dataclasses.replace(values, role="critic", own={CRITIC: weights})
    update = _update(critic, batch, beside(held, critic.mesh, UPDATE, CRITIC, CRITIC_OPTIMIZER))
    own = {CRITIC: weights, CRITIC_OPTIMIZER: bytes_on_device(critic.opt_state)}
    yield dataclasses.replace(update, role="critic", runs=section.updates_per_batch, own=own)


def _of_drafter(drafter: TrainPrograms, held: Sequence[Held], batch: Batch, runs: int) -> Phase:
    own = {h.name: h.size for h in held if h.name in (WEIGHTS, DRAFTER, DRAFTER_OPTIMIZER)}
    update = _update(drafter, model_inputs(batch), beside(held, drafter.mesh, UPDATE, *own))
    return dataclasses.replace(update, role="drafter", runs=runs, own=own)


def _saved(section: TrainSection, programs: TrainPrograms, *others: TrainPrograms | None) -> dict[str, Any]:
    """Fields of a plan on checkpoints."""
    stages = [one for one in (programs, *others) if one is not None]
    saved = [(jax.tree.leaves((one.params, one.opt_state)), one.mesh.size) for one in stages]
    return {
        "state": sum(bytes_on_device(arrays) * devices for arrays, devices in saved) // programs.mesh.size,
        "largest": max(bytes_on_device(array) for arrays, _ in saved for array in arrays),
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


def _encode(programs: TrainPrograms, batch: Batch, there: Mapping[str, int]) -> Iterator[Phase]:
    """Calls of frozen towers on the pictures of a step, all alike: in the first pass over the data, and later on those
    whose features are not kept. `there`: what lies beside the weights."""
    for number in programs.frozen_towers if batch.patches is not None else ():
        name = ENCODE if number == 0 else f"{ENCODE} for teacher {number}"
        own = {WEIGHTS: bytes_on_device(programs.weights)}
        yield Phase(role="trainer", name=name, own=own, beside=there, **encode_work(programs, number, batch))


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


def _with_teachers(update: Phase, programs: TrainPrograms, teachers: Sequence[Decoder], batch: Batch) -> Phase:
    """Update with teachers inside of it."""
    (rows, length), mesh = batch.shape, programs.mesh
    passes = -(-rows // programs.micro_rows(rows))
    flops = sum(2 * active_parameters(t) * rows * length + attention_flops(t.config, rows, length) for t in teachers)
    here = [teacher for number, teacher in enumerate(teachers, 1) if number not in programs.frozen_towers]
    towers = sum(tower_flops(teacher, batch, None) for teacher in here)
    taught = sum(held_scorer(teacher, mesh).size for teacher in teachers)
    return dataclasses.replace(
        update,
        flops=update.flops + (flops + towers) / mesh.size,
        tower=update.tower + towers / mesh.size,
        read=update.read + passes * taught,
        own={**update.own, **({TEACHERS: taught} if taught else {})},
    )
