"""Online stages (RL, online preference): trainer, cluster and sampler, and the training loop around one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from posttrain.batch import TokenLoss
from posttrain.cluster.cluster import Cluster, Critic
from posttrain.cluster.reference import Scorer
from posttrain.config import OnlineSection, RLSection
from posttrain.data.messages import shown_text
from posttrain.data.pipeline import Prompts
from posttrain.evaluation.at_k import Record, prompt_differences
from posttrain.evaluation.rollouts import RolloutEvaluation, evaluate_prompts, record_of, with_at_k
from posttrain.kernels.logits.chunk_stats import PLAIN, Terms
from posttrain.losses.policy import PolicyLoss, RLLoss
from posttrain.losses.ratios import WithSamplerGap
from posttrain.mesh import row_shards
from posttrain.metrics import Sample, Timer, tables, to_host
from posttrain.reward.rubric import error_lines
from posttrain.rl.agreement import check_agreement, diagnose
from posttrain.rl.async_loop import AsyncLoop
from posttrain.rl.collector import RolloutCollector
from posttrain.rl.metrics import NoRewardGuard
from posttrain.rl.monitor import Monitor
from posttrain.rl.sampler import Curriculum, Sampler, Source
from posttrain.rl.step import EntropyControl, StepResult
from posttrain.rl.store import Recorded, TrajectoryStore
from posttrain.rollout.trajectory import Group
from posttrain.runtime import processes
from posttrain.runtime.event_loop import run_async
from posttrain.runtime.profiler import span
from posttrain.stages.cluster import engine_metrics, forget_prompts, make_cluster, sampler_gate, warm_up
from posttrain.stages.context import HeldOut, StageRun, Training
from posttrain.stages.prompts import EvalSet, RolloutInputs, check_cache, pictures_of_prompts
from posttrain.statistics import count_rows
from posttrain.tracking.console import console, printable
from posttrain.train.loop import crosses
from posttrain.train.trainer import Trainer

NUM_SHOWN = 6
"""Number of samples in a table."""
SAMPLES_EVERY = 10
"""Steps between samples in files, without `samples_every`."""
TRAJECTORIES = "trajectories"
"""Folder of records in that of the stage."""
MAX_STEPS_WITHOUT_REWARD = 3
"""Abort the run after this many consecutive steps without any valid reward."""

Distances = Callable[[Sequence[Group]], np.ndarray]
"""Distance of sampled groups from teachers, measured beside rewards: [P, G]."""


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Cluster and sampler of an online stage, with its inputs."""

    inputs: RolloutInputs
    cluster: Cluster
    sampler: Sampler
    settle: Callable[[], None] = lambda: None
    """Waits until the engine has no sample of training, so that it can be used otherwise."""
    on_loop: Callable[[Callable[[], Any]], Any] = lambda function: function()
    """Calls a function in the thread that uses the engine."""

    def eval_sampler(self, held_out: EvalSet) -> Sampler:
        """Sampler with the settings of held-out prompts."""
        return replace(self.sampler, renderer=held_out.renderer, sampling=self.inputs.section.held_out_sampling)


def open_rollouts(
    stage: StageRun,
    inputs: RolloutInputs,
    trainer: Trainer,
    *,
    keep_reference: bool,
    teachers: Sequence[Scorer] = (),
    critic: Critic | None = None,
) -> Rollouts:
    """Make cluster and sampler, load reward models, and compile the sampling programs."""
    section = inputs.section
    samples = section.prompts_per_step * section.group_size
    cluster = make_cluster(stage, inputs, trainer, keep_reference=keep_reference, teachers=teachers, critic=critic)
    engine = cluster.engine
    inputs.rubric.load_models(stage.mesh, inputs.renderer, samples)
    sampler = Sampler(
        engine=engine,
        renderer=inputs.renderer,
        sampling=section.sampling,
        max_prompt_tokens=inputs.max_prompt_tokens,
        seed=stage.seed,
        conversations=inputs.conversations,
    )
    rollouts = Rollouts(inputs=inputs, cluster=cluster, sampler=sampler)
    held_out = [(rollouts.eval_sampler(one), one.examples) for one in inputs.eval_sets]
    prompts = [(sampler, inputs.examples), *held_out]
    warm_up(
        engine,
        section.rollout,
        prompts,
        rereads=section.samples_in_flight > samples or inputs.conversations is not None,
    )
    return rollouts


def make_collector(
    rollouts: Rollouts, *, steps_per_version: int, curriculum: Curriculum | None = None
) -> RolloutCollector:
    """Make the acting half of the stage's steps, from the first prompt on."""
    inputs, section = rollouts.inputs, rollouts.inputs.section
    indices = [example.index for example in inputs.examples]
    pictures = pictures_of_prompts(inputs.examples)
    prompts = Prompts(section.dataset, inputs.rows, seed=rollouts.sampler.seed, kept=indices, pictures=pictures)
    return RolloutCollector(
        sampler=rollouts.sampler,
        rubric=inputs.rubric,
        source=Source(prompts, inputs.examples, curriculum),
        group_size=section.group_size,
        groups_per_step=section.prompts_per_step,
        steps_per_version=steps_per_version,
    )


