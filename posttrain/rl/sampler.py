"""Sampling of trajectories: groups of completions of a dataset row's prompt, or of conversations that begin with it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.config import SamplingSection
from posttrain.data.chat import Renderer
from posttrain.data.messages import Message
from posttrain.data.tokenizer import Tokenizer
from posttrain.environments.types import Conversations
from posttrain.errors import ConfigError
from posttrain.rollout.trajectory import Example, Group, Trajectory
from posttrain.rollout.types import Completion, RolloutEngine, SamplingParams, reply_of, sample_key


class RolloutAborted(RuntimeError):
    """Aborted sample, which cannot be trained on."""

    def __init__(self, completion: Completion):
        super().__init__(
            f"a sample was aborted after {len(completion.tokens)} tokens and cannot be trained on; pause the engine "
            "instead, which goes on with its samples"
        )
        self.completion = completion


TRAINING, EVALUATION = 0, 1
"""Streams of random keys, see `sample_key`."""
NO_SAMPLE = -1
"""In place of a sample's number, for what all samples of a group share."""


@dataclass(frozen=True, kw_only=True)
class IssuedGroup:
    """Group of samples to make of one prompt."""

    number: int
    """Number among all groups that the run has begun; it alone fixes the random keys of the samples."""
    example: Example
    version: int
    """Version of the weights when the group was begun."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Sampler of trajectories: rollout engine, renderer and sampling settings."""

    engine: RolloutEngine
    renderer: Renderer
    sampling: SamplingSection
    max_prompt_tokens: int
    seed: int
    stream: int = TRAINING
    """Stream of random keys: `TRAINING` or `EVALUATION`."""
    conversations: Conversations | None = None
    """Conversations of several turns; None: one completion of the prompt."""

    def params(self, group: int, sample: int, request: int = 0) -> SamplingParams:
        """Settings of a sample. `request`: number among its requests with the same prompt."""
        key = sample_key(self.seed, self.stream, group, sample + (request << 32))
        return sampling_params(self.sampling, self.renderer.tokenizer, key)

    async def rollout(self, group: IssuedGroup, sample: int) -> Trajectory:
        """Sample one trajectory. ConfigError for a prompt that is too long, `RolloutAborted` for an aborted
        completion."""
        pending = self.pending(group, sample)
        if self.conversations is None:
            return pending.finish(await self.engine.generate(pending.prompt, pending.params))
        return await self.conversations.converse(
            group.example,
            group=group.number,
            sample=sample,
            seed=sample_key(self.seed, self.stream, group.number, NO_SAMPLE)[0],
            renderer=self.renderer,
            params_of=lambda request: self.params(group.number, sample, request),
            generate=self._turn,
        )

    async def _turn(self, tokens: Sequence[int], params: SamplingParams) -> Completion:
        completion = await self.engine.generate(tokens, params)
        if completion.stop == "abort":
            raise RolloutAborted(completion)
        return completion

    def pending(self, group: IssuedGroup, sample: int) -> PendingRollout:
        """Make the rollout of a sample. ConfigError for a prompt that is too long."""
        prompt = list(group.example.prompt_tokens)
        if len(prompt) > self.max_prompt_tokens:
            raise ConfigError(
                f"row {group.example.index}: its prompt has {len(prompt)} tokens, more than max_prompt_tokens="
                f"{self.max_prompt_tokens}; raise row_tokens or drop the row"
            )
        params = self.params(group.number, sample)
        return PendingRollout(group=group, sample=sample, prompt=prompt, params=params, renderer=self.renderer)


@dataclass(frozen=True, kw_only=True)
class PendingRollout:
    """Rollout that waits for its completion."""

    group: IssuedGroup
    sample: int
    prompt: Sequence[int]
    params: SamplingParams
    renderer: Renderer

    def finish(self, completion: Completion) -> Trajectory:
        """Make the trajectory from the completion. `RolloutAborted` for an aborted one."""
        if completion.stop == "abort":
            raise RolloutAborted(completion)
        text = reply_of(self.renderer, self.prompt, completion.tokens, self.params)
        turn: Message = {"role": "assistant", "content": text}
        before = len(self.prompt)
        return Trajectory(
            group=self.group.number,
            example=self.group.example,
            sample=self.sample,
            messages=[*self.group.example.messages, turn],
            text=text,
            # Arrays: a list of numbers takes up to ten times their memory.
            tokens=array("i", [*self.prompt, *completion.tokens]),
            sampled=[False] * before + [True] * len(completion.tokens),
            logps=array("f", [0.0] * before + list(completion.logps)),
            kept_logps=array("f", [0.0] * before + list(completion.kept_logps)),
            stop=completion.stop,
            versions=array("i", [-1] * before + list(completion.weights_versions)),
            experts=completion.experts,
        )


def sampling_params(section: SamplingSection, tokenizer: Tokenizer, key: tuple[int, int]) -> SamplingParams:
    """Sampling parameters of one completion. ValueError for settings out of range."""
    fields = section.model_dump(exclude={"stop", "stop_token_ids", "ignore_eos"})
    ends = () if section.ignore_eos else tokenizer.stop_ids
    params = SamplingParams(**fields, stop_token_ids=(*ends, *section.stop_token_ids), key=key)
    return params.stopped_at(section.stop, tokenizer)


async def collect(
    sampler: Sampler,
    groups: Sequence[IssuedGroup],
    group_size: int,
    advance: Callable[[int], None] | None = None,
    ended: Callable[[Group], None] | None = None,
) -> list[Group]:
    """Sample G trajectories of each group. The first failure cancels the others and is raised, including
    `RolloutAborted`.

    `advance(1)` is called for each finished sample, `ended` with each group as its last sample ends.
    """
    tasks = [asyncio.ensure_future(sampler.rollout(group, sample)) for group in groups for sample in range(group_size)]
    made = [asyncio.gather(*tasks[i : i + group_size]) for i in range(0, len(tasks), group_size)]

    def tell(group: asyncio.Future[list[Trajectory]]) -> None:
        if ended is not None and not group.cancelled() and group.exception() is None:
            ended(group.result())

    for group in made:
        group.add_done_callback(tell)
    if advance is not None:
        for task in tasks:
            task.add_done_callback(lambda _: advance(1))
    try:
        return list(await asyncio.gather(*made))
    except BaseException:
        await _cancel(tasks)
        raise


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
