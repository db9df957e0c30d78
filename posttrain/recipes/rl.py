"""Reinforcement learning with verifiable rewards: GRPO and its family on one colocated cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np

from posttrain.config import RLSection, SamplingSection
from posttrain.console import console, printable
from posttrain.data.pipeline import PromptBatches
from posttrain.losses.router import RouterLoss
from posttrain.metrics import Sample, Timer, tables, to_host
from posttrain.optim import make_optimizer
from posttrain.recipes.prepare import rows_per_step
from posttrain.recipes.prepare_rl import RLInputs
from posttrain.recipes.python import PythonRun
from posttrain.recipes.stage import HeldOut, StageRun
from posttrain.rl.aio import run_async
from posttrain.rl.cluster import Cluster
from posttrain.rl.collect import Sampler
from posttrain.rl.evaluate import Evaluation, evaluate
from posttrain.rl.loop import RewardWatch, StepResult, StepSettings, check_agreement, rl_step
from posttrain.rl.rewards import error_lines
from posttrain.rl.types import Group, Rewards
from posttrain.rollout.native import NativeEngine
from posttrain.trainer import Trainer

NUM_SHOWN = 6
"""Samples in a table."""
STEPS_WITHOUT_REWARD = 3
"""So many in a row end a run."""


def run_rl(stage: StageRun, inputs: RLInputs) -> None:
    """Train one RL stage to its end, from its newest checkpoint if there is one."""
    run = _RLRun(stage, inputs)
    section = inputs.section
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
            return {**metrics, **run.engine.metrics(), **timer.metrics(), **tables(outcome.metrics)}

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
        self.engine = NativeEngine(
            self.trainer.model,
            slots=section.rollout.slots or samples,
            max_length=section.row_tokens,
            decode_steps=section.rollout.decode_steps,
            tokenizer_decode=stage.tokenizer.decode,
            version=0,
            record_routing=section.rollout.record_routing,
            quantize=section.rollout.quantize,
            merge_lora=section.rollout.merge_lora,
            cache_tokens=section.rollout.cache_tokens,
        )
        self.cluster = Cluster(self.trainer, self.engine, keep_reference=inputs.algorithm.loss.kl_coef > 0)
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
        if section.rollout.warm_up:
            samplers = [self.sampler, self._eval_sampler()] if inputs.eval_examples else [self.sampler]
            self.engine.warm_up([sampler.params(0, 0, 0) for sampler in samplers])
        self.settings = StepSettings(
            group_size=section.group_size,
            row_tokens=section.row_tokens,
            num_rows=samples,
            recompute_old_logps=section.recompute_old_logps,
        )

    def step(self, timer: Timer) -> StepResult:
        examples = [self.inputs.examples[index] for index in next(self.prompts)]
        inputs = self.inputs
        outcome = run_async(
            rl_step(self.cluster, inputs.algorithm, inputs.rubric, self.sampler, examples, self.settings, timer)
        )
        _print_errors(f"step {self.trainer.step_number}", outcome.rewards, outcome.groups_P)
        return outcome

    def evaluate(self) -> Evaluation:
        found = run_async(evaluate(self._eval_sampler(), self.inputs.rubric, self.inputs.eval_examples))
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
    """An evaluation as JSON: interval, metrics, and every sample."""
    interval = evaluation.interval
    samples = [
        {
            "prompt": "".join(str(m["content"]) for m in group[0].example.messages),
            "completion": group[0].text,
            "reward": _number(evaluation.rewards.total_PG[p, 0]),
        }
        for p, group in enumerate(evaluation.groups_P)
    ]
    return {
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
