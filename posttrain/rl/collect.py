"""From prompts to trajectories: every sample is one conversation between the engine and an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.config import ConfigError, SamplingSection
from posttrain.data.chat import Message, Renderer
from posttrain.rl.types import Env, Example, Group, SingleTurn, Trajectory
from posttrain.rollout.stopping import text_of
from posttrain.rollout.types import RolloutEngine, SamplingParams, sample_key


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
        s = self.sampling
        return SamplingParams(
            max_tokens=s.max_tokens,
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            repetition_penalty=s.repetition_penalty,
            stop=s.stop,
            stop_token_ids=self.renderer.tokenizer.stop_ids,
            key=sample_key(self.seed, step, prompt, sample),
        )

    async def rollout(self, example: Example, step: int, prompt_number: int, sample: int) -> Trajectory:
        """One conversation. ConfigError for a prompt that is too long."""
        env = self.make_env(example)
        messages = list(env.start())
        prompt = self.renderer.prompt(messages)
        if len(prompt) > self.max_prompt_tokens:
            raise ConfigError(
                f"row {example.index}: its prompt has {len(prompt)} tokens, more than max_prompt_tokens="
                f"{self.max_prompt_tokens}; raise row_tokens or leave the row out"
            )
        params = self.params(step, prompt_number, sample)
        completion = await self.engine.generate(prompt, params)
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


async def collect(
    sampler: Sampler,
    examples_P: Sequence[Example],
    group_size: int,
    step: int,
    advance: Callable[[int], None] | None = None,
) -> list[Group]:
    """G samples of each example. The first failure cancels the others and is raised.

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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [flat[i : i + group_size] for i in range(0, len(flat), group_size)]
