"""From prompts to trajectories: every sample is one conversation between the engine and an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.config import ConfigError, SamplingSection
from posttrain.data.chat import Message, Renderer
from posttrain.data.tokenizer import Tokenizer
from posttrain.rl.types import Env, Example, Group, SingleTurn, Trajectory
from posttrain.rollout.stopping import text_of
from posttrain.rollout.types import Completion, ResumableEngine, RolloutEngine, SamplingParams, sample_key


class Aborted(RuntimeError):
    """A sample that somebody ended is no answer; `collect_some` goes on with it at a later step."""

    def __init__(self, completion: Completion):
        super().__init__(
            f"a sample was aborted after {len(completion.tokens)} tokens, and is no answer to learn from; "
            "use collect_some to leave samples and go on with them later"
        )
        self.completion = completion


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """What turns an example into tokens and back: engine, renderer and sampling settings of one phase."""

    engine: RolloutEngine
    renderer: Renderer
    sampling: SamplingSection
    max_prompt_tokens: int
    seed: int
    make_env: Callable[[Example], Env] = SingleTurn

    def params(self, step: int, prompt: int, sample: int) -> SamplingParams:
        return sampling_params(self.sampling, self.renderer.tokenizer, sample_key(self.seed, step, prompt, sample))

    async def rollout(
        self, example: Example, step: int, prompt_number: int, sample: int, begun: Completion | None = None
    ) -> Trajectory:
        """One conversation, which goes on with what `begun` has of its answer. ConfigError for a prompt that is too
        long, `Aborted` for an answer that did not end."""
        env = self.make_env(example)
        messages = list(env.start())
        prompt = self.renderer.prompt(messages)
        if len(prompt) > self.max_prompt_tokens:
            raise ConfigError(
                f"row {example.index}: its prompt has {len(prompt)} tokens, more than max_prompt_tokens="
                f"{self.max_prompt_tokens}; raise row_tokens or leave the row out"
            )
        params = self.params(step, prompt_number, sample)
        if begun is None:
            completion = await self.engine.generate(prompt, params)
        else:
            completion = await resumable(self.engine).generate(prompt, params, begun=begun)
        if completion.stop == "abort":
            raise Aborted(completion)
        text = text_of(self.renderer.tokenizer.decode, completion.tokens, params.ends, params.stop)
        turn: Message = {"role": "assistant", "content": text}
        reply = await env.reply(turn)
        if not reply.done:
            raise ConfigError(
                f"{type(env).__name__}: conversations of several turns are not supported; reply with done=True"
            )
        before = len(prompt)
        return Trajectory(
            example=example,
            sample=sample,
            messages=[*messages, turn],
            text=text,
            tokens=[*prompt, *completion.tokens],
            sampled=[False] * before + [True] * len(completion.tokens),
            logps=[0.0] * before + list(completion.logps),
            kept_logps=[0.0] * before + list(completion.kept_logps),
            stop=completion.stop,
            versions=[-1] * before + list(completion.weights_versions),
            experts=completion.experts,
        )


def sampling_params(section: SamplingSection, tokenizer: Tokenizer, key: tuple[int, int]) -> SamplingParams:
    """ValueError for settings out of range."""
    fields = section.model_dump(exclude={"stop_token_ids", "ignore_eos"})
    ends = () if section.ignore_eos else tokenizer.stop_ids
    return SamplingParams(**fields, stop_token_ids=(*ends, *section.stop_token_ids), key=key)


async def collect(
    sampler: Sampler,
    examples_P: Sequence[Example],
    group_size: int,
    step: int,
    advance: Callable[[int], None] | None = None,
) -> list[Group]:
    """G samples of each example. The first failure cancels the others and is raised, `Aborted` for one.

    `advance(1)` is called for each sample that is done.
    """
    tasks = [
        asyncio.ensure_future(sampler.rollout(example, step, number, sample))
        for number, example in enumerate(examples_P)
        for sample in range(group_size)
    ]
    if advance is not None:
        for task in tasks:
            task.add_done_callback(lambda _: advance(1))
    try:
        flat = await asyncio.gather(*tasks)
    except BaseException:
        await _cancel(tasks)
        raise
    return [flat[i : i + group_size] for i in range(0, len(flat), group_size)]


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A group that was left before all of its samples were done."""

    example: Example
    step: int
    """Where it began, and its number among the prompts there: its samples keep their random keys."""
    prompt: int
    done: Mapping[int, Trajectory] = field(default_factory=dict)
    """By number of the sample."""
    begun: Mapping[int, Completion] = field(default_factory=dict)


async def collect_some(
    sampler: Sampler,
    examples_P: Sequence[Example],
    group_size: int,
    step: int,
    *,
    enough: int,
    carried: Sequence[Unfinished] = (),
) -> tuple[list[Group], list[Unfinished]]:
    """Partial rollouts, arXiv:2501.12599: goes on with the groups of earlier steps and begins one for each example;
    when `enough` groups are whole the others are left, to be `carried` to a later step. The order stays.

    Every token knows the version of the weights that sampled it. The first failure cancels the others and is raised.
    """
    engine = resumable(sampler.engine)
    groups = [*carried, *(Unfinished(example=e, step=step, prompt=number) for number, e in enumerate(examples_P))]
    tasks = [asyncio.ensure_future(_go_on(sampler, group, group_size)) for group in groups]
    keys = {sampler.params(group.step, group.prompt, sample).key for group in groups for sample in range(group_size)}
    try:
        pending = set(tasks)
        while pending:
            late = len(tasks) - len(pending) >= enough
            if late:
                engine.abort(keys)
            # One that was not with the engine yet is there soon.
            done, pending = await asyncio.wait(pending, timeout=0.01 if late else None, return_when="FIRST_COMPLETED")
            for task in done:
                task.result()
    except BaseException:
        await _cancel(tasks)
        raise
    left = [task.result() for task in tasks]
    whole: list[Group] = [[group.done[i] for i in range(group_size)] for group in left if len(group.done) == group_size]
    return whole, [group for group in left if len(group.done) < group_size]


async def _go_on(sampler: Sampler, group: Unfinished, group_size: int) -> Unfinished:
    """Until all samples are done or aborted."""

    async def one(sample: int) -> Trajectory | Completion:
        try:
            return await sampler.rollout(group.example, group.step, group.prompt, sample, group.begun.get(sample))
        except Aborted as aborted:
            return aborted.completion

    todo = [sample for sample in range(group_size) if sample not in group.done]
    tasks = [asyncio.ensure_future(one(sample)) for sample in todo]
    try:
        ended = dict(zip(todo, await asyncio.gather(*tasks), strict=True))
    except BaseException:
        await _cancel(tasks)
        raise
    return replace(
        group,
        done={**group.done, **{i: sample for i, sample in ended.items() if isinstance(sample, Trajectory)}},
        begun={i: sample for i, sample in ended.items() if isinstance(sample, Completion)},
    )


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def resumable(engine: RolloutEngine) -> ResumableEngine:
    """ConfigError for an engine that cannot go on with a sample."""
    if not isinstance(engine, ResumableEngine):
        raise ConfigError(f"{type(engine).__name__}: partial rollouts need an engine with abort and generate(begun=)")
    return engine
