"""RL stage: GRPO, PPO and their variants, and on-policy distillation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial

from posttrain.cluster.cluster import Cluster
from posttrain.cluster.reference import FrozenModel, Scorer
from posttrain.config import RLSection
from posttrain.distill.teachers import OutsideTeacher, TeacherSource, find_teachers, load_teacher, outside_teacher
from posttrain.environments.conversation import tools_of
from posttrain.errors import ConfigError
from posttrain.metrics import Timer
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.async_loop import AsyncLoop, AsyncSettings
from posttrain.rl.collector import Refill, RolloutCollector
from posttrain.rl.sampler import Curriculum
from posttrain.rl.step import EntropyControl, StepSettings, rl_step
from posttrain.rl.teachers import TeacherKL, distances, refuse_blind, shares_of
from posttrain.rollout.types import PausableEngine
from posttrain.runtime import processes
from posttrain.runtime.event_loop import run_async
from posttrain.stages.cluster import make_critic
from posttrain.stages.context import StageRun
from posttrain.stages.inputs import Prepared
from posttrain.stages.online import (
    Distances,
    Rollouts,
    RolloutState,
    StepReport,
    describe_steps,
    held_out_prompts,
    make_collector,
    make_policy_trainer,
    open_rollouts,
)
from posttrain.stages.prompts import RLInputs, build_rewards, prepare_scored
from posttrain.weights.drafter import save_drafter


def prepare(section: RLSection, prepared: Prepared) -> tuple[RLInputs, list[str]]:
    """Load prompts, rewards and teachers. Also returns notes."""
    rubric, monitor = build_rewards(section)
    algorithm, refill = Algorithm.of(section, rubric.weights), Refill.of(section)
    teachers, notes = find_teachers(section, prepared.tokenizer)
    scored, more = prepare_scored(section, prepared, shares_of(section), rubric, monitor)
    refuse_blind(
        teachers, shares_of(section), [*scored.examples, *(e for one in scored.eval_sets for e in one.examples)]
    )
    return RLInputs(algorithm=algorithm, refill=refill, teachers=teachers, **vars(scored)), [*notes, *more]


def check_offline(section: RLSection) -> None:
    """Check everything that needs neither tokenizer nor rows."""
    rubric, _ = build_rewards(section)
    Algorithm.of(section, rubric.weights)
    Refill.of(section)
    tools_of(section.tools, servers=False)
    find_teachers(section, None)


def describe(section: RLSection, inputs: RLInputs | None, shards: int) -> str:
    """Summarise the stage in one line."""
    text = describe_steps(section, inputs)
    if section.refill is not None:
        text += f"; up to {section.refill.limit} waves of further groups"
    if section.asynchronous is not None:
        text += f"; sampled up to {section.asynchronous.max_staleness} steps ahead"
    return text


def run(stage: StageRun, inputs: RLInputs) -> None:
    """Train an RL stage to its last step, resuming from its newest checkpoint."""
    section, algorithm, rubric = inputs.section, inputs.algorithm, inputs.rubric
    if not section.scored:
        stage = replace(stage, kind="rl_distill")
    with ExitStack() as stack:
        stack.enter_context(rubric.running())
        if inputs.conversations is not None:
            stack.callback(inputs.conversations.close)
        trainer = make_policy_trainer(stage, section, algorithm.loss)
        teachers = _load_teachers(stage, inputs)
        critic = None if algorithm.critic is None else make_critic(stage, section, algorithm.critic.loss, trainer.model)
        keep_reference = algorithm.needs_reference
        rollouts = open_rollouts(
            stage, inputs, trainer, keep_reference=keep_reference, teachers=teachers, critic=critic
        )
        cluster, settings = rollouts.cluster, step_settings(section, stage.seed)
        collector = replace(_collector(rollouts, section), refill=inputs.refill)
        ahead = _async_loop(stage, section, cluster, algorithm, collector, settings)
        if ahead is not None:
            rollouts = replace(rollouts, settle=ahead.settle, on_loop=ahead.on_loop)
        held_out = held_out_prompts(rollouts, _distances(teachers, settings))
        state = RolloutState(collector.source, cluster, settings.entropy, ahead, inputs.monitor)
        with stage.training(trainer, state, section, held_out) as training, closing(cluster.engine):
            cluster.sync_weights(cluster.version)
            with StepReport(rollouts, training) as report, nullcontext() if ahead is None else ahead:
                for _ in training:
                    timer = Timer()
                    if ahead is None:
                        report(run_async(rl_step(cluster, algorithm, collector, settings, timer)), timer)
                    else:
                        report(ahead.step(timer), timer)
            if cluster.drafter is not None and processes.writes():
                save_drafter(cluster.drafter.trainer.model, stage.folder / "drafter")


def _collector(rollouts: Rollouts, section: RLSection) -> RolloutCollector:
    """Acting half of the steps."""
    curriculum = _curriculum(rollouts, section)
    collector = make_collector(rollouts, steps_per_version=section.updates_per_batch, curriculum=curriculum)
    return replace(collector, pass_above=section.pass_above)


def _async_loop(
    stage: StageRun,
    section: RLSection,
    cluster: Cluster,
    algorithm: Algorithm,
    collector: RolloutCollector,
    settings: StepSettings,
) -> AsyncLoop | None:
    """Asynchronous loop, if the section has one. ConfigError for an engine that cannot take turns with the trainer."""
    given = section.asynchronous
    if given is None:
        return None
    shared = stage.devices.rollout is None and section.samples_ahead
    in_turns = shared and (given.in_flight or stage.mesh.size > 1)
    if in_turns and not isinstance(cluster.engine, PausableEngine):
        raise ConfigError(
            f"rollout.engine: {type(cluster.engine).__name__} has no pause, resume and keys, which asynchronous needs "
            "on the trainer's devices; implement them, or set placement.rollout.devices"
        )
    way = AsyncSettings(
        max_staleness=given.max_staleness,
        in_flight=given.in_flight,
        in_turns=in_turns,
        # An agent may wait for a place that another one has until its end.
        in_rounds=not given.in_flight and section.agent is None,
        stall_s=given.stall_s,
        num_versions=section.steps // section.updates_per_batch,
    )
    return AsyncLoop(cluster, algorithm, collector, settings, way)


def _curriculum(rollouts: Rollouts, section: RLSection) -> Curriculum | None:
    curriculum = section.curriculum
    if curriculum is None:
        return None
    return Curriculum(
        len(rollouts.inputs.examples),
        pools=curriculum.pools,
        shares=curriculum.draw,
        decay=curriculum.decay,
        pass_above=section.pass_above,
        seed=rollouts.sampler.seed,
    )


def step_settings(section: RLSection, seed: int) -> StepSettings:
    return StepSettings(
        row_tokens=section.row_tokens,
        num_rows=section.step_rows,
        updates=section.updates,
        epochs=section.update_epochs,
        seed=seed,
        old_logps=section.proximal_logps,
        zero_advantage=section.algorithm.zero_advantage,
        stale=section.samples_ahead,
        teaching=TeacherKL(coef=section.teacher_coef, shares=shares_of(section)) if section.teachers else None,
        entropy=_entropy_control(section),
    )


def _entropy_control(section: RLSection) -> EntropyControl | None:
    algorithm = section.algorithm
    if algorithm.entropy_target is None:
        return None
    return EntropyControl(target=algorithm.entropy_target, start=algorithm.entropy_coef, step=algorithm.entropy_step)


def _distances(teachers: Sequence[Scorer], settings: StepSettings) -> Distances | None:
    """Reverse KL from the teachers in evaluations; None without teachers."""
    if settings.teaching is None:
        return None
    return partial(distances, teachers, shares=settings.teaching.shares, row_tokens=settings.row_tokens)


def _load_teachers(stage: StageRun, inputs: RLInputs) -> list[OutsideTeacher]:
    """Load teachers on the student's mesh, on their own mesh or at their servers; they score samples before the
    update."""
    section, temperature = inputs.section, inputs.section.sampling.temperature

    def load(source: TeacherSource) -> OutsideTeacher:
        if source.section.outside:
            return outside_teacher(source, stage.model, stage.tokenizer, section, temperature, mesh=stage.mesh)
        model = load_teacher(source, stage.model, stage.tokenizer, stage.mesh)
        return FrozenModel(model, stage.mesh, temperature=temperature, rows=section.pass_rows)

    return [load(source) for source in inputs.teachers]