@dataclass(frozen=True)
class RolloutState:
    """Position of rollouts in a checkpoint: the source of groups, the version of the weights, the entropy bonus, the
    groups that are sampled ahead, and the monitor of reward hacking."""

    source: Source
    cluster: Cluster
    entropy: EntropyControl | None = None
    ahead: AsyncLoop | None = None
    monitor: Monitor | None = None

    def state(self) -> dict[str, Any]:
        entropy = {} if self.entropy is None else {"entropy": self.entropy.state()}
        ahead = {} if self.ahead is None else {"ahead": self.ahead.state()}
        monitor = {} if self.monitor is None else {"monitor": self.monitor.state()}
        return {"source": self.source.state(), "version": self.cluster.version, **entropy, **ahead, **monitor}

    def restore(self, state: dict[str, Any]) -> None:
        self.source.restore(state["source"])
        self.cluster.version = state["version"]
        if self.entropy is not None:
            self.entropy.restore(state["entropy"])
        if self.ahead is not None:
            self.ahead.restore(state["ahead"])
        if self.monitor is not None:
            self.monitor.restore(state["monitor"])


def make_policy_trainer(stage: StageRun, section: OnlineSection, loss: TokenLoss, terms: Terms = PLAIN) -> Trainer:
    """Trainer at the temperature of `sampling`, so that it trains the policy that samples."""
    check_cache(section, row_shards(stage.mesh))
    if isinstance(loss, RLLoss) and not isinstance(loss, PolicyLoss):
        loss = WithSamplerGap(loss)
    model = stage.load_model()
    settings = replace(
        stage.train_settings(section, temperature=section.sampling.temperature, terms=terms),
        skip_update=sampler_gate(model, section.rollout),
        offload_optimizer=section.placement.optimizer.offload,
    )
    return stage.make_trainer(section, model, loss, settings)


def one_process(section: OnlineSection) -> str | None:
    """Reason why a stage runs in a single process; None: in any number of them."""
    own = section.placement.num_own_devices
    reasons = {
        "reward models": any(reward.model is not None for reward in section.rewards),
        "teachers": isinstance(section, RLSection) and bool(section.teachers),
        "asynchronous": isinstance(section, RLSection) and section.asynchronous is not None,
        "devices of a role of its own (placement)": own > 0,
        "reference.path": section.reference.path is not None,
        "rollout.speculative.optimizer": section.rollout.drafter_optimizer is not None,
    }
    names = [name for name, holds in reasons.items() if holds]
    return f"{' and '.join(names)} {'work' if len(names) > 1 else 'works'} in one process only" if names else None


def describe_steps(section: OnlineSection, inputs: RolloutInputs | None, compared: str = "") -> str:
    """Summarise an online stage in one line. `compared`: description of how samples are compared."""
    prompts = "" if inputs is None else f"{len(inputs.examples):,} prompts, "
    text = (
        f"{prompts}{section.steps} steps of {section.prompts_per_step} prompts x {section.group_size} samples "
        f"= {section.prompts_per_step * section.group_size}, up to {section.sampling.max_tokens} new tokens each"
    )
    if isinstance(section, RLSection) and (turns := section.env or section.agent) is not None:
        text += f" turn, {turns.max_turns} turns"
    keys = [] if inputs is None else [example.prompt_key for one in inputs.eval_sets for example in one.examples]
    held_out = f"; held-out: {count_rows(keys)}" if keys else ""
    if keys and section.evaluate is not None and section.evaluate.samples > 1:
        held_out += f" x {section.evaluate.samples} samples"
    return text + compared + held_out


def held_out_prompts(rollouts: Rollouts, distances: Distances | None = None) -> HeldOut | None:
    """Evaluation on held-out prompts, if there are any. `distances`: measured beside rewards."""
    section = rollouts.inputs.section
    if not rollouts.inputs.eval_sets:
        return None
    keeps = section.evaluate is not None and section.evaluate.keep_best
    return HeldOut(
        evaluate=lambda: _evaluate(rollouts, distances),
        metrics=itemgetter("metrics"),
        difference=prompt_differences,
        decides=f"avg@{section.evaluate.samples}" if section.evaluate is not None and keeps else None,
    )


