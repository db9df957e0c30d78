"""Samples of held-out prompts in a stage that trains on given answers, and what functions of the user say of them."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np

from posttrain.config import DatasetSection, RolloutSection, SFTSection
from posttrain.data.chat import Renderer
from posttrain.data.format import Conversation, training_conversation
from posttrain.data.messages import shown_text
from posttrain.data.sources import Rows, each_row, with_all_columns
from posttrain.errors import ConfigError
from posttrain.evaluation.at_k import interval_over_prompts
from posttrain.evaluation.rollouts import RolloutEvaluation
from posttrain.metrics import Sample
from posttrain.reward.function import reward_notes, rewards_of
from posttrain.reward.keywords import accepted
from posttrain.reward.rubric import Rubric, error_lines
from posttrain.rl.sampler import EVALUATION, IssuedGroup, Sampler, collect
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.trajectory import Example
from posttrain.runtime.event_loop import run_async
from posttrain.stages.context import StageRun, Training
from posttrain.stages.inputs import Prepared, rows_and_renderer
from posttrain.stages.prompts import check_columns, check_token_ids
from posttrain.tracking.console import console, printable, progress_bar
from posttrain.train.loop import crosses
from posttrain.train.trainer import Trainer

MAX_SLOTS = 64
"""Most samples that are generated at once."""
PREFIX = "samples"
"""Beginning of the names of metrics."""


@dataclass(frozen=True, kw_only=True)
class HeldOutPrompts:
    """Prompts that a stage samples between its steps, and the functions that score the samples."""

    renderer: Renderer
    examples: Sequence[Example]
    rubric: Rubric


def check_rewards(section: SFTSection) -> Rubric:
    """Functions that score the samples. ConfigError for one that cannot be imported, and for equal names."""
    return Rubric(rewards_of(section.metrics))


def columns_read(section: SFTSection) -> frozenset[str] | None:
    """Names of the arguments that the functions take, of which columns are some; None: all columns."""
    names = [accepted(reward.function) for reward in check_rewards(section).rewards]
    return None if None in names else frozenset().union(*(one for one in names if one is not None))


def prepare_samples(section: SFTSection, prepared: Prepared) -> tuple[HeldOutPrompts, list[str]]:
    """Read the prompts. ConfigError for rows without a prompt or with pictures, for prompts that leave no room, and for
    functions whose columns are missing. Also returns notes."""
    assert section.eval_dataset is not None
    sampling, rubric = section.held_out_sampling, check_rewards(section)
    check_token_ids({"eval_sampling": sampling}, prepared.tokenizer)
    given = section.eval_dataset.limit
    first = section.num_samples if given is None else min(given, section.num_samples)
    dataset = section.eval_dataset.model_copy(update={"limit": first})
    rows, renderer = rows_and_renderer(dataset, prepared.tokenizer)
    check_columns(rubric, rows.columns)
    room = section.row_tokens - sampling.max_tokens
    examples = list(each_row(rows, range(len(rows)), "prompts", lambda index: _example(rows, index, dataset, renderer)))
    for one in examples:
        if len(one.prompt_tokens) > room:
            raise ConfigError(
                f"samples_every: the prompt of row {rows.start + one.index} of {rows.name} has "
                f"{len(one.prompt_tokens)} tokens, and row_tokens={section.row_tokens} leaves {room} beside "
                f"eval_sampling.max_tokens={sampling.max_tokens}; raise row_tokens, or lower max_tokens"
            )
    filled = with_all_columns([one.row for one in examples])
    examples = [dataclasses.replace(one, row=row) for one, row in zip(examples, filled, strict=True)]
    return HeldOutPrompts(renderer=renderer, examples=examples, rubric=rubric), reward_notes(rubric.rewards)


def _example(rows: Rows, index: int, dataset: DatasetSection, renderer: Renderer) -> Example:
    """Prompt of a row: what stands before its last answer."""
    with rows.named(index) as row:
        said: Conversation = training_conversation(row, dataset, renderer)
        messages = [*said.prompt, *said.answer]
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        before = messages[: answers[-1]] if answers else []
        if not before:
            raise ConfigError(
                "samples_every: the row has no prompt before an answer; give messages, or prompt and completion"
            )
        tokens, images = renderer.prompt_with_images(before, said.tools)
        if images is not None:
            raise ConfigError(
                "samples_every: prompts with pictures are sampled by RL and by posttrain evaluate, not here; remove "
                "samples_every"
            )
        plain = isinstance(row.get("prompt"), str) or dataset.prompt is not None
        return Example(
            index=index,
            row=row,
            messages=before,
            prompt_tokens=array("i", tokens),
            plain=plain,
            tools=said.tools,
        )


class HeldOutSamples:
    """Samples of a stage's held-out prompts, by its present weights."""

    def __init__(self, stage: StageRun, section: SFTSection, prompts: HeldOutPrompts, trainer: Trainer):
        self._section, self._prompts, self._trainer = section, prompts, trainer
        longest = max(len(one.prompt_tokens) for one in prompts.examples)
        # The programs are built at the first samples; between them the cache of keys and values has no memory.
        self._engine = NativeEngine.of(
            trainer.model,
            stage.tokenizer,
            RolloutSection(),
            slots=min(len(prompts.examples), MAX_SLOTS),
            max_length=longest + section.held_out_sampling.max_tokens,
        )
        self._sampler = Sampler(
            engine=self._engine,
            renderer=prompts.renderer,
            sampling=section.held_out_sampling,
            max_prompt_tokens=longest,
            seed=stage.seed,
        )

    @classmethod
    @contextmanager
    def running(
        cls, stage: StageRun, section: SFTSection, prompts: HeldOutPrompts, trainer: Trainer
    ) -> Iterator[HeldOutSamples]:
        """Keep the engine and the processes of functions for the duration of a stage."""
        samples = cls(stage, section, prompts, trainer)
        with prompts.rubric.running(), closing(samples._engine):
            yield samples

    def before(self, training: Training) -> None:
        """Sample the model at the start of the stage, unless a checkpoint was resumed from."""
        if self._trainer.step_number == 0:
            training.write_samples(self._draw)

    def after(self, training: Training, step: int) -> None:
        """Sample after a step, if it is one of those of `samples_every`, or the last one."""
        assert self._section.samples_every is not None
        if crosses(step - 1, step, self._section.samples_every) or step == self._section.steps:
            training.write_samples(self._draw)

    def _draw(self) -> tuple[list[Sample], Mapping[str, float]]:
        step = self._trainer.step_number
        self._engine.update_weights(self._trainer.model, step)
        found = run_async(self._scored(step))
        self._engine.release_cache()
        self._engine.forget_prompts()
        for line in error_lines(found.rewards, found.groups_P):
            text = f"samples after step {step}: {line}"
            console().print(printable(text, console().encoding), markup=False, soft_wrap=True)
        return self._samples(found), self._metrics(found)

    async def _scored(self, step: int) -> RolloutEvaluation:
        """One sample of each prompt, scored. A function without a value for any sample ends no training."""
        examples, rubric = self._prompts.examples, self._prompts.rubric
        # The same random numbers each time, and other ones than those of any training sample.
        groups = [IssuedGroup(number=n, example=example, version=0) for n, example in enumerate(examples)]
        with progress_bar(f"sampling {len(examples)} held-out prompts", len(examples)) as advance:
            groups_P = await collect(dataclasses.replace(self._sampler, stream=EVALUATION), groups, 1, advance)
        rewards = await rubric.score(groups_P, step=step)
        return RolloutEvaluation(groups_P=groups_P, rewards=rewards, interval=None)

    def _metrics(self, found: RolloutEvaluation) -> dict[str, float]:
        """Means over the samples: lengths, values of functions with intervals, what these gave to `log_metric`."""
        metrics = {name: value for name, value in found.metrics(PREFIX).items() if "/completions/" in name}
        for name, values_PG in found.rewards.parts_PG.items():
            if not np.isnan(values_PG).all():
                interval = interval_over_prompts(values_PG, found.prompts_P)
                ends = {"": interval.mean, "_low": interval.low, "_high": interval.high}
                metrics |= {f"{PREFIX}/{name}/mean{end}": value for end, value in ends.items()}
        logged = {name.removeprefix("rewards/"): mean.value() for name, mean in found.rewards.metrics.items()}
        return metrics | {f"{PREFIX}/{name}": value for name, value in logged.items()}

    def _samples(self, found: RolloutEvaluation) -> list[Sample]:
        rewards, scored = found.rewards, bool(self._prompts.rubric.rewards)
        return [
            Sample(
                prompt="".join(shown_text(message) for message in group[0].answer.example.messages),
                completion=group[0].shown,
                reward=_number(float(rewards.total_PG[p, 0])) if scored else None,
                rewards={name: _number(float(part[p, 0])) for name, part in rewards.parts_PG.items()},
                advantage=None,
                stop=group[0].stop,
                extra={name: column[p] for name, column in rewards.extras.items()},
            )
            for p, group in enumerate(found.groups_P)
        ]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
