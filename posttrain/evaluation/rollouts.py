"""Evaluation on held-out examples, with a 95 % interval that treats prompts, not samples, as independent."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float, Int

from posttrain.config import EvaluateSection
from posttrain.data.messages import shown_text
from posttrain.errors import ConfigError
from posttrain.evaluation.at_k import (
    Record,
    interval_over_prompts,
    intervals_at_k,
    prefix_of,
    prompt_means,
    values_at_k,
)
from posttrain.reward.rubric import Rubric, error_lines
from posttrain.reward.types import Rewards
from posttrain.rl.collector import exchanged, own_share
from posttrain.rl.sampler import EVALUATION, IssuedGroup, Sampler, collect
from posttrain.rollout.trajectory import Example, Group
from posttrain.statistics import Interval, prompt_numbers
from posttrain.tracking.console import progress_bar


@dataclass(frozen=True, kw_only=True)
class RolloutEvaluation:
    groups_P: Sequence[Group]
    rewards: Rewards
    interval: Interval | None
    """Confidence interval of the mean total reward; None without rewards."""
    distances_PG: Float[np.ndarray, "P G"] | None = None
    """Mean of log(student / teacher) over the tokens of each sample; None without teachers."""
    at_k: Mapping[str, Float[np.ndarray, " P"]] = field(default_factory=dict)
    """Values of each prompt by name, such as `pass@4`, see `values_at_k`."""
    at_k_intervals: Mapping[str, Interval] = field(default_factory=dict)

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        samples = [s for group in self.groups_P for s in group]
        parts = {
            f"rewards/{name}/mean": interval_over_prompts(part, self.prompts_P).mean
            for name, part in self.rewards.parts_PG.items()
            if not np.isnan(part).all()
        }
        named = {"reward": self.interval, "distill/kl": self.distance, **self.at_k_intervals}
        intervals = {
            f"{name}{end}": value
            for name, interval in named.items()
            if interval is not None
            for end, value in (("", interval.mean), ("_low", interval.low), ("_high", interval.high))
        }
        metrics = {
            **intervals,
            "completions/mean_length": float(np.mean([s.num_sampled for s in samples])),
            "completions/clipped_ratio": float(np.mean([s.is_cut for s in samples])),
            **parts,
        }
        return {f"{prefix}/{name}": value for name, value in metrics.items()}

    @property
    def prompts(self) -> list[str]:
        """Key of each row's prompt: rows of one prompt are one unit of intervals and tests."""
        return [group[0].example.prompt_key for group in self.groups_P]

    @property
    def prompts_P(self) -> Int[np.ndarray, " P"]:
        """Number of each row's prompt."""
        return prompt_numbers(self.prompts)

    @property
    def distance(self) -> Interval | None:
        """The reverse KL from the teachers per token, on the student's own samples."""
        return None if self.distances_PG is None else interval_over_prompts(self.distances_PG, self.prompts_P)


async def evaluate_prompts(
    sampler: Sampler,
    rubric: Rubric,
    examples: Sequence[Example],
    group_size: int = 1,
    *,
    step: int,
    distances: Callable[[Sequence[Group]], Float[np.ndarray, "P G"]] | None = None,
) -> RolloutEvaluation:
    """`group_size` samples of every example, scored. Samples without a valid reward are left out of the mean.

    `step`: steps that the trainer has done, which rewards are told; 0 without one. `distances`: of the samples from the
    teachers.
    """
    with progress_bar(f"evaluating {len(examples)} held-out prompts", len(examples) * group_size) as advance:
        # The same numbers in every evaluation of a run: it draws the same random numbers.
        groups = [IssuedGroup(number=n, example=example, version=0) for n, example in enumerate(examples)]
        own_P = await collect(replace(sampler, stream=EVALUATION), own_share(groups), group_size, advance)
    with progress_bar("scoring the held-out samples", len(rubric.rewards)) as advance:
        own = await rubric.score(own_P, advance, step) if own_P else None
    groups_P, rewards = exchanged(own_P, own, groups)
    distances_PG = None if distances is None else distances(groups_P)
    if not rubric.rewards:
        return RolloutEvaluation(groups_P=groups_P, rewards=rewards, interval=None, distances_PG=distances_PG)
    valid = ~np.isnan(rewards.total_PG)
    if not valid.any():
        why = "; ".join(error_lines(rewards, groups_P)) or "the functions return None; see that they apply to its rows"
        raise ConfigError(f"evaluation: no sample of eval_dataset has a valid reward: {why}")
    found = RolloutEvaluation(groups_P=groups_P, rewards=rewards, interval=None, distances_PG=distances_PG)
    return replace(found, interval=interval_over_prompts(rewards.total_PG, found.prompts_P))


def with_at_k(found: RolloutEvaluation, section: EvaluateSection, pass_above: float) -> RolloutEvaluation:
    """Add avg@k, pass@k and maj@k. ConfigError if no reward function logs the answers."""
    rewards = found.rewards
    rewards_PG = rewards.total_PG if section.reward is None else rewards.parts_PG[section.reward]
    answers_PG = _answers(found, section.answer) if "majority" in section.report else None
    values = values_at_k(rewards_PG, answers_PG, section, pass_above)
    return replace(found, at_k=values, at_k_intervals=intervals_at_k(values, rewards_PG, found.prompts_P))


def _answers(found: RolloutEvaluation, name: str | None) -> list[list[Hashable]]:
    if name is None:
        return [[sample.answer.text.strip() for sample in group] for group in found.groups_P]
    if name not in found.rewards.extras:
        raise ConfigError(
            f"evaluate.answer: no reward function has called log_extra({name!r}, answers); let it log one for each "
            "completion, or remove the option"
        )
    column, size = found.rewards.extras[name], len(found.groups_P[0])
    return [list(column[start : start + size]) for start in range(0, len(column), size)]


def record_of(evaluations: Mapping[str | None, RolloutEvaluation]) -> Record:
    """JSON object of evaluations by name of the dataset: that without a name, with the metrics of all, and under `sets`
    the others."""
    metrics: dict[str, float] = {}
    for name, evaluation in evaluations.items():
        metrics |= evaluation.metrics(prefix_of(name))
    sets = {name: _of_set(evaluation) for name, evaluation in evaluations.items() if name is not None}
    return {**_of_set(evaluations[None]), "metrics": metrics, "sets": sets}


def _of_set(found: RolloutEvaluation) -> Record:
    """Confidence interval of the reward, or of the KL without rewards, over `n` prompts; the prompt, the values and the
    first sample of each row."""
    if found.interval is not None:
        measure, metric, interval, values_PG = "reward", "reward", found.interval, found.rewards.total_PG
    else:
        assert found.distance is not None and found.distances_PG is not None
        measure, metric, interval, values_PG = "reverse KL", "distill/kl", found.distance, found.distances_PG
    values_P = prompt_means(values_PG)
    samples = [
        {
            "prompt": "".join(shown_text(message) for message in group[0].answer.example.messages),
            "completion": group[0].shown,
            measure: value,
        }
        for group, value in zip(found.groups_P, _numbers(values_P), strict=True)
    ]
    return {
        "measure": measure,
        "mean": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "n": interval.n,
        "prompts": found.prompts,
        "values": {name: _numbers(values) for name, values in {metric: values_P, **found.at_k}.items()},
        "samples": samples,
    }


def _numbers(values: Float[np.ndarray, " P"]) -> Sequence[float | None]:
    return [None if math.isnan(value) else float(value) for value in values]
