"""From prompts to trajectories: every sample is one answer of the engine to the prompt of a dataset row."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.config import SamplingSection
from posttrain.data.chat import Message, Renderer
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.rl.types import Example, Group, Trajectory
from posttrain.rollout.stopping import text_of
from posttrain.rollout.types import Call, Completion, ResumableEngine, RolloutEngine, SamplingParams, sample_key


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

    def params(self, step: int, prompt: int, sample: int) -> SamplingParams:
        return sampling_params(self.sampling, self.renderer.tokenizer, sample_key(self.seed, step, prompt, sample))

    async def rollout(self, example: Example, step: int, prompt_number: int, sample: int) -> Trajectory:
        """One answer. ConfigError for a prompt that is too long, `Aborted` for an answer that did not end."""
        asked = self.ask(example, step, prompt_number, sample)
        return asked.answered(await self.engine.generate(asked.prompt, asked.params))

    def ask(self, example: Example, step: int, prompt_number: int, sample: int) -> Asked:
        """ConfigError for a prompt that is too long."""
        prompt = list(example.prompt_tokens)
        if len(prompt) > self.max_prompt_tokens:
            raise ConfigError(
                f"row {example.index}: its prompt has {len(prompt)} tokens, more than max_prompt_tokens="
                f"{self.max_prompt_tokens}; raise row_tokens or leave the row out"
            )
        params = self.params(step, prompt_number, sample)
        decode = self.renderer.tokenizer.decode
        return Asked(example=example, sample=sample, prompt=prompt, params=params, decode=decode)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A conversation that waits for the answer of the model."""

    example: Example
    sample: int
    prompt: Sequence[int]
    params: SamplingParams
    decode: Callable[[Sequence[int]], str]

    def answered(self, completion: Completion) -> Trajectory:
        """`Aborted` for an answer that did not end."""
        if completion.stop == "abort":
            raise Aborted(completion)
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
    """A group that was left before a step learned from it."""

    example: Example
    step: int
    """Where it began, and its number among the prompts there: its samples keep their random keys."""
    prompt: int
    completions: Mapping[int, Completion] = field(default_factory=dict)
    """By number of the sample, of those that have begun; those that ended by "abort" go on."""

    def is_done(self, sample: int) -> bool:
        return sample in self.completions and self.completions[sample].stop != "abort"


async def collect_some(
    sampler: Sampler,
    examples_P: Sequence[Example],
    group_size: int,
    step: int,
    *,
    enough: int,
    max_staleness: int,
    carried: Sequence[Unfinished] = (),
) -> tuple[list[Group], list[Unfinished]]:
    """Partial rollouts, arXiv:2501.12599: goes on with the groups of earlier steps and begins one for each example;
    when `enough` are whole, these are returned and the others left, to be `carried` to a later step. The order stays.

    No group is returned more than `max_staleness` steps after it began, if every step asks for as many: of the
    oldest as many are returned as must not wait, see `due_groups`. Every token knows the version of the
    weights that sampled it. What is left depends on the arguments and the weights, not on time. The first failure is
    raised.
    """
    groups = [*carried, *(Unfinished(example=e, step=step, prompt=number) for number, e in enumerate(examples_P))]
    asked = [[sampler.ask(g.example, g.step, g.prompt, sample) for sample in range(group_size)] for g in groups]
    due = due_groups([group.step for group in groups], step, enough, max_staleness)
    groups = _go_on(resumable(sampler.engine), groups, asked, enough, due)
    whole = [i for i, group in enumerate(groups) if all(map(group.is_done, range(group_size)))][:enough]
    trajectories: list[Group] = [[one.answered(groups[i].completions[one.sample]) for one in asked[i]] for i in whole]
    return trajectories, [group for i, group in enumerate(groups) if i not in whole]


def due_groups(begun: Sequence[int], step: int, per_step: int, max_staleness: int) -> list[tuple[int, int]]:
    """Pairs (N, n): of the N oldest groups this step must return n, where no step returns more than `per_step`, so that
    each can be returned at most `max_staleness` steps after it began. `begun`: the step of each group, rising.

    >>> due_groups([0, 0, 0, 1, 1, 1], step=1, per_step=3, max_staleness=1)
    [(3, 3), (6, 3)]
    >>> due_groups([0, 0, 0, 1, 1, 1], step=1, per_step=3, max_staleness=2)
    []
    """
    found = []
    for later in range(max_staleness + 1):
        # Those that must be returned by the step so much later, less those that the steps in between can return.
        oldest = sum(first + max_staleness <= step + later for first in begun)
        if oldest > later * per_step:
            found.append((oldest, min(oldest - later * per_step, per_step)))
    return found


def _go_on(
    engine: ResumableEngine,
    groups: Sequence[Unfinished],
    asked: Sequence[Sequence[Asked]],
    enough: int,
    due: Sequence[tuple[int, int]],
) -> list[Unfinished]:
    """Until `enough` groups are whole, and of the oldest as many as are `due`."""
    todo = [(i, one) for i, of_group in enumerate(asked) for one in of_group if not groups[i].is_done(one.sample)]

    def are_enough(done: Sequence[bool]) -> bool:
        open_groups = {i for (i, _), is_done in zip(todo, done, strict=True) if not is_done}
        waited_for = all(sum(i not in open_groups for i in range(oldest)) >= least for oldest, least in due)
        return waited_for and len(groups) - len(open_groups) >= enough

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
    """ConfigError for an engine that cannot go on with a sample."""
    if not isinstance(engine, ResumableEngine):
        raise ConfigError(f"prompts_ahead: {type(engine).__name__} has no generate_some; give it, or remove the option")
    return engine
