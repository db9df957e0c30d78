"""What an RL stage needs besides weights: prompts, rewards, an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.config import (
    DatasetSection,
    DistillSection,
    ModelSection,
    OnlinePreferenceSection,
    RLSection,
    SampledSection,
    SamplingSection,
)
from posttrain.data.chat import Renderer
from posttrain.data.format import prompt_is_text, prompt_messages
from posttrain.data.sources import Rows, each_row
from posttrain.data.tokenizer import Tokenizer
from posttrain.distill.teachers import TeacherSource
from posttrain.errors import ConfigError
from posttrain.losses.preference import KINDS
from posttrain.models.heads import CLASSIFIER
from posttrain.rl.algorithms import Algorithm, make_algorithm
from posttrain.rl.assemble import Shares
from posttrain.rl.reward_model import ModelReward
from posttrain.rl.rewards import Reward, Rubric, missing_arguments
from posttrain.rl.sampler import sampling_params
from posttrain.rl.teachers import shares_of
from posttrain.rl.types import Example
from posttrain.rollout.blocks import BLOCK, least_cache
from posttrain.stages.engine import EngineFactory, engine_of
from posttrain.stages.inputs import callable_of, rows_and_renderer
from posttrain.stages.pairs import PREFERENCE_LOSSES, make_loss
from posttrain.user_code import describe_error
from posttrain.weights.locate import local_or_hub, read_model_config


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What stages have that sample answers to prompts and score them."""

    section: SampledSection
    renderer: Renderer
    rows: Rows
    examples: Sequence[Example]
    eval_renderer: Renderer | None
    eval_examples: Sequence[Example]
    rubric: Rubric
    max_prompt_tokens: int
    make_engine: EngineFactory | None
    """None: the built-in one."""


@dataclass(frozen=True, kw_only=True)
class RLInputs(Scored):
    section: RLSection
    algorithm: Algorithm
    teachers: Sequence[TeacherSource]


@dataclass(frozen=True, kw_only=True)
class OnlineInputs(Scored):
    section: OnlinePreferenceSection
    loss: Any
    """A `JudgedLoss` on pairs and a reference."""
    share_prompts: bool


def prepare_scored(section: SampledSection, tokenizer: Tokenizer, base_dir: Path, shares: Shares | None) -> Scored:
    refuse_completions(section)
    check_token_ids({"sampling": section.sampling, "eval_sampling": section.eval_sampling}, tokenizer)
    room, answer = section.sequence_tokens, section.sampling.max_tokens
    limit = section.max_prompt_tokens or room - answer
    if limit + answer > room:
        raise ConfigError(f"max_prompt_tokens={limit} + sampling.max_tokens={answer} must fit {_room(section, room)}")
    rubric = rubric_of(section, base_dir)
    rows, renderer = rows_and_renderer(section.dataset, tokenizer, base_dir)
    _check_columns(rubric, rows.columns)
    examples = examples_of(rows, section.dataset, renderer, limit, rubric, shares)
    eval_examples: list[Example] = []
    eval_renderer = None
    if section.eval_dataset is not None:
        eval_rows, eval_renderer = rows_and_renderer(section.eval_dataset, tokenizer, base_dir)
        _check_columns(rubric, eval_rows.columns)
        eval_examples = examples_of(eval_rows, section.eval_dataset, eval_renderer, limit, rubric, shares)
    return Scored(
        section=section,
        renderer=renderer,
        rows=rows,
        examples=examples,
        eval_renderer=eval_renderer,
        eval_examples=eval_examples,
        rubric=rubric,
        max_prompt_tokens=limit,
        make_engine=engine_of(section.rollout, base_dir),
    )


def online_loss(section: OnlinePreferenceSection, base_dir: Path) -> Any:
    """ConfigError for a loss that does not compare two answers with a reference, or asks for what samples have not."""
    loss = make_loss(section.loss, PREFERENCE_LOSSES, lambda spec: callable_of(spec, "loss", base_dir))
    needs = loss.needs
    if needs.rows != "pairs" or not needs.reference or needs.prompts or needs.margins:
        raise ConfigError(
            f"loss: {section.loss!r} is not for online preference, which compares two samples against the start of "
            f"the stage, without margins and without a loss on prompts; use a kind of DPO: {', '.join(KINDS)}"
        )
    return loss


@dataclass(frozen=True, kw_only=True)
class PromptInputs:
    """Of a stage of distillation whose student samples."""

    examples: Sequence[Example]
    eval_examples: Sequence[Example]
    max_tokens: int
    """Of a prompt."""
    make_engine: EngineFactory | None
    """None: the built-in one."""


