"""Reinforcement learning with verifiable rewards: GRPO and its family on one colocated cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np

from posttrain.config import RLSection, SamplingSection
from posttrain.console import console, printable
from posttrain.data.pipeline import PromptBatches
from posttrain.losses.router import RouterLoss
from posttrain.mesh import row_shards
from posttrain.metrics import Sample, Timer, tables, to_host
from posttrain.optim import make_optimizer
from posttrain.recipes.prepare import rows_per_step
from posttrain.recipes.prepare_rl import RLInputs, check_cache
from posttrain.recipes.python import PythonRun
from posttrain.recipes.rollouts import engine_metrics, make_engine, warm_up
from posttrain.recipes.stage import HeldOut, StageRun
from posttrain.recipes.teachers import OutsideTeacher, TeacherSource, load_teacher, outside_teacher, shares_of
from posttrain.reference import FrozenModel
from posttrain.rl.aio import run_async
from posttrain.rl.cluster import Cluster
from posttrain.rl.collect import Sampler
from posttrain.rl.evaluate import Evaluation, evaluate
from posttrain.rl.loop import RewardWatch, StepResult, StepSettings, check_agreement, rl_step
from posttrain.rl.model_reward import ModelReward
from posttrain.rl.rewards import error_lines
from posttrain.rl.teaching import Teaching, distances
from posttrain.rl.types import Group, Rewards
from posttrain.trainer import Trainer

NUM_SHOWN = 6
"""Samples in a table."""
STEPS_WITHOUT_REWARD = 3
"""So many in a row end a run."""


def run_rl(stage: StageRun, inputs: RLInputs) -> None:
    """Train one RL stage to its end, from its newest checkpoint if there is one."""
    section = inputs.section
    if not section.rewards:
        stage = replace(stage, kind="rl_distill")
    run = _RLRun(stage, inputs)
    held_out = HeldOut(evaluate=lambda: _record(run.evaluate()), metrics=itemgetter("metrics"))
    with stage.opened(run.trainer, run.prompts, section.num_steps) as (sinks, checkpointer):
        run.cluster.sync_weights()
        watch = RewardWatch(min(STEPS_WITHOUT_REWARD, section.num_steps))

        def step() -> Mapping[str, Any]:
            timer = Timer()
            outcome = run.step(timer)
            watch.see(run.trainer.step_number, outcome.rewards)
            if run.trainer.step_number % section.samples_every == 0 or run.trainer.step_number == 1:
                sinks.samples(run.trainer.step_number, step_samples(outcome, section.group_size))
            metrics = to_host(outcome.metrics)
            check_agreement(metrics, run.trainer.step_number)
            return {**metrics, **engine_metrics(run.engine), **timer.metrics(), **tables(outcome.metrics)}

        try:
            result = stage.train(
                run.trainer, step, run.prompts, sinks, checkpointer, section, held_out if inputs.eval_examples else None
            )
        finally:
            run.engine.close()
    stage.finish(run.trainer.model, result)


class _RLRun:
    """The objects of a running RL stage."""

    def __init__(self, stage: StageRun, inputs: RLInputs):
        section = inputs.section
        samples = rows_per_step(section)
        check_cache(section, row_shards(stage.mesh))
        self.inputs = inputs
        self.trainer = Trainer(
            stage.load_model(),
            inputs.algorithm.loss,
            make_optimizer(section.optimizer, section.num_steps),
            temperature=section.sampling.temperature,
            max_grad_norm=section.optimizer.max_grad_norm,
            micro_batch_rows=section.micro_batch_rows or -(-samples // 8),
            mesh=stage.mesh,
            router_loss=RouterLoss(balance_coef=section.router.balance_coef, z_coef=section.router.z_coef),
            correction_rate=section.router.correction_rate,
        )
        self.engine = make_engine(
            self.trainer.model,
            stage.tokenizer,
            section.rollout,
            inputs.make_engine,
            slots=samples,
            max_length=section.row_tokens,
        )
        self.teachers = self._load_teachers(stage)
        self.cluster = Cluster(
            self.trainer,
            self.engine,
            keep_reference=inputs.algorithm.loss.kl_coef > 0,
            teachers=self.teachers,
        )
        for reward in inputs.rubric.rewards:
            if isinstance(reward.function, ModelReward):
                reward.function.load(stage.mesh, inputs.renderer, samples)
        self.prompts = PromptBatches(
            section.dataset, inputs.rows, prompts_per_step=section.prompts_per_step, seed=stage.seed
        )
        self.sampler = Sampler(
            engine=self.engine,
            renderer=inputs.renderer,
            sampling=section.sampling,
            max_prompt_tokens=inputs.max_prompt_tokens,
            seed=stage.seed,
        )
        samplers = [self.sampler, self._eval_sampler()] if inputs.eval_examples else [self.sampler]
        warm_up(self.engine, section.rollout, samplers)
        self.settings = StepSettings(
            group_size=section.group_size,
            row_tokens=section.row_tokens,
            num_rows=samples,
            recompute_old_logps=section.recompute_old_logps,
            teaching=Teaching(coef=section.teacher_coef, shares=shares_of(section)) if section.teachers else None,
        )

    def _load_teachers(self, stage: StageRun) -> list[OutsideTeacher]:
        """On the student's mesh, on their own or at their servers: they score what was sampled, before the step."""
        section, temperature = self.inputs.section, self.inputs.section.sampling.temperature
        rows = section.micro_batch_rows or -(-rows_per_step(section) // 8)

        def load(source: TeacherSource) -> OutsideTeacher:
            if source.section.outside:
                return outside_teacher(source, stage.model, stage.tokenizer, section, temperature)
            model = load_teacher(source, stage.model, stage.tokenizer, stage.mesh)
            return FrozenModel(model, stage.mesh, temperature=temperature, rows=rows)

        return [load(source) for source in self.inputs.teachers]

    def step(self, timer: Timer) -> StepResult:
        examples = [self.inputs.examples[index] for index in next(self.prompts)]
        inputs = self.inputs
        outcome = run_async(
            rl_step(self.cluster, inputs.algorithm, inputs.rubric, self.sampler, examples, self.settings, timer)
        )
        _print_errors(f"step {self.trainer.step_number}", outcome.rewards, outcome.groups_P)
        return outcome

    def evaluate(self) -> Evaluation:
        teaching = self.settings.teaching
        measure = None
        if teaching is not None:
            measure = partial(distances, self.teachers, shares=teaching.shares, row_tokens=self.settings.row_tokens)
        inputs = self.inputs
        found = run_async(evaluate(self._eval_sampler(), inputs.rubric, inputs.eval_examples, distances=measure))
        _print_errors("evaluation", found.rewards, found.groups_P)
        return found

    def _eval_sampler(self) -> Sampler:
        assert self.inputs.eval_renderer is not None
        return replace(self.sampler, renderer=self.inputs.eval_renderer, sampling=eval_sampling(self.inputs.section))


def _print_errors(when: str, rewards: Rewards, groups_P: Sequence[Group]) -> None:
    for line in error_lines(rewards, groups_P):
        console().print(printable(f"{when}: {line}", console().encoding), markup=False, soft_wrap=True)


def eval_sampling(section: RLSection) -> SamplingSection:
    if section.eval_sampling is not None:
        return section.eval_sampling
    if section.teachers:
        return section.sampling
    return section.sampling.model_copy(update={"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0})


def step_samples(outcome: StepResult, group_size: int) -> list[Sample]:
    """A few samples of a training step: the first of each prompt, then the second, ..."""
    order = [(p, g) for g in range(group_size) for p in range(len(outcome.groups_P))][:NUM_SHOWN]
    return [_sample(outcome, p, g) for p, g in sorted(order)]


def _sample(outcome: StepResult, p: int, g: int) -> Sample:
    rewards, trajectory = outcome.rewards, outcome.groups_P[p][g]
    return Sample(
        prompt="".join(str(m["content"]) for m in trajectory.example.messages),
        completion=trajectory.text,
        reward=_number(rewards.total_PG[p, g]),
        rewards={name: _number(part[p, g]) for name, part in rewards.parts_PG.items()},
        advantage=_number(outcome.advantages_PG[p, g]),
        stop=trajectory.stop,
        extra={name: column[p * len(outcome.groups_P[p]) + g] for name, column in rewards.extras.items()},
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


class RL(PythonRun):
    """Reinforcement learning from Python: `pt.RL(model="path", dataset="data.jsonl", rewards=[correct]).fit()`.

    Every field of `posttrain.config.RLSection` is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "rl"
    defaults: ClassVar[Mapping[str, Any]] = {
        "prompts_per_step": 8,
        "group_size": 8,
        "optimizer": {"learning_rate": 1e-6},
    }
    lora_learning_rate = 1e-5

    @classmethod
    def lengths(cls, given: Mapping[str, Any], max_positions: int | None) -> dict[str, Any]:
        """512 tokens for prompt and answer each, or half of the row where the model's context is less."""
        sampling = given.get("sampling")
        answer = sampling.get("max_tokens", 512) if isinstance(sampling, Mapping) else 512
        row = given.get("row_tokens", 512 + answer if isinstance(answer, int) else 1024)
        if "row_tokens" not in given and max_positions is not None:
            row = min(row, max_positions)
        longest = min(512, row // 2) if isinstance(row, int) else 512
        return {"row_tokens": row, "sampling": {"max_tokens": longest}}
