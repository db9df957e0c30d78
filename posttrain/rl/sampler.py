"""Sampling of trajectories, one completion of a dataset row's prompt each, and partial rollouts, which keep a fixed
number of prompts in flight across steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from posttrain.config import SamplingSection
from posttrain.data.chat import Message, Renderer
from posttrain.data.pipeline import PromptBatches
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.rl.types import Example, Group, Trajectory
from posttrain.rollout.types import (
    Call,
    Completion,
    ResumableEngine,
    RolloutEngine,
    SamplingParams,
    sample_key,
    text_of,
)


class RolloutAborted(RuntimeError):
    """Aborted sample, which cannot be trained on; `collect_some` resumes it at a later step."""

    def __init__(self, completion: Completion):
        super().__init__(
            f"a sample was aborted after {len(completion.tokens)} tokens and cannot be trained on; "
            "use collect_some to resume unfinished samples in a later step"
        )
        self.completion = completion


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Sampler of trajectories: rollout engine, renderer and sampling settings."""

    engine: RolloutEngine
    renderer: Renderer
    sampling: SamplingSection
    max_prompt_tokens: int
    seed: int

    def params(self, step: int, prompt: int, sample: int) -> SamplingParams:
        return sampling_params(self.sampling, self.renderer.tokenizer, sample_key(self.seed, step, prompt, sample))

    async def rollout(self, example: Example, step: int, prompt_number: int, sample: int) -> Trajectory:
        """Sample one trajectory. ConfigError for a prompt that is too long, `RolloutAborted` for an aborted
        completion."""
        pending = self.pending(example, step, prompt_number, sample)
        return pending.finish(await self.engine.generate(pending.prompt, pending.params))

    def pending(self, example: Example, step: int, prompt_number: int, sample: int) -> PendingRollout:
        """Make the rollout of a sample. ConfigError for a prompt that is too long."""
        prompt = list(example.prompt_tokens)
        if len(prompt) > self.max_prompt_tokens:
            raise ConfigError(
                f"row {example.index}: its prompt has {len(prompt)} tokens, more than max_prompt_tokens="
                f"{self.max_prompt_tokens}; raise row_tokens or drop the row"
            )
        params = self.params(step, prompt_number, sample)
        decode = self.renderer.tokenizer.decode
        return PendingRollout(example=example, sample=sample, prompt=prompt, params=params, decode=decode)


@dataclass(frozen=True, kw_only=True)
class PendingRollout:
    """Rollout that waits for its completion."""

    example: Example
    sample: int
    prompt: Sequence[int]
    params: SamplingParams
    decode: Callable[[Sequence[int]], str]

    def finish(self, completion: Completion) -> Trajectory:
        """Make the trajectory from the completion. `RolloutAborted` for an aborted one."""
        if completion.stop == "abort":
            raise RolloutAborted(completion)
        text = text_of(self.decode, completion.tokens, self.params.ends, self.params.stop)
        turn: Message = {"role": "assistant", "content": text}
        before = len(self.prompt)
        return Trajectory(
            example=self.example,
            sample=self.sample,
            messages=[*self.example.messages, turn],
            text=text,
            tokens=[*self.prompt, *completion.tokens],
            sampled=[False] * before + [True] * len(completion.tokens),
            logps=[0.0] * before + list(completion.logps),
            kept_logps=[0.0] * before + list(completion.kept_logps),
            stop=completion.stop,
            versions=[-1] * before + list(completion.weights_versions),
            experts=completion.experts,
        )


def sampling_params(section: SamplingSection, tokenizer: Tokenizer, key: tuple[int, int]) -> SamplingParams:
    """Sampling parameters of one completion. ValueError for settings out of range."""
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
    """Sample G trajectories of each example. The first failure cancels the others and is raised, including
    `RolloutAborted`.

    `advance(1)` is called for each finished sample.
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
class PartialGroup:
    """Group of samples that is not finished yet (partial rollouts)."""

    example: Example
    step: int
    """Step in which the group was started. With `prompt`, its number among that step's prompts, it fixes the random
    keys of its samples."""
    prompt: int
    completions: Mapping[int, Completion] = field(default_factory=dict)
    """Completions by sample number, of the samples that were started; those with stop "abort" are resumed."""

    def is_done(self, sample: int) -> bool:
        return sample in self.completions and self.completions[sample].stop != "abort"


async def collect_some(
    sampler: Sampler,
    examples_P: Sequence[Example],
    group_size: int,
    step: int,
    *,
    min_groups: int,
    max_staleness: int,
    resumed: Sequence[PartialGroup] = (),
) -> tuple[list[Group], list[PartialGroup]]:
    """Partial rollouts, arXiv:2501.12599: resume the groups of earlier steps and start one for each example until
    `min_groups` are finished. Returns these and the unfinished groups, which a later step takes as `resumed`; order is
    kept.

    No group is returned more than `max_staleness` steps after its start if every step has the same `min_groups`: steps
    wait for the oldest groups, see `due_groups`. Every token records the version of the weights that sampled it. The
    outcome depends on arguments and weights, not on timing. The first failure is raised.
    """
    groups = [*resumed, *(PartialGroup(example=e, step=step, prompt=number) for number, e in enumerate(examples_P))]
    pending = [[sampler.pending(g.example, g.step, g.prompt, sample) for sample in range(group_size)] for g in groups]
    due = due_groups([group.step for group in groups], step, min_groups, max_staleness)
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
    groups: Sequence[PartialGroup],
    pending: Sequence[Sequence[PendingRollout]],
    min_groups: int,
    due: Sequence[tuple[int, int]],
) -> list[PartialGroup]:
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


class OversampledPrompts:
    """Stream of new prompts that fills up `in_flight` beside the `unfinished` groups of the previous step. Its state
    holds both, including sampled tokens, so that a resumed run continues with the same tokens."""

    def __init__(self, prompts: PromptBatches, examples: Sequence[Example], in_flight: int):
        """`prompts`: stream of single prompts."""
        self._prompts, self._in_flight = prompts, in_flight
        self._examples = {example.index: example for example in examples}
        self.unfinished: Sequence[PartialGroup] = ()

    def __next__(self) -> list[int]:
        return [index for _ in range(self._in_flight - len(self.unfinished)) for index in next(self._prompts)]

    def state(self) -> dict[str, Any]:
        return {"prompts": self._prompts.state(), "unfinished": [_to_json(group) for group in self.unfinished]}

    def restore(self, state: dict[str, Any]) -> None:
        self._prompts.restore(state["prompts"])
        self.unfinished = [_from_json(group, self._examples) for group in state["unfinished"]]


def _to_json(group: PartialGroup) -> dict[str, Any]:
    completions = {str(sample): asdict(completion) for sample, completion in group.completions.items()}
    return {"row": group.example.index, "step": group.step, "prompt": group.prompt, "completions": completions}


def _from_json(group: dict[str, Any], examples: Mapping[int, Example]) -> PartialGroup:
    completions = {int(sample): _completion(fields) for sample, fields in group["completions"].items()}
    return PartialGroup(
        example=examples[group["row"]], step=group["step"], prompt=group["prompt"], completions=completions
    )


def _completion(fields: dict[str, Any]) -> Completion:
    lists = ("tokens", "logps", "kept_logps", "weights_versions")
    return Completion(**{**fields, **{name: tuple(fields[name]) for name in lists}})
