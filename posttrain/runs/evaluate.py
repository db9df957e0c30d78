"""Evaluation of a model on prompts by reward functions: means with intervals over prompts, and paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from posttrain.config import DatasetSection, OnlineSection, RewardSection, RLSection, SamplingSection
from posttrain.config.train import MAX_NEW_TOKENS
from posttrain.config.yaml_file import load_recorded
from posttrain.data.pictures import written
from posttrain.errors import ConfigError
from posttrain.evaluation.at_k import interval_over_prompts, prompt_means
from posttrain.evaluation.rollouts import RolloutEvaluation, evaluate_prompts
from posttrain.generation import MAX_SLOTS, without_padding
from posttrain.mesh import single_device_mesh
from posttrain.reward.function import rewards_of
from posttrain.reward.rubric import Rubric, error_lines
from posttrain.rl.sampler import Sampler
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.trajectory import Group
from posttrain.runs.environment import versions
from posttrain.runs.finished import Generator, find_stage
from posttrain.runs.folder import CONFIG_NAME
from posttrain.runtime.event_loop import run_async
from posttrain.stages.inputs import rows_and_renderer
from posttrain.stages.prompts import examples_of
from posttrain.stages.table import stage_names
from posttrain.statistics import Interval, PairedDifference, count_rows, paired_difference, prompt_numbers

TOTAL = "reward"
"""Name of the weighted sum of several rewards."""
DECODE_STEPS = 32


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Sampling of an evaluation."""

    samples: int = 1
    """Samples per prompt."""
    sampling: SamplingSection
    seed: int = 0

    def within(self, context: int) -> EvaluationSettings:
        """Settings with the default length of answers for a model of this context."""
        return replace(self, sampling=self.sampling.at_most(min(MAX_NEW_TOKENS, context // 2)))


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """Rewards of a model's samples: of each function, and of several their weighted sum `reward`."""

    intervals: Mapping[str, Interval]
    """Mean over prompts with its 95 % interval; prompts are independent, rows and samples of one are not."""
    values: Mapping[str, Float[np.ndarray, " P"]]
    """Mean of each row; NaN where no sample has the reward."""
    rewards: Mapping[str, Float[np.ndarray, "P G"]]
    """Reward of each sample; NaN: the function does not apply, or has failed."""
    groups: Sequence[Group]
    """Samples of each row."""
    errors: Sequence[str]
    """Lines about functions that failed. Such samples are in no mean."""

    @property
    def prompts(self) -> list[str]:
        """Key of each row's prompt."""
        return [group[0].example.prompt_key for group in self.groups]

    def difference(self, other: Evaluation) -> dict[str, PairedDifference]:
        """Difference of `other` less this by reward, over the prompts with a value in both, and the p-value of none.

        ValueError unless both evaluate the same prompts.
        """
        if self.prompts != other.prompts:
            raise ValueError("difference: the evaluations are of different prompts; give both the same dataset")
        found = {}
        for name in self.values.keys() & other.values.keys():
            valid = ~np.isnan(self.values[name]) & ~np.isnan(other.values[name])
            units = prompt_numbers(self.prompts)[valid]
            if len(set(units.tolist())) > 1:
                found[name] = paired_difference(self.values[name][valid], other.values[name][valid], units)
        return {name: found[name] for name in self.values if name in found}

    def record(self) -> dict[str, Any]:
        """Convert to JSON: versions, intervals, and the prompt, the values and the first sample of each row."""
        return {
            "versions": versions(),
            "prompts": self.prompts,
            "intervals": {name: vars(interval) for name, interval in self.intervals.items()},
            "values": {name: [None if np.isnan(v) else float(v) for v in of] for name, of in self.values.items()},
            "errors": list(self.errors),
            "samples": [
                {"messages": written(group[0].answer.example.messages), "completion": group[0].shown}
                for group in self.groups
            ],
        }

    def __repr__(self) -> str:
        width = max(map(len, self.intervals), default=0)
        prompts = np.asarray(self.prompts)
        lines = [
            f"{name:<{width}}  {i.mean:.4g} [{i.low:.4g}, {i.high:.4g}] over "
            f"{count_rows(prompts[~np.isnan(self.values[name])].tolist())}"
            for name, i in self.intervals.items()
        ]
        lost = {name: int(np.isnan(of).sum()) for name, of in self.rewards.items()}
        lines += [
            f"{name}: {count} of {self.rewards[name].size} samples have none" for name, count in lost.items() if count
        ]
        return "\n".join([*lines, *self.errors])


def evaluate(
    generator: Generator, dataset: DatasetSection, rewards: Sequence[RewardSection], settings: EvaluationSettings
) -> Evaluation:
    """Sample each prompt of a dataset and score the samples. Prompts have the form that the model was trained on, where
    the dataset does not say another.

    ConfigError for prompts that do not fit, rewards without their columns, and samples of which none has a reward.
    """
    if settings.samples > 1 and settings.sampling.temperature == 0:
        raise ConfigError(f"evaluate: {settings.samples} samples of a prompt would be equal at temperature 0")
    tokenizer, limit = generator.tokenizer, generator.model.config.max_positions
    settings = settings.within(limit)
    longest = limit - settings.sampling.max_tokens
    if longest < 1:
        raise ConfigError(
            f"evaluate: max_tokens={settings.sampling.max_tokens} leaves no prompt of the context {limit}"
        )
    rows, renderer = rows_and_renderer(dataset, tokenizer)
    rubric = Rubric(rewards_of(rewards))
    examples, _ = examples_of(rows, dataset, renderer, longest, rubric, None, "error")
    count = len(examples) * settings.samples
    with ExitStack() as stack:
        stack.enter_context(rubric.running())
        engine = NativeEngine(
            without_padding(generator.model, tokenizer),
            slots=min(count, MAX_SLOTS),
            max_length=max(len(one.prompt_tokens) for one in examples) + settings.sampling.max_tokens,
            decode_steps=DECODE_STEPS,
            tokenizer_decode=tokenizer.decode,
            tokenizer=tokenizer,
        )
        stack.enter_context(closing(engine))
        rubric.load_models(single_device_mesh(), renderer, min(count, MAX_SLOTS))
        sampler = Sampler(
            engine=engine,
            renderer=renderer,
            sampling=settings.sampling,
            max_prompt_tokens=longest,
            seed=settings.seed,
        )
        return _evaluation(run_async(evaluate_prompts(sampler, rubric, examples, settings.samples, step=0)))


def _evaluation(found: RolloutEvaluation) -> Evaluation:
    parts = dict(found.rewards.parts_PG)
    rewards = parts if len(parts) == 1 else {TOTAL: found.rewards.total_PG, **parts}
    intervals = {}
    for name, values_PG in rewards.items():
        if not np.isnan(values_PG).all():
            intervals[name] = interval_over_prompts(values_PG, found.prompts_P)
    return Evaluation(
        intervals=intervals,
        values={name: prompt_means(values_PG) for name, values_PG in rewards.items()},
        rewards=rewards,
        groups=found.groups_P,
        errors=list(error_lines(found.rewards, found.groups_P)),
    )


def of_run(run: str) -> tuple[DatasetSection | None, Sequence[RewardSection], SamplingSection | None]:
    """Held-out dataset, rewards and sampling of a run's stage. Nothing of what is no run, and of a stage without
    rewards. ConfigError for a stage with an environment or an agent, whose conversations are not held here."""
    folder = Path(run).expanduser()
    if not any((place / CONFIG_NAME).is_file() for place in (folder, folder.resolve().parent)):
        return None, (), None
    output, name = find_stage(folder)
    config = load_recorded(output / CONFIG_NAME)
    section = config.stages[stage_names(config).index(name)]
    if not isinstance(section, OnlineSection):
        return section.eval_dataset, (), None
    if isinstance(section, RLSection) and section.converses:
        raise ConfigError(
            f"evaluate: {name} of {run} holds conversations (env, tools or agent), which are not held here; its own "
            "evaluations are in result.json"
        )
    # Every field is given: none is a default that another model would change.
    sampling = SamplingSection(**dict(section.held_out_sampling))
    return section.eval_dataset, section.rewards, sampling