class StepReport:
    """Report of each online step: metrics, sample tables, reward errors, trajectories; RunError from its guards. A
    context manager, at whose end the trajectories are on disk."""

    def __init__(self, rollouts: Rollouts, training: Training):
        self._rollouts, inputs = rollouts, rollouts.inputs
        self._section, self._training = inputs.section, training
        self._cluster, self._trainer = rollouts.cluster, rollouts.cluster.actor
        self._store = _open_store(self._section, training.folder, self._trainer.step_number)
        self._reported = self._trainer.step_number
        self._guard = NoRewardGuard(min(MAX_STEPS_WITHOUT_REWARD, self._section.steps))
        self._dropped = {} if self._section.overlong == "error" else inputs.cuts

    def __enter__(self) -> StepReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is not None:
            self._store.__exit__(kind, error, trace)

    def __call__(self, result: StepResult, timer: Timer) -> None:
        with span("log"):
            self._report(self._trainer.step_number, result, timer)

    def _report(self, step: int, result: StepResult, timer: Timer) -> None:
        _print_errors(f"step {step}", result)
        self._guard.check(step, result.rewards)
        if self._reported == 0 or crosses(self._reported, step, self._section.samples_every or SAMPLES_EVERY):
            self._training.sinks.samples(step, step_samples(result, self._section.group_size))
        self._record(step, result)
        monitor = self._rollouts.inputs.monitor
        hacking = {} if monitor is None else monitor.measure(result.groups_P, result.rewards)
        if monitor is not None:
            hacking["hacking/alarms"] = float(self._training.num_hacks)
        check_agreement(result.metrics, step, lambda: self._diagnosis(result))
        metrics = {
            **to_host(result.metrics),
            **hacking,
            **self._dropped,
            **self._rollouts.on_loop(lambda: engine_metrics(self._cluster.engine)),
            **timer.metrics(),
        }
        self._training.log({**metrics, **tables(result.metrics)})
        self._reported = step

    def _record(self, step: int, result: StepResult) -> None:
        section = self._section.record
        if self._store is None or section is None or not crosses(self._reported, step, section.every):
            return
        self._store.write(
            Recorded(
                before=self._reported,
                step=step,
                version=self._cluster.version - 1,  # the step has handed over its weights
                groups_P=result.groups_P,
                rewards=result.rewards,
                advantages_PG=result.advantages_PG,
                roles_PG=result.roles_PG,
            )
        )

    def _diagnosis(self, result: StepResult) -> str:
        if processes.count() > 1:
            return "a run in one process names the cause"
        rollouts = self._rollouts
        rollouts.settle()
        row_tokens = rollouts.inputs.section.sequence_tokens
        return run_async(diagnose(rollouts.cluster, rollouts.sampler, result.groups_P, row_tokens))


def _open_store(section: OnlineSection, folder: Path, step: int) -> TrajectoryStore | None:
    """Store of a stage's trajectories, in the process that writes files."""
    if section.record is None or not processes.writes():
        return None
    return TrajectoryStore(folder / TRAJECTORIES, keep=section.record.keep, start=step)


def _evaluate(rollouts: Rollouts, distances: Distances | None) -> Record:
    """Evaluate on all held-out prompts. Training goes on as if there had been none."""
    inputs, section = rollouts.inputs, rollouts.inputs.section.evaluate
    rollouts.settle()
    evaluations: dict[str | None, RolloutEvaluation] = {}
    for held_out in inputs.eval_sets:
        sampler, size = rollouts.eval_sampler(held_out), 1 if section is None else section.samples
        step = rollouts.cluster.actor.step_number
        one = run_async(
            evaluate_prompts(sampler, inputs.rubric, held_out.examples, size, step=step, distances=distances)
        )
        _print_errors("evaluation" if held_out.name is None else f"evaluation on {held_out.name}", one)
        evaluations[held_out.name] = one if section is None else with_at_k(one, section, inputs.section.pass_above)
    forget_prompts(rollouts.cluster.engine)
    return record_of(evaluations)


def _print_errors(when: str, scored: StepResult | RolloutEvaluation) -> None:
    for line in error_lines(scored.rewards, scored.groups_P):
        console().print(printable(f"{when}: {line}", console().encoding), markup=False, soft_wrap=True)


def step_samples(outcome: StepResult, group_size: int) -> list[Sample]:
    """Select a few samples of a training step: the first of each prompt, then the second, ..."""
    order = [(p, g) for g in range(group_size) for p in range(len(outcome.groups_P))][:NUM_SHOWN]
    return [_sample(outcome, p, g) for p, g in sorted(order)]


def _sample(outcome: StepResult, p: int, g: int) -> Sample:
    rewards, trajectory = outcome.rewards, outcome.groups_P[p][g]
    extra = {name: column[p * len(outcome.groups_P[p]) + g] for name, column in rewards.extras.items()}
    if outcome.roles_PG is not None:
        extra["role"] = int(outcome.roles_PG[p, g])
    return Sample(
        prompt="".join(shown_text(m) for m in trajectory.answer.example.messages),
        completion=trajectory.shown,
        reward=_number(rewards.total_PG[p, g]),
        rewards={name: _number(part[p, g]) for name, part in rewards.parts_PG.items()},
        advantage=None if outcome.advantages_PG is None else _number(outcome.advantages_PG[p, g]),
        stop=trajectory.stop,
        extra=extra,
    )


def _number(value: float | np.floating[Any]) -> float | None:
    return None if math.isnan(value) else float(value)
