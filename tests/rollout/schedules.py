"""Random schedules of requests: arrivals, prompts that share beginnings, settings, aborts, new weights, and what
becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from posttrain.models.decoder import Decoder
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.types import Completion, SamplingParams, sample_key
from tests.rollout.engines import UNUSUAL, NaiveEngine, assert_same, params

Request = tuple[list[int], SamplingParams]


Trouble = Literal["none", "abort", "update", "drained update"]
STOPS = ("3><1", "77", "><20")
"""Parts of the text of some tokens, and of some pairs of tokens."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a seed stands for. Before each request arrives there are so many turns of the event loop in `waits`, then
    some trouble: an earlier request is aborted, to go on behind all others, or the weights change."""

    requests: Sequence[Request]
    waits: Sequence[int]
    troubles: Sequence[Trouble]
    victims: Sequence[int]
    """Which request, modulo those that are there, an abort is for."""


def schedule(
    seed: int, *, vocabulary: int, longest: int, temperature: float, unusual: bool, troubled: bool
) -> Schedule:
    """Groups of samples of prompts that begin alike for up to half of their length."""
    rng = np.random.default_rng(seed)
    beginning = rng.integers(0, vocabulary, longest // 2).tolist()
    requests: list[Request] = []
    for prompt in range(int(rng.integers(2, 6))):
        own = rng.integers(0, vocabulary, int(rng.integers(1, longest // 4))).tolist()
        tokens = [*beginning[: int(rng.choice([0, longest // 4, longest // 2]))], *own]
        limit = min(longest - len(tokens), int(rng.choice([3, 10, longest // 3])))
        for sample in range(int(rng.choice([1, 1, 4]))):
            changes: dict[str, Any] = {"max_tokens": limit, "temperature": temperature}
            if unusual:
                changes |= {name: x for name, x in UNUSUAL[rng.integers(len(UNUSUAL))].items() if name != "temperature"}
            if rng.random() < 0.3:
                changes["stop_token_ids"] = tuple(range(0, vocabulary, 20))
            if rng.random() < 0.2:
                changes["stop"] = STOPS
            requests.append((tokens, replace(params(**changes), key=sample_key(seed, 0, prompt, sample))))
    order, number = rng.permutation(len(requests)), len(requests)
    kinds: list[Trouble] = ["none", "abort", "update", "drained update"]
    chances = [0.7, 0.1, 0.1, 0.1] if troubled else [1.0, 0.0, 0.0, 0.0]
    return Schedule(
        requests=[requests[i] for i in order],
        waits=rng.choice([0, 0, 1, 30], number).tolist(),
        troubles=[kinds[i] for i in rng.choice(4, number, p=chances)],
        victims=rng.integers(0, 100, number).tolist(),
    )


class Run:
    """Of a schedule. The weights of version v are those of `models[v % len(models)]`."""

    def __init__(self, engine: NativeEngine, schedule: Schedule, models: Sequence[Decoder]):
        self.engine, self.schedule, self.models = engine, schedule, models
        self.version = 0
        engine.update_weights(models[0], 0)

    async def completions(self) -> list[Completion]:
        plan, tasks = self.schedule, []
        for index, request in enumerate(plan.requests):
            for _ in range(plan.waits[index]):
                await asyncio.sleep(0)
            await self._trouble(plan.troubles[index], plan.requests[plan.victims[index] % (index + 1)][1])
            tasks.append(asyncio.create_task(self._to_the_end(*request)))
        return await asyncio.gather(*tasks)

    async def _to_the_end(self, prompt: list[int], p: SamplingParams) -> Completion:
        completion = await self.engine.generate(prompt, p)
        while completion.stop == "abort":
            completion = await self.engine.generate(prompt, p, partial=completion)
        return completion

    async def _trouble(self, kind: Trouble, victim: SamplingParams) -> None:
        if kind == "abort":
            self.engine.abort([victim.key])
        if kind == "drained update":
            await self.engine.drain()
        if "update" in kind:
            self.version += 1
            self.engine.update_weights(self.models[self.version % len(self.models)], self.version)
        self.engine.resume()


def check(schedule: Schedule, completions: Sequence[Completion], naive: Sequence[NaiveEngine]) -> int:
    """Each is what naive sampling gives under the weights of its first token, as far as those wrote it; the number of
    those that are of one version. `naive`: one for each of the models."""
    whole = 0
    for (prompt, p), got in zip(schedule.requests, completions, strict=True):
        first = got.weights_versions[0]
        count = got.weights_versions.count(first)
        whole += count == len(got.tokens)
        expected = naive[first % len(naive)].follow(prompt, p, got.tokens[:count])
        assert_same(beginning(got, count), replace(expected, weights_versions=(first,) * len(expected.tokens)))
    return whole


def beginning(completion: Completion, count: int) -> Completion:
    if count == len(completion.tokens):
        return completion
    return replace(
        completion,
        tokens=completion.tokens[:count],
        logps=completion.logps[:count],
        kept_logps=completion.kept_logps[:count],
        truncation_logps=completion.truncation_logps[:count],
        weights_versions=completion.weights_versions[:count],
        top_logps=None if completion.top_logps is None else completion.top_logps[:count],
        stop="abort",
    )
