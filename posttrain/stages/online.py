"""Online stages (RL, online preference): trainer, cluster and sampler, and the training loop around one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np

from posttrain.batch import TokenLoss
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.scorers import Scorer
from posttrain.config import OnlineSection
from posttrain.data.pipeline import Prompts
from posttrain.evaluation.rollouts import RolloutEvaluation, evaluate
from posttrain.kernels.logits.chunk_stats import PLAIN, Terms
from posttrain.mesh import row_shards
from posttrain.metrics import Sample, Timer, tables, to_host
from posttrain.rl.act import Act
from posttrain.rl.curriculum import Curriculum
from posttrain.rl.diagnosis import diagnose
from posttrain.rl.metrics import NoRewardGuard, check_agreement, sampler_disagrees
from posttrain.rl.reward_model import ModelReward
from posttrain.rl.rewards import error_lines
from posttrain.rl.sampler import Sampler
from posttrain.rl.source import Source
from posttrain.rl.step import StepResult
from posttrain.rl.types import Group, Rewards
from posttrain.runtime.profiler import span
from posttrain.runtime.run_async import run_async
from posttrain.stages.context import HeldOut, StageRun, Training
from posttrain.stages.engine import engine_metrics, make_engine, warm_up
from posttrain.stages.prompts import RolloutInputs, check_cache
from posttrain.tracking.console import console, printable
from posttrain.train.loop import crosses
from posttrain.train.trainer import Trainer

NUM_SHOWN = 6
"""Number of samples in a table."""
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

    @property
    def eval_sampler(self) -> Sampler:
        """Sampler with the settings of held-out prompts."""
        assert self.inputs.eval_renderer is not None
        return replace(self.sampler, renderer=self.inputs.eval_renderer, sampling=self.inputs.section.held_out_sampling)


def open_rollouts(
    stage: StageRun, inputs: RolloutInputs, trainer: Trainer, *, keep_reference: bool, teachers: Sequence[Scorer] = ()
) -> Rollouts:
    """Make engine, cluster and sampler, load reward models, and compile the sampling programs.

    The reference, if kept, is the model at the start of the stage.
    """
    section = inputs.section
    samples = section.prompts_per_step * section.group_size
    engine = make_engine(
        trainer.model,
        stage.tokenizer,
        section.rollout,
        inputs.make_engine,
        slots=section.samples_in_flight,
        max_length=section.sequence_tokens,
    )
    cluster = Cluster(trainer, engine, keep_reference=keep_reference, teachers=teachers)
    for reward in inputs.rubric.rewards:
        if isinstance(reward.function, ModelReward):
            reward.function.load(stage.mesh, inputs.renderer, samples)
    sampler = Sampler(
        engine=engine,
        renderer=inputs.renderer,
        sampling=section.sampling,
        max_prompt_tokens=inputs.max_prompt_tokens,
        seed=stage.seed,
    )
    rollouts = Rollouts(inputs=inputs, cluster=cluster, sampler=sampler)
    prompts = [(sampler, inputs.examples)]
    if inputs.eval_examples:
        prompts.append((rollouts.eval_sampler, inputs.eval_examples))
    warm_up(engine, section.rollout, prompts, rereads=section.samples_in_flight > samples)
    return rollouts


def make_act(rollouts: Rollouts, *, in_flight: int, max_staleness: int, curriculum: Curriculum | None = None) -> Act:
    """Make the acting half of the stage's steps, from the first prompt on."""
    inputs, section = rollouts.inputs, rollouts.inputs.section
    kept = [example.index for example in inputs.examples]
    prompts = Prompts(section.dataset, inputs.rows, seed=rollouts.sampler.seed, kept=kept)
    return Act(
        sampler=rollouts.sampler,
        rubric=inputs.rubric,
        source=Source(prompts, inputs.examples, curriculum),
        group_size=section.group_size,
        groups_per_step=section.prompts_per_step,
        in_flight=in_flight,
        max_staleness=max_staleness,
    )


@dataclass(frozen=True)
class RolloutState:
    """Position of rollouts in a checkpoint: the source of groups, and the version of the weights."""

    source: Source
    cluster: Cluster

    def state(self) -> dict[str, Any]:
        return {"source": self.source.state(), "version": self.cluster.version}

    def restore(self, state: dict[str, Any]) -> None:
        self.source.restore(state["source"])
        self.cluster.version = state["version"]


def make_policy_trainer(stage: StageRun, section: OnlineSection, loss: TokenLoss, terms: Terms = PLAIN) -> Trainer:
    """Trainer at the temperature of `sampling`, so that it trains the policy that samples."""
    check_cache(section, row_shards(stage.mesh))
    model, temperature = stage.load_model(), section.sampling.temperature
    return stage.make_trainer(section, model, loss, temperature=temperature, terms=terms, refuse=sampler_disagrees)


