"""Sampling of trajectories, one completion of a dataset row's prompt each, and partial rollouts, which keep a fixed
number of prompts in flight across steps."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.config import SamplingSection
from posttrain.data.chat import Renderer
from posttrain.data.messages import Message
from posttrain.data.tokenizer import Tokenizer
from posttrain.environments.types import Conversations
from posttrain.errors import ConfigError
from posttrain.rollout.trajectory import Example, Group, Trajectory
from posttrain.rollout.types import (
    Call,
    Completion,
    ResumableEngine,
    RolloutEngine,
    SamplingParams,
    reply_of,
    sample_key,
)


class RolloutAborted(RuntimeError):
    """Aborted sample, which cannot be trained on; `collect_some` resumes it at a later step."""

    def __init__(self, completion: Completion):
        super().__init__(
            f"a sample was aborted after {len(completion.tokens)} tokens and cannot be trained on; "
            "use collect_some to resume unfinished samples in a later step"
        )
        self.completion = completion


TRAINING, EVALUATION = 0, 1
"""Streams of random keys, see `sample_key`."""
NO_SAMPLE = -1
"""In place of a sample's number, for what all samples of a group share."""


@dataclass(frozen=True, kw_only=True)
class IssuedGroup:
    """Group of samples to make of one prompt, with what was sampled of it so far (partial rollouts)."""

    number: int
    """Number among all groups that the run has begun; it alone fixes the random keys of the samples."""
    example: Example
    version: int
    """Version of the weights when the group was begun."""
    completions: Mapping[int, Completion] = field(default_factory=dict)
    """Completions by sample number, of the samples that were started; those with stop "abort" are resumed."""

    def is_done(self, sample: int) -> bool:
        return sample in self.completions and self.completions[sample].stop != "abort"


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


async def collect_some(
    sampler: Sampler,
    groups: Sequence[IssuedGroup],
    group_size: int,
    version: int,
    *,
    min_groups: int,
    per_step: int,
    max_staleness: int,
) -> tuple[list[Group], list[IssuedGroup]]:
    """Partial rollouts, arXiv:2501.12599: sample groups, oldest first, until `min_groups` are finished. Returns these
    and the unfinished groups for a later call; order is kept.

    No group is returned more than `max_staleness` versions after its start if the first call of every version has
    `min_groups` equal to `per_step`, and later ones as many new groups as `min_groups`: calls wait for the oldest
    groups, see `due_groups`. Every token records the version of the weights that sampled it.
    The outcome depends on arguments and weights, not on timing. The first failure is raised.
    """
    pending = [[sampler.pending(group, sample) for sample in range(group_size)] for group in groups]
    due = due_groups([group.version for group in groups], version, per_step, max_staleness)
    groups = _resume(resumable(sampler.engine), groups, pending, min_groups, due)
    whole = [i for i, group in enumerate(groups) if all(map(group.is_done, range(group_size)))][:min_groups]
    trajectories: list[Group] = [[one.finish(groups[i].completions[one.sample]) for one in pending[i]] for i in whole]
    return trajectories, [group for i, group in enumerate(groups) if i not in whole]


def due_groups(started: Sequence[int], step: int, per_step: int, max_staleness: int) -> list[tuple[int, int]]:
    """Pairs (N, n): at least n of the N oldest groups must finish in this step, so that each group finishes at most
    `max_staleness` steps after its start if no step returns more than `per_step`. `started`: step of each group,
    rising.

        >>> due_groups([0, 0, 0, 1, 1, 1], step=1, per_step=3, max_staleness=1)
        [(3, 3), (6, 3)]
        >>> due_groups([0, 0, 0, 1, 1, 1], step=1, per_step=3, max_staleness=2)
        []
    """
    found = []
    for later in range(max_staleness + 1):
        # Groups that must finish by the step `later` steps ahead, minus those that the steps in between can return.
        oldest = sum(first + max_staleness <= step + later for first in started)
        if oldest > later * per_step:
            found.append((oldest, min(oldest - later * per_step, per_step)))
    return found


def _resume(
    engine: ResumableEngine,
    groups: Sequence[IssuedGroup],
    pending: Sequence[Sequence[PendingRollout]],
    min_groups: int,
    due: Sequence[tuple[int, int]],
) -> list[IssuedGroup]:
    """Generate until `min_groups` groups are finished, including `due` ones of the oldest."""
    todo = [(i, one) for i, of_group in enumerate(pending) for one in of_group if not groups[i].is_done(one.sample)]

    def are_enough(done: Sequence[bool]) -> bool:
        open_groups = {i for (i, _), is_done in zip(todo, done, strict=True) if not is_done}
        waited_for = all(sum(i not in open_groups for i in range(oldest)) >= least for oldest, least in due)
        return waited_for and len(groups) - len(open_groups) >= min_groups

    if are_enough([False] * len(todo)):
        return list(groups)
    calls = [Call(one.prompt, one.params, groups[i].completions.get(one.sample)) for i, one in todo]
    found = engine.generate_some(calls, are_enough)
    completions = [dict(group.completions) for group in groups]
    for (i, one), completion in zip(todo, found, strict=True):
        if completion.tokens:
            completions[i][one.sample] = completion
    return [replace(group, completions=new) for group, new in zip(groups, completions, strict=True)]


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def resumable(engine: RolloutEngine) -> ResumableEngine:
    """Check that an engine can resume samples. ConfigError otherwise."""
    if not isinstance(engine, ResumableEngine):
        raise ConfigError(
            f"oversample_prompts: {type(engine).__name__} has no generate_some; implement it, or remove the option"
        )
    return engine
