"""What an RL stage needs besides weights: prompts, rewards, an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.config import ConfigError, DatasetSection, RLSection
from posttrain.data.chat import Renderer
from posttrain.data.format import prompt_is_text, prompt_messages
from posttrain.data.sources import Rows
from posttrain.data.tokenizer import Tokenizer
from posttrain.imports import describe_error
from posttrain.recipes.inputs import callable_of, each_row, rows_and_renderer
from posttrain.rl.algorithms import Algorithm, make_algorithm
from posttrain.rl.rewards import Reward, Rubric, missing_arguments
from posttrain.rl.types import Example


@dataclass(frozen=True, kw_only=True)
class RLInputs:
    section: RLSection
    renderer: Renderer
    rows: Rows
    examples: Sequence[Example]
    eval_renderer: Renderer | None
    eval_examples: Sequence[Example]
    rubric: Rubric
    algorithm: Algorithm
    max_prompt_tokens: int


def prepare_rl(section: RLSection, tokenizer: Tokenizer, base_dir: Path) -> RLInputs:
    refuse_completions(section)
    limit = section.max_prompt_tokens or section.row_tokens - section.sampling.max_tokens
    if limit + section.sampling.max_tokens > section.row_tokens:
        raise ConfigError(
            f"max_prompt_tokens={limit} + sampling.max_tokens={section.sampling.max_tokens} must fit "
            f"row_tokens={section.row_tokens}"
        )
    rubric = rubric_of(section, base_dir)
    rows, renderer = rows_and_renderer(section.dataset, tokenizer, base_dir)
    _check_columns(rubric, rows.columns)
    examples = _examples(rows, section.dataset, renderer, limit, rubric)
    eval_examples: list[Example] = []
    eval_renderer = None
    if section.eval_dataset is not None:
        eval_rows, eval_renderer = rows_and_renderer(section.eval_dataset, tokenizer, base_dir)
        _check_columns(rubric, eval_rows.columns)
        eval_examples = _examples(eval_rows, section.eval_dataset, eval_renderer, limit, rubric)
    return RLInputs(
        section=section,
        renderer=renderer,
        rows=rows,
        examples=examples,
        eval_renderer=eval_renderer,
        eval_examples=eval_examples,
        rubric=rubric,
        algorithm=algorithm_of(section, base_dir),
        max_prompt_tokens=limit,
    )


def _examples(
    rows: Rows, section: DatasetSection, renderer: Renderer, max_prompt_tokens: int, rubric: Rubric
) -> list[Example]:
    """All prompts, each checked: what is wrong with row 5,000 is said before the first step."""
    complete = {rows.columns}

    def example(index: int) -> Example:
        with rows.named(index) as row:
            if tuple(row) not in complete:
                _check_columns(rubric, tuple(row))
                complete.add(tuple(row))
            messages = prompt_messages(row, section)
            length = len(renderer.prompt(messages))
            if length > max_prompt_tokens:
                raise ConfigError(
                    f"its prompt has {length} tokens, max_prompt_tokens={max_prompt_tokens}; "
                    "raise row_tokens and max_prompt_tokens, or leave the row out"
                )
            return Example(index=index, row=row, messages=messages, plain=prompt_is_text(row, section))

    return list(each_row(rows, range(len(rows)), "prompts", example))


def refuse_completions(section: RLSection) -> None:
    for name, dataset in (("dataset", section.dataset), ("eval_dataset", section.eval_dataset)):
        if dataset is not None and dataset.completion is not None:
            raise ConfigError(
                f"{name}.completion={dataset.completion!r}: RL samples its completions; remove it "
                "(reward functions get every column of the dataset by its name)"
            )


def _check_columns(rubric: Rubric, columns: Sequence[str]) -> None:
    lines = [line for reward in rubric.rewards for line in missing_arguments(reward, columns)]
    if lines:
        raise ConfigError("\n".join(lines))


def rubric_of(section: RLSection, base_dir: Path) -> Rubric:
    rewards = []
    for item in section.rewards:
        function = callable_of(item.fn, "rewards.fn", base_dir) if isinstance(item.fn, str) else item.fn
        if not callable(function):
            raise ConfigError(f"rewards.fn={item.fn!r} is not a function; name one as file.py:function")
        rewards.append(Reward(function=function, weight=item.weight, args=item.args, timeout_s=item.timeout_s))
    return Rubric(rewards)


def _probe(advantage: Callable[..., Any], name: str, group_size: int) -> None:
    """ConfigError where a user's function does not take rewards [P, G], or does not return as many advantages."""
    rewards_PG = np.arange(2 * group_size, dtype=np.float32).reshape(2, group_size) % 3
    try:
        made = np.asarray(advantage(rewards_PG.copy()), np.float32)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"advantage: {name}(rewards_PG) raised {describe_error(error)}") from error
    if made.shape != rewards_PG.shape:
        raise ConfigError(
            f"advantage: {name} must return an advantage for each of the rewards [P, G] = {rewards_PG.shape}; "
            f"it returned the shape {made.shape}"
        )


def algorithm_of(section: RLSection, base_dir: Path) -> Algorithm:
    advantage = None
    if section.advantage is not None:
        advantage = callable_of(section.advantage, "advantage", base_dir)
        _probe(advantage, section.advantage, section.group_size)
    return make_algorithm(
        section.algorithm,
        max_tokens=section.sampling.max_tokens,
        kl_coef=section.kl_coef,
        clip_low=section.clip_low,
        clip_high=section.clip_high,
        advantage=advantage,
    )
