"""Online stages (RL, online preference): trainer, cluster and sampler, and the training loop around one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import numpy as np

from posttrain.batch import TokenLoss
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.scorers import Scorer
from posttrain.config import RLSection, SampledSection, SamplingSection
from posttrain.data.pipeline import PromptBatches
from posttrain.evaluation.rollouts import Evaluation, evaluate
from posttrain.kernels.logits.chunk_stats import PLAIN, Terms
from posttrain.losses.router import RouterLoss
from posttrain.mesh import row_shards
from posttrain.metrics import Sample, Timer, tables, to_host
from posttrain.rl.reward_model import ModelReward
from posttrain.rl.rewards import error_lines
from posttrain.rl.sampler import Sampler
from posttrain.rl.step import RewardWatch, StepResult, check_agreement
from posttrain.rl.types import Group, Rewards
from posttrain.runtime.run_async import run_async
from posttrain.stages.context import HeldOut, StageRun
from posttrain.stages.engine import engine_metrics, make_engine, warm_up
from posttrain.stages.prompts import Scored, check_cache
from posttrain.tracking.console import console, printable
from posttrain.train.loop import Resumable
from posttrain.train.optim import make_optimizer
from posttrain.train.trainer import Trainer

NUM_SHOWN = 6
"""Samples in a table."""
MAX_STEPS_WITHOUT_REWARD = 3
"""Abort the run after this many consecutive steps without any valid reward."""

Distances = Callable[[Sequence[Group]], np.ndarray]
"""Measure of sampled groups beside their rewards: [P, G]."""
Step = Callable[[Timer], Coroutine[Any, Any, StepResult]]


@runtime_checkable
class PromptSource(Resumable, Protocol):
    def __next__(self) -> list[int]:
        """Row numbers of the prompts of the next step."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Cluster and sampler of an online stage, with its inputs."""

    inputs: Scored
    cluster: Cluster
    sampler: Sampler

    @property
    def eval_sampler(self) -> Sampler:
        """The sampler with the settings of held-out prompts."""
        assert self.inputs.eval_renderer is not None
        return replace(self.sampler, renderer=self.inputs.eval_renderer, sampling=eval_sampling(self.inputs.section))


def open_rollouts(
    stage: StageRun, inputs: Scored, trainer: Trainer, *, keep_reference: bool, teachers: Sequence[Scorer] = ()
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


def prompt_batches(inputs: Scored, seed: int) -> PromptBatches:
    """`prompts_per_step` row numbers at a time."""
    section = inputs.section
    return PromptBatches(section.dataset, inputs.rows, prompts_per_step=section.prompts_per_step, seed=seed)


def make_trainer(stage: StageRun, section: SampledSection, loss: TokenLoss, terms: Terms = PLAIN) -> Trainer:
    """At the temperature of `sampling`: what is trained is the policy that samples."""
    check_cache(section, row_shards(stage.mesh))
    return Trainer(
        stage.load_model(),
        loss,
        make_optimizer(section.optimizer, section.steps),
        temperature=section.sampling.temperature,
        max_grad_norm=section.optimizer.max_grad_norm,
        micro_batch_rows=section.micro_batch_rows or -(-section.step_rows // 8),
        mesh=stage.mesh,
        router_loss=RouterLoss(balance_coef=section.router.balance_coef, z_coef=section.router.z_coef),
        correction_rate=section.router.correction_rate,
        terms=terms,
    )


def describe_steps(section: SampledSection, inputs: Scored | None, compared: str = "") -> str:
    """Summarise an online stage in one line. `compared`: how samples are compared, where they are."""
    prompts = "" if inputs is None else f"{len(inputs.examples):,} prompts, "
    text = (
        f"{prompts}{section.steps} steps of {section.prompts_per_step} prompts x {section.group_size} samples "
        f"= {section.prompts_per_step * section.group_size}, up to {section.sampling.max_tokens} new tokens each"
    )
    held_out = f"; {len(inputs.eval_examples)} held-out prompts" if inputs is not None and inputs.eval_examples else ""
    return text + compared + held_out


def train(
    stage: StageRun, rollouts: Rollouts, prompts: PromptSource, step: Step, distances: Distances | None = None
) -> None:
    """Train to the end of the stage, from its newest checkpoint if there is one.

    `step`: one update, from prompts to weights. `distances`: what an evaluation measures beside rewards.
    """
    inputs, section, trainer = rollouts.inputs, rollouts.inputs.section, rollouts.cluster.actor
    held_out = HeldOut(evaluate=lambda: _record(_evaluate(rollouts, distances)), metrics=itemgetter("metrics"))
    with stage.opened(trainer, prompts, section.steps) as (sinks, checkpointer):
        rollouts.cluster.sync_weights()
        watch = RewardWatch(min(MAX_STEPS_WITHOUT_REWARD, section.steps))

        def one_step() -> Mapping[str, Any]:
            timer = Timer()
            outcome = run_async(step(timer))
            number = trainer.step_number
            _print_errors(f"step {number}", outcome.rewards, outcome.groups_P)
            watch.see(number, outcome.rewards)
            if number % section.samples_every == 0 or number == 1:
                sinks.samples(number, step_samples(outcome, section.group_size))
            metrics = to_host(outcome.metrics)
            check_agreement(metrics, number)
            return {**metrics, **engine_metrics(rollouts.cluster.engine), **timer.metrics(), **tables(outcome.metrics)}

        evaluated = held_out if inputs.eval_examples else None
        try:
            result = stage.train(trainer, one_step, prompts, sinks, checkpointer, section, evaluated)
        finally:
            rollouts.cluster.engine.close()
    stage.finish(trainer.model, result)


def _evaluate(rollouts: Rollouts, distances: Distances | None) -> Evaluation:
    inputs = rollouts.inputs
    found = run_async(evaluate(rollouts.eval_sampler, inputs.rubric, inputs.eval_examples, distances=distances))
    _print_errors("evaluation", found.rewards, found.groups_P)
    return found


def _print_errors(when: str, rewards: Rewards, groups_P: Sequence[Group]) -> None:
    for line in error_lines(rewards, groups_P):
        console().print(printable(f"{when}: {line}", console().encoding), markup=False, soft_wrap=True)


def eval_sampling(section: SampledSection) -> SamplingSection:
    if section.eval_sampling is not None:
        return section.eval_sampling
    if isinstance(section, RLSection) and section.teachers:
        return section.sampling
    return section.sampling.model_copy(update={"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0})


def step_samples(outcome: StepResult, group_size: int) -> list[Sample]:
    """A few samples of a training step: the first of each prompt, then the second, ..."""
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


def _record(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as JSON: metrics, and of the reward, or without one of the KL, its interval and every sample."""
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
