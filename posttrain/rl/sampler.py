"""Sampling of trajectories: groups of completions of a row's prompt, or of conversations that begin with it, and the
source of prompts, in the order of a dataset or drawn by a curriculum of pass rates."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from posttrain.config import SamplingSection
from posttrain.data.chat import Renderer
from posttrain.data.grammar import Grammar
from posttrain.data.messages import Message
from posttrain.data.prompt_images import PromptImages
from posttrain.data.tokenizer import Tokenizer
from posttrain.environments.types import Conversations
from posttrain.errors import ConfigError
from posttrain.rollout.trajectory import Example, Group, Limit, Trajectory, is_cut, sample_end
from posttrain.rollout.types import (
    Completion,
    PreparingEngine,
    RolloutEngine,
    SamplingParams,
    grammar_of,
    reply_of,
    sample_key,
    sampled,
)


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
        params = sampling_params(self.sampling, self.renderer.tokenizer, key)
        return replace(params, grammar=grammar_of(self.renderer, params.grammar))

    async def rollout(self, group: IssuedGroup, sample: int) -> Trajectory:
        """Sample one trajectory. ConfigError for a prompt that is too long, `RolloutAborted` for an aborted
        completion."""
        pending = self.pending(group, sample)
        if self.conversations is None:
            done = await sampled(self.engine, pending.prompt, pending.params, group.example.images)
            return pending.finish(done)
        return await self.conversations.converse(
            group.example,
            group=group.number,
            sample=sample,
            seed=sample_key(self.seed, self.stream, group.number, NO_SAMPLE)[0],
            renderer=self.renderer,
            params_of=lambda request: self.params(group.number, sample, request),
            generate=self._turn,
        )

    async def _turn(
        self, tokens: Sequence[int], params: SamplingParams, images: PromptImages | None = None
    ) -> Completion:
        completion = await sampled(self.engine, tokens, params, images)
        if completion.stop == "abort":
            raise RolloutAborted(completion)
        return completion

    async def prepare(self, group: IssuedGroup, sample: int) -> None:
        """Prepare the only turn of a sample, so that it is submitted at once."""
        if self.conversations is None and isinstance(self.engine, PreparingEngine):
            example = group.example
            await self.engine.prepare(example.prompt_tokens, self.params(group.number, sample), images=example.images)

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
        reached: Limit | None = "max_tokens" if is_cut(completion.stop) else None
        end = sample_end(completion.stop, reached=reached, finished=False, failure=None)
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
            truncation_logps=array("f", [0.0] * before + list(completion.truncation_logps)),
            stop=end.stop,
            limit=end.limit,
            versions=array("i", [-1] * before + list(completion.weights_versions)),
            experts=completion.experts,
            images=self.group.example.images,
        )


def sampling_params(section: SamplingSection, tokenizer: Tokenizer, key: tuple[int, int]) -> SamplingParams:
    """Sampling parameters of one completion. ValueError for settings out of range."""
    fields = section.model_dump(exclude={"stop", "stop_token_ids", "ignore_eos", "grammar"})
    fields["grammar"] = None if section.grammar is None else Grammar.of(section.grammar)
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

    An engine's log-probabilities change by rounding with what it computes at the same time: samples of one turn are
    submitted together, in order, so that they depend on no clock. Turns after an environment come when it answers.
    `advance(1)` is called for each finished sample, `ended` with each group as its last sample ends.
    """
    wanted = [(group, sample) for group in groups for sample in range(group_size)]
    await asyncio.gather(*(sampler.prepare(*one) for one in wanted))
    tasks = [asyncio.ensure_future(sampler.rollout(*one)) for one in wanted]
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


