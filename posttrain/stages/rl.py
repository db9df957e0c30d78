"""Reinforcement learning with verifiable rewards: GRPO and its family on one colocated cluster."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from posttrain.api import SampledPythonRun
from posttrain.cluster.scorers import FrozenModel
from posttrain.config import RLSection
from posttrain.data.pipeline import PromptBatches
from posttrain.distill.teachers import OutsideTeacher, TeacherSource, load_teacher, outside_teacher, shares_of
from posttrain.metrics import Timer
from posttrain.rl.partial import PromptsAhead
from posttrain.rl.sampler import resumable
from posttrain.rl.step import StepResult, StepSettings, rl_step
from posttrain.rl.teachers import Teaching, distances
from posttrain.rl.types import Example
from posttrain.stages.context import StageRun
from posttrain.stages.prompts import RLInputs
from posttrain.stages.sampled import Distances, PromptSource, SampledRun, make_trainer, train


def run_rl(stage: StageRun, inputs: RLInputs) -> None:
    """Train one RL stage to its end, from its newest checkpoint if there is one."""
    if not inputs.section.rewards:
        stage = replace(stage, kind="rl_distill")
    with inputs.rubric.running():
        train(stage, _RLRun(stage, inputs))


class _RLRun(SampledRun):
    """With an algorithm, and teachers where there are any."""

    def __init__(self, stage: StageRun, inputs: RLInputs):
        section, loss = inputs.section, inputs.algorithm.loss
        trainer = make_trainer(stage, section, loss)
        self.teachers = _load_teachers(stage, inputs)
        super().__init__(stage, inputs, trainer, keep_reference=loss.kl_coef > 0, teachers=self.teachers)
        self.algorithm = inputs.algorithm
        self.settings = StepSettings(
            group_size=section.group_size,
            row_tokens=section.row_tokens,
            num_rows=section.step_rows,
            recompute_old_logps=section.recompute_old_logps,
            teaching=Teaching(coef=section.teacher_coef, shares=shares_of(section)) if section.teachers else None,
            enough=section.prompts_per_step if section.prompts_ahead else None,
        )

    def new_prompts(self, seed: int) -> PromptSource:
        section = self.scored.section
        assert isinstance(section, RLSection)
        if not section.prompts_ahead:
            return super().new_prompts(seed)
        resumable(self.engine)
        one_by_one = PromptBatches(section.dataset, self.scored.rows, prompts_per_step=1, seed=seed)
        return PromptsAhead(one_by_one, self.scored.examples, section.prompts_per_step + section.prompts_ahead)

    def learn(self, examples_P: Sequence[Example], timer: Timer) -> Coroutine[Any, Any, StepResult]:
        left = self.prompts.left if isinstance(self.prompts, PromptsAhead) else ()
        return rl_step(
            self.cluster, self.algorithm, self.scored.rubric, self.sampler, examples_P, self.settings, timer, left
        )

    def step(self, timer: Timer) -> StepResult:
        outcome = super().step(timer)
        if isinstance(self.prompts, PromptsAhead):
            self.prompts.left = outcome.left
        return outcome

    def distances(self) -> Distances | None:
        teaching = self.settings.teaching
        if teaching is None:
            return None
        return partial(distances, self.teachers, shares=teaching.shares, row_tokens=self.settings.row_tokens)


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


class RL(SampledPythonRun):
    """Reinforcement learning from Python: `pt.RL(model="path", dataset="data.jsonl", rewards=[correct]).fit()`.

    Every field of `posttrain.config.RLSection` is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "rl"
    defaults: ClassVar[Mapping[str, Any]] = {**SampledPythonRun.defaults, "group_size": 8}
    sequences = 1