def describe_steps(section: OnlineSection, inputs: RolloutInputs | None, compared: str = "") -> str:
    """Summarise an online stage in one line. `compared`: description of how samples are compared."""
    prompts = "" if inputs is None else f"{len(inputs.examples):,} prompts, "
    text = (
        f"{prompts}{section.steps} steps of {section.prompts_per_step} prompts x {section.group_size} samples "
        f"= {section.prompts_per_step * section.group_size}, up to {section.sampling.max_tokens} new tokens each"
    )
    held_out = f"; {len(inputs.eval_examples)} held-out prompts" if inputs is not None and inputs.eval_examples else ""
    return text + compared + held_out


def held_out_prompts(rollouts: Rollouts, distances: Distances | None = None) -> HeldOut | None:
    """Evaluation on held-out prompts, if there are any. `distances`: measured beside rewards."""
    if not rollouts.inputs.eval_examples:
        return None
    return HeldOut(evaluate=lambda: _record(_evaluate(rollouts, distances)), metrics=itemgetter("metrics"))


class StepReport:
    """Report of each online step: metrics, sample tables, reward errors; RunError from its guards."""

    def __init__(self, rollouts: Rollouts, training: Training):
        self._rollouts, inputs = rollouts, rollouts.inputs
        self._section, self._training = inputs.section, training
        self._engine, self._trainer = rollouts.cluster.engine, rollouts.cluster.actor
        self._reported = self._trainer.step_number
        self._guard = NoRewardGuard(min(MAX_STEPS_WITHOUT_REWARD, self._section.steps))
        left_out = (len(inputs.rows) - len(inputs.examples)) / len(inputs.rows)
        self._dropped = {} if self._section.overlong == "error" else {"data/dropped_ratio": left_out}

    def __call__(self, result: StepResult, timer: Timer) -> None:
        with span("log"):
            self._report(self._trainer.step_number, result, timer)

    def _report(self, step: int, result: StepResult, timer: Timer) -> None:
        _print_errors(f"step {step}", result.rewards, result.groups_P)
        self._guard.check(step, result.rewards)
        if self._reported == 0 or crosses(self._reported, step, self._section.samples_every):
            self._training.sinks.samples(step, step_samples(result, self._section.group_size))
        check_agreement(result.metrics, step, lambda: self._diagnosis(result))
        metrics = {**to_host(result.metrics), **self._dropped, **engine_metrics(self._engine), **timer.metrics()}
        self._training.log({**metrics, **tables(result.metrics)})
        self._reported = step

    def _diagnosis(self, result: StepResult) -> str:
        rollouts = self._rollouts
        row_tokens = rollouts.inputs.section.sequence_tokens
        return run_async(diagnose(rollouts.cluster, rollouts.sampler, result.groups_P, row_tokens))


def _evaluate(rollouts: Rollouts, distances: Distances | None) -> RolloutEvaluation:
    inputs = rollouts.inputs
    found = run_async(evaluate(rollouts.eval_sampler, inputs.rubric, inputs.eval_examples, distances=distances))
    _print_errors("evaluation", found.rewards, found.groups_P)
    return found


def _print_errors(when: str, rewards: Rewards, groups_P: Sequence[Group]) -> None:
    for line in error_lines(rewards, groups_P):
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
        prompt="".join(str(m["content"]) for m in trajectory.example.messages),
        completion=trajectory.text,
        reward=_number(rewards.total_PG[p, g]),
        rewards={name: _number(part[p, g]) for name, part in rewards.parts_PG.items()},
        advantage=None if outcome.advantages_PG is None else _number(outcome.advantages_PG[p, g]),
        stop=trajectory.stop,
        extra=extra,
    )


def _number(value: float | np.floating[Any]) -> float | None:
    return None if math.isnan(value) else float(value)


def _record(evaluation: RolloutEvaluation) -> dict[str, Any]:
    """Convert an evaluation to JSON: metrics, all samples, and the confidence interval of the reward, or of the KL
    without rewards."""
    if evaluation.interval is not None:
        measure, interval, values_PG = "reward", evaluation.interval, evaluation.rewards.total_PG
    else:
        assert evaluation.distance is not None and evaluation.distances_PG is not None
        measure, interval, values_PG = "reverse KL", evaluation.distance, evaluation.distances_PG
    samples = [
        {
            "prompt": "".join(str(m["content"]) for m in group[0].example.messages),
            "completion": group[0].text,
            measure: _number(values_PG[p, 0]),
        }
        for p, group in enumerate(evaluation.groups_P)
    ]
    return {
        "measure": measure,
        "mean": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "n": interval.n,
        "metrics": evaluation.metrics(),
        "samples": samples,
    }