@runtime_checkable
class PromptStream(Protocol):
    """Endless places in a list of examples, with a position to resume from."""

    def __next__(self) -> int: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Source:
    """Stream of groups over the prompts of a dataset, in its order or drawn by a curriculum."""

    def __init__(self, prompts: PromptStream, examples: Sequence[Example], curriculum: Curriculum | None = None):
        self._prompts, self._examples, self._curriculum = prompts, examples, curriculum
        self._by_row = {example.index: example for example in examples}
        self._places = {} if curriculum is None else {example.index: n for n, example in enumerate(examples)}
        self.issued = 0
        """Number of groups begun since the start of the run."""

    def take(self, count: int, version: int) -> list[IssuedGroup]:
        """Begin `count` new groups under a version of the weights."""
        numbers = range(self.issued, self.issued + count)
        self.issued += count
        places = [next(self._prompts) for _ in numbers] if self._curriculum is None else self._curriculum.draw(numbers)
        return [
            IssuedGroup(number=number, example=self._examples[place], version=version)
            for number, place in zip(numbers, places, strict=True)
        ]

    def example(self, row: int) -> Example:
        """Example of a row of the dataset."""
        return self._by_row[row]

    def seen(self, group: Group, rewards_G: Float[np.ndarray, " G"]) -> None:
        """Take note of the rewards of a finished group, for the curriculum."""
        if self._curriculum is not None:
            self._curriculum.seen(self._places[group[0].example.index], rewards_G)

    def metrics(self) -> dict[str, float]:
        """Metrics of the curriculum since the last call; none without one."""
        return {} if self._curriculum is None else self._curriculum.metrics()

    def state(self) -> dict[str, Any]:
        state = {"prompts": self._prompts.state(), "issued": self.issued}
        return state if self._curriculum is None else {**state, "curriculum": self._curriculum.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._prompts.restore(state["prompts"])
        if self._curriculum is not None:
            self._curriculum.restore(state["curriculum"])
        self.issued = state["issued"]


DRAWS = 2
"""Stream of random keys, see `sample_key`; those of samples are 0 and 1."""
UNSEEN = 0.5
"""Pass rate of a prompt without a scored group."""


class Curriculum:
    """Draws of prompts, each by the run's seed and the number of its group, from pools of pass rates.

    `pools`: rising bounds from 0 to 1. `shares`: of each pool in the draws. `decay`: weight of the earlier pass rate in
    the moving average. A prompt under way, begun but not scored, is not drawn again unless all are.
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        pools: Sequence[float],
        shares: Sequence[float],
        decay: float,
        pass_above: float,
        seed: int,
    ):
        self._bounds, self._shares = np.asarray(pools[1:-1], np.float64), np.asarray(shares, np.float64)
        self._decay, self._pass_above, self._seed = decay, pass_above, seed
        self.rates = np.full(num_prompts, np.nan)
        """Pass rate of each prompt; NaN: no group scored."""
        self._under_way = np.zeros(num_prompts, bool)
        self._drawn = np.zeros(len(shares), np.int64)

    def draw(self, numbers: Sequence[int]) -> list[int]:
        """Draw the prompt of each of the groups with these numbers. Prompts drawn are under way."""
        pool_of = self._pools()
        free = [np.flatnonzero((pool_of == pool) & ~self._under_way) for pool in range(len(self._shares))]
        return [self._draw(number, free) for number in numbers]

    def seen(self, prompt: int, rewards_G: Float[np.ndarray, " G"]) -> None:
        """Update the pass rate of a prompt by a scored group. Without a valid reward it stays."""
        self._under_way[prompt] = False
        valid = rewards_G[~np.isnan(rewards_G)]
        if valid.size:
            rate, before = float((valid > self._pass_above).mean()), self.rates[prompt]
            self.rates[prompt] = rate if np.isnan(before) else self._decay * before + (1 - self._decay) * rate

    def metrics(self) -> dict[str, float]:
        """Share of all prompts in each pool, share of each pool in the draws since the last call, and share of prompts
        with a scored group."""
        counts = np.bincount(self._pools(), minlength=len(self._shares))
        drawn, self._drawn = self._drawn, np.zeros_like(self._drawn)
        return {
            **{f"curriculum/pool_{pool}": float(count / len(self.rates)) for pool, count in enumerate(counts)},
            **{f"curriculum/drawn_{pool}": float(count / max(drawn.sum(), 1)) for pool, count in enumerate(drawn)},
            "curriculum/seen": float((~np.isnan(self.rates)).mean()),
        }

    def state(self) -> dict[str, Any]:
        seen = np.flatnonzero(~np.isnan(self.rates))
        return {
            "seen": seen.tolist(),
            "rates": self.rates[seen].tolist(),
            "under_way": np.flatnonzero(self._under_way).tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.rates[:], self._under_way[:] = np.nan, False
        self.rates[state["seen"]] = state["rates"]
        self._under_way[state["under_way"]] = True

    def _pools(self) -> Int[np.ndarray, " N"]:
        """Pool of each prompt."""
        return np.searchsorted(self._bounds, np.where(np.isnan(self.rates), UNSEEN, self.rates), side="right")

    def _draw(self, number: int, free: list[Int[np.ndarray, " M"]]) -> int:
        first, second = (word / 2**32 for word in sample_key(self._seed, DRAWS, number, 0))
        weights = self._shares * [len(prompts) > 0 for prompts in free]
        if not weights.any():
            # Pools with a share are empty or under way: any other prompt, in the end one that is under way.
            weights = np.asarray([float(len(prompts)) for prompts in free])
        if not weights.any():
            return int(second * len(self.rates))
        below = np.cumsum(weights)
        pool = min(int(np.searchsorted(below, first * below[-1], side="right")), int(np.flatnonzero(weights)[-1]))
        place = int(second * len(free[pool]))
        prompt = int(free[pool][place])
        free[pool] = np.delete(free[pool], place)
        self._under_way[prompt] = True
        self._drawn[pool] += 1
        return prompt