def prepare_prompts(
    section: DistillSection,
    source: tuple[Rows, Renderer],
    held_out: tuple[Rows, Renderer] | None,
    tokenizer: Tokenizer,
    base_dir: Path,
) -> PromptInputs:
    assert section.sampling is not None
    check_token_ids({"sampling": section.sampling}, tokenizer)
    limit, shares = section.row_tokens - section.sampling.max_tokens, shares_of(section)
    found: list[list[Example]] = [
        [] if data is None or one is None else examples_of(one[0], data, one[1], limit, Rubric([]), shares)
        for data, one in ((section.dataset, source), (section.eval_dataset, held_out))
    ]
    return PromptInputs(
        examples=found[0], eval_examples=found[1], max_tokens=limit, make_engine=engine_of(section.rollout, base_dir)
    )


MODEL_REWARD = "reward_model"
"""Name in metrics; of the second one with its number."""


def examples_of(
    rows: Rows,
    section: DatasetSection,
    renderer: Renderer,
    max_prompt_tokens: int,
    rubric: Rubric,
    shares: Shares | None,
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
            made = Example(index=index, row=row, messages=messages, length=length, plain=prompt_is_text(row, section))
            if shares is not None:
                shares(made)
            return made

    return list(each_row(rows, range(len(rows)), "prompts", example))


def check_token_ids(samplings: Mapping[str, SamplingSection | None], tokenizer: Tokenizer) -> None:
    """ConfigError for settings of sampling that no request may have, such as a token that there is not."""
    for name, sampling in samplings.items():
        if sampling is None:
            continue
        try:
            params = sampling_params(sampling, tokenizer, key=(0, 0))
            params.check_vocabulary(tokenizer.vocab_size)
        except ValueError as error:
            raise ConfigError(f"{name}.{str(error).removeprefix('sampling.')}") from error


def check_cache(section: SampledSection | DistillSection, row_shards: int) -> None:
    """ConfigError for `cache_tokens` that hold no sequence in one of the parts that `row_shards` devices make of it."""
    given = section.rollout.cache_tokens
    longest = section.sequence_tokens if isinstance(section, SampledSection) else section.row_tokens
    if given is not None and given < (least := row_shards * least_cache(longest)):
        parts = f", in each of {row_shards} parts of the mesh" if row_shards > 1 else ""
        raise ConfigError(
            f"rollout.cache_tokens={given} must be at least {least}: {_room(section, longest)} in whole blocks "
            f"of {BLOCK} and one block more{parts}"
        )


def _room(section: SampledSection | DistillSection, tokens: int) -> str:
    """What holds a sequence of so many tokens, in the words of the configuration."""
    return f"{'' if tokens == section.row_tokens else 'half of '}row_tokens={section.row_tokens}"


def check_rewards(section: SampledSection, base_dir: Path) -> None:
    """Check the rewards and the columns of an online stage without its rows."""
    refuse_completions(section)
    rubric_of(section, base_dir)


def refuse_completions(section: SampledSection) -> None:
    for name, dataset in (("dataset", section.dataset), ("eval_dataset", section.eval_dataset)):
        if dataset is not None and dataset.completion is not None:
            raise ConfigError(
                f"{name}.completion={dataset.completion!r}: this stage samples its completions; remove it "
                "(reward functions get every column of the dataset by its name)"
            )


def _check_columns(rubric: Rubric, columns: Sequence[str]) -> None:
    lines = [line for reward in rubric.rewards for line in missing_arguments(reward, columns)]
    if lines:
        raise ConfigError("\n".join(lines))


def rubric_of(section: SampledSection, base_dir: Path) -> Rubric:
    rewards: list[Reward] = []
    for item in section.rewards:
        if item.model is not None:
            number = sum(reward.name.startswith(MODEL_REWARD) for reward in rewards)
            name = f"{MODEL_REWARD}_{number + 1}" if number else MODEL_REWARD
            scorer = ModelReward(_classifier(item.model, base_dir), item.reduce, name)
            rewards.append(Reward(function=scorer, weight=item.weight, timeout_s=item.timeout_s))
            continue
        function = callable_of(item.fn, "rewards.fn", base_dir) if isinstance(item.fn, str) else item.fn
        if not callable(function):
            raise ConfigError(f"rewards.fn={item.fn!r} is not a function; name one as file.py:function")
        rewards.append(Reward(function=function, weight=item.weight, args=item.args, timeout_s=item.timeout_s))
    return Rubric(rewards)


def _classifier(path: str, base_dir: Path) -> str:
    """The folder or hub id of a reward model. ConfigError for another model."""
    model = read_model_config(ModelSection(path=path), base_dir, vocab_size=None)
    if model is not None and not model.scalar_head:
        raise ConfigError(
            f"rewards.model: {path} is no reward model; give a {CLASSIFIER} of one label, such as the model that a "
            "stage of kind reward_model leaves"
        )
    return local_or_hub(path, base_dir)


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
