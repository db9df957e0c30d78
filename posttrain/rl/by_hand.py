"""Building blocks of an RL step with few arguments, for loops written by hand: examples, samples, scores, batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float

from posttrain.batch import Batch
from posttrain.config import DatasetSection, SamplingSection
from posttrain.config.locator import Locator
from posttrain.data.chat import Renderer
from posttrain.data.format import prompt_conversation, prompt_is_text, use_chat
from posttrain.data.sources import with_all_columns
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.reward.function import Reward
from posttrain.reward.rubric import Rubric
from posttrain.reward.types import RewardFunction, Rewards
from posttrain.rl.assemble import assemble
from posttrain.rl.sampler import IssuedGroup, Sampler, collect
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.trajectory import Example, Group
from posttrain.runtime.event_loop import run_async


def make_examples(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    prompt: str | None = None,
    system: str | None = None,
    chat: bool | None = None,
) -> list[Example]:
    """Tokenise the prompts of rows. `prompt`, `system`, `chat`: templates and chat format as in `DatasetSection`."""
    section = DatasetSection(path=Locator("rows"), prompt=prompt, system=system, chat=chat)
    renderer = Renderer(tokenizer, chat=use_chat(section, tokenizer, tuple(rows[0])))

    def example(index: int, row: Mapping[str, Any], filled: Mapping[str, Any]) -> Example:
        messages, _, tools = prompt_conversation(row, section, renderer)
        tokens, images = renderer.prompt_with_images(messages, tools)
        return Example(
            index=index,
            row=filled,
            messages=messages,
            prompt_tokens=tokens,
            plain=prompt_is_text(row, section),
            images=images,
            tools=tools,
        )

    return [example(*one) for one in zip(range(len(rows)), rows, with_all_columns(rows), strict=True)]


def make_sampler(
    engine: NativeEngine, tokenizer: Tokenizer, *, max_tokens: int, temperature: float = 1.0, seed: int = 0
) -> Sampler:
    """Make the sampler of an engine, with plain sampling of at most `max_tokens` tokens at this temperature."""
    return Sampler(
        engine=engine,
        renderer=Renderer(tokenizer, chat=False),
        sampling=SamplingSection(max_tokens=max_tokens, temperature=temperature),
        max_prompt_tokens=engine.max_length - max_tokens,
        seed=seed,
    )


def sample(sampler: Sampler, examples: Sequence[Example], group_size: int, step: int) -> list[Group]:
    """Sample a group of completions for each example. `step`: number from 0, which fixes the random keys."""
    first = step * len(examples)
    issued = [IssuedGroup(number=first + i, example=one, version=step) for i, one in enumerate(examples)]
    temperature = sampler.sampling.temperature
    groups = run_async(collect(sampler, issued, group_size))
    return [[replace(one, temperature=temperature) for one in group] for group in groups]


def make_rubric(*functions: RewardFunction, timeout_s: float = 60.0) -> Rubric:
    """Make a rubric of reward functions with weight 1, which run in threads of this process."""
    return Rubric([Reward(function=function, weight=1.0, timeout_s=timeout_s) for function in functions])


def score(rubric: Rubric, groups_P: Sequence[Group], step: int = 0) -> Rewards:
    """Score all samples; `total_PG` is NaN where every function failed or did not apply."""
    return run_async(rubric.score(groups_P, step=step))


def make_batch(groups_P: Sequence[Group], advantages_PG: Float[np.ndarray, "P G"], *, row_tokens: int) -> Batch:
    """Pack samples and their advantages into as many rows as the samples have; those with NaN are dropped.

    Groups of equal number and size give batches of equal shape, so that the trainer compiles its step once. The batch
    tells the trainer the temperature of its samples. ConfigError for samples of several temperatures.
    """
    temperatures = {sample.temperature for group in groups_P for sample in group}
    if len(temperatures) > 1:
        raise ConfigError(f"make_batch: samples were drawn at temperatures {temperatures}; a batch has one")
    batch = assemble(
        groups_P,
        np.nan_to_num(advantages_PG).astype(np.float32),
        np.isfinite(advantages_PG),
        like=groups_P[0][0],
        row_tokens=row_tokens,
        num_rows=sum(len(sample.rows) for group in groups_P for sample in group),
    )
    return replace(batch, sampler_temperature=temperatures.pop())
