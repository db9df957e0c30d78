"""What stages share that sample answers to prompts, score them and learn from them: RL and online preference."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from posttrain.batch import TokenLoss
from posttrain.config import RLSection, SampledSection, SamplingSection
from posttrain.console import console, printable
from posttrain.data.pipeline import PromptBatches
from posttrain.fit import Resumable
from posttrain.kernels.chunk_stats import PLAIN, Terms
from posttrain.losses.router import RouterLoss
from posttrain.mesh import row_shards
from posttrain.metrics import Sample, Timer, tables, to_host
from posttrain.optim import make_optimizer
from posttrain.recipes.prepare_rl import Scored, check_cache
from posttrain.recipes.rollouts import engine_metrics, make_engine, warm_up
from posttrain.recipes.stage import HeldOut, StageRun
from posttrain.rl.aio import run_async
from posttrain.rl.cluster import Cluster
from posttrain.rl.collect import Sampler
from posttrain.rl.evaluate import Evaluation, evaluate
from posttrain.rl.loop import RewardWatch, StepResult, check_agreement
from posttrain.rl.model_reward import ModelReward
from posttrain.rl.rewards import error_lines
from posttrain.rl.teaching import Scorer
from posttrain.rl.types import Example, Group, Rewards
from posttrain.trainer import Trainer

NUM_SHOWN = 6
"""Samples in a table."""
STEPS_WITHOUT_REWARD = 3
"""So many in a row end a run."""
Distances = Callable[[Sequence[Group]], np.ndarray]


class PromptSource(Resumable, Protocol):
    def __next__(self) -> list[int]:
        """Places in the examples that a step begins with."""
        ...


class SampledRun(abc.ABC):
    """The objects of a running stage. The reference, if kept, is the model at the start of the stage."""

    def __init__(
        self,
        stage: StageRun,
        inputs: Scored,
        trainer: Trainer,
        *,
        keep_reference: bool,
        teachers: Sequence[Scorer] = (),
    ):
        section = inputs.section
        samples = section.prompts_per_step * section.group_size
        self.scored, self.trainer = inputs, trainer
        self.engine = make_engine(
            trainer.model,
            stage.tokenizer,
            section.rollout,
            inputs.make_engine,
            slots=section.samples_in_flight,
            max_length=section.sequence_tokens,
        )
        self.cluster = Cluster(trainer, self.engine, keep_reference=keep_reference, teachers=teachers)
        for reward in inputs.rubric.rewards:
            if isinstance(reward.function, ModelReward):
                reward.function.load(stage.mesh, inputs.renderer, samples)
        self.prompts = self.new_prompts(stage.seed)
        self.sampler = Sampler(
            engine=self.engine,
            renderer=inputs.renderer,
            sampling=section.sampling,
            max_prompt_tokens=inputs.max_prompt_tokens,
            seed=stage.seed,
        )
        prompts = [(self.sampler, inputs.examples)]
        if inputs.eval_examples:
            prompts.append((self._eval_sampler(), inputs.eval_examples))
        warm_up(self.engine, section.rollout, prompts, rereads=section.samples_in_flight > samples)

    def new_prompts(self, seed: int) -> PromptSource:
        return self.prompt_batches(self.scored.section.prompts_per_step, seed)

    def prompt_batches(self, prompts_per_step: int, seed: int) -> PromptBatches:
        kept = [example.index for example in self.scored.examples]
        section, rows = self.scored.section, self.scored.rows
        return PromptBatches(section.dataset, rows, prompts_per_step=prompts_per_step, seed=seed, kept=kept)

    @abc.abstractmethod
    def learn(self, examples_P: Sequence[Example], timer: Timer) -> Coroutine[Any, Any, StepResult]:
        """One step on these prompts."""

    def distances(self) -> Distances | None:
        """What an evaluation measures beside rewards."""
        return None

    def step(self, timer: Timer) -> StepResult:
        examples = [self.scored.examples[index] for index in next(self.prompts)]
        outcome = run_async(self.learn(examples, timer))
        _print_errors(f"step {self.trainer.step_number}", outcome.rewards, outcome.groups_P)
        return outcome

    def evaluate(self) -> Evaluation:
        inputs = self.scored
        found = run_async(
            evaluate(self._eval_sampler(), inputs.rubric, inputs.eval_examples, distances=self.distances())
        )
        _print_errors("evaluation", found.rewards, found.groups_P)
        return found

    def _eval_sampler(self) -> Sampler:
        assert self.scored.eval_renderer is not None
        return replace(self.sampler, renderer=self.scored.eval_renderer, sampling=eval_sampling(self.scored.section))


def make_trainer(stage: StageRun, section: SampledSection, loss: TokenLoss, terms: Terms = PLAIN) -> Trainer:
    """At the temperature of `sampling`: what is trained is the policy that samples."""
    check_cache(section, row_shards(stage.mesh))
    return Trainer(
        stage.load_model(),
        loss,
        make_optimizer(section.optimizer, section.num_steps),
        temperature=section.sampling.temperature,
        max_grad_norm=section.optimizer.max_grad_norm,
        micro_batch_rows=section.micro_batch_rows or -(-section.step_rows // 8),
        mesh=stage.mesh,
        router_loss=RouterLoss(balance_coef=section.router.balance_coef, z_coef=section.router.z_coef),
        correction_rate=section.router.correction_rate,
        terms=terms,
    )


def train(stage: StageRun, run: SampledRun) -> None:
    """To the end of the stage, from its newest checkpoint if there is one."""
    section = run.scored.section
    held_out = HeldOut(evaluate=lambda: _record(run.evaluate()), metrics=itemgetter("metrics"))
    with stage.opened(run.trainer, run.prompts, section.num_steps) as (sinks, checkpointer):
        run.cluster.sync_weights()
        left_out = 1 - len(run.scored.examples) / len(run.scored.rows)
        dropped = {} if section.overlong == "error" else {"data/dropped_ratio": left_out}
        watch = RewardWatch(min(STEPS_WITHOUT_REWARD, section.num_steps))

        def step() -> Mapping[str, Any]:
            timer = Timer()
            outcome = run.step(timer)
            watch.see(run.trainer.step_number, outcome.rewards)
            if run.trainer.step_number % section.samples_every == 0 or run.trainer.step_number == 1:
                sinks.samples(run.trainer.step_number, step_samples(outcome, section.group_size))
            metrics = to_host(outcome.metrics)
            check_agreement(metrics, run.trainer.step_number)
            return {**metrics, **dropped, **engine_metrics(run.engine), **timer.metrics(), **tables(outcome.metrics)}

        evaluated = held_out if run.scored.eval_examples else None
        try:
            result = stage.train(run.trainer, step, run.prompts, sinks, checkpointer, section, evaluated)
        finally:
            run.engine.close()
    stage.finish(run.trainer.model, result)


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
