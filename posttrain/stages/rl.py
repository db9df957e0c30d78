"""Reinforcement learning with verifiable rewards: GRPO and its family on one colocated cluster."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from posttrain.cluster.scorers import FrozenModel
from posttrain.config import RLSection
from posttrain.data.pipeline import PromptBatches
from posttrain.distill.teachers import OutsideTeacher, TeacherSource, find_teachers, load_teacher, outside_teacher
from posttrain.metrics import Timer
from posttrain.rl.partial import PromptsAhead
from posttrain.rl.sampler import resumable
from posttrain.rl.step import StepResult, StepSettings, rl_step
from posttrain.rl.teachers import TeacherKL, distances, shares_of
from posttrain.stages.context import StageRun
from posttrain.stages.online import describe_steps, make_trainer, open_rollouts, train
from posttrain.stages.prepared import Prepared
from posttrain.stages.prompts import RLInputs, algorithm_of, check_rewards, prepare_scored


def prepare(section: RLSection, prepared: Prepared) -> tuple[RLInputs, list[str]]:
    """Load prompts and rewards, and find the teachers. Also notes about the teachers."""
    tokenizer, base_dir = prepared.require_tokenizer(), prepared.base_dir
    teachers, notes = find_teachers(section, tokenizer, base_dir)
    scored = prepare_scored(section, tokenizer, base_dir, shares_of(section))
    algorithm = algorithm_of(section, base_dir)
    return RLInputs(algorithm=algorithm, teachers=teachers, **vars(scored)), notes


def check_offline(section: RLSection, base_dir: Path) -> None:
    """Check all that needs neither tokenizer nor rows."""
    check_rewards(section, base_dir)
    algorithm_of(section, base_dir)
    find_teachers(section, None, base_dir)


def describe(section: RLSection, inputs: RLInputs | None, shards: int) -> str:
    """Summarise the stage in one line."""
    return describe_steps(section, inputs)


def run(stage: StageRun, inputs: RLInputs) -> None:
    """Train one RL stage to its end, from its newest checkpoint if there is one."""
    section, algorithm = inputs.section, inputs.algorithm
    if not section.rewards:
        stage = replace(stage, kind="rl_distill")
    trainer = make_trainer(stage, section, algorithm.loss)
    teachers = _load_teachers(stage, inputs)
    keep_reference = algorithm.loss.kl_coef > 0
    rollouts = open_rollouts(stage, inputs, trainer, keep_reference=keep_reference, teachers=teachers)
    cluster, sampler, rubric = rollouts.cluster, rollouts.sampler, inputs.rubric
    prompts, settings = _prompts(inputs, stage.seed), _step_settings(section)
    if section.prompts_ahead:
        resumable(cluster.engine)

    async def step(timer: Timer) -> StepResult:
        examples_P = [inputs.examples[index] for index in next(prompts)]
        result = await rl_step(cluster, algorithm, rubric, sampler, examples_P, settings, timer, prompts.left)
        prompts.left = result.left
        return result

    measured = None
    if settings.teaching is not None:
        measured = partial(distances, teachers, shares=settings.teaching.shares, row_tokens=settings.row_tokens)
    train(stage, rollouts, prompts, step, measured)


def _prompts(inputs: RLInputs, seed: int) -> PromptsAhead:
    """Prompts of each step, and the groups that the step before has left unfinished."""
    section = inputs.section
    one_by_one = PromptBatches(section.dataset, inputs.rows, prompts_per_step=1, seed=seed)
    return PromptsAhead(one_by_one, inputs.examples, section.prompts_per_step + section.prompts_ahead)


def _step_settings(section: RLSection) -> StepSettings:
    return StepSettings(
        group_size=section.group_size,
        row_tokens=section.row_tokens,
        num_rows=section.step_rows,
        recompute_old_logps=section.recompute_old_logps,
        teaching=TeacherKL(coef=section.teacher_coef, shares=shares_of(section)) if section.teachers else None,
        enough=section.prompts_per_step if section.prompts_ahead else None,
    )


def _load_teachers(stage: StageRun, inputs: RLInputs) -> list[OutsideTeacher]:
    """On the student's mesh, on their own or at their servers: they score what was sampled, before the step."""
    section, temperature = inputs.section, inputs.section.sampling.temperature
    rows = section.micro_batch_rows or -(-section.step_rows // 8)

    def load(source: TeacherSource) -> OutsideTeacher:
        if source.section.outside:
            return outside_teacher(source, stage.model, stage.tokenizer, section, temperature)
        model = load_teacher(source, stage.model, stage.tokenizer, stage.mesh)
        return FrozenModel(model, stage.mesh, temperature=temperature, rows=rows)

    return [load(source) for source in inputs.teachers]
