"""Random schedules of requests: arrivals, prompts that share beginnings, settings, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posttrain.rollout.native import NativeEngine
from posttrain.rollout.types import Completion, SamplingParams, sample_key
from tests.rollout.engines import UNUSUAL, params

Request = tuple[list[int], SamplingParams]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a seed stands for; `waits`: turns of the event loop before each request arrives."""

    requests: Sequence[Request]
    waits: Sequence[int]


def schedule(seed: int, *, vocabulary: int, longest: int, temperature: float, unusual: bool) -> Schedule:
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
            requests.append((tokens, replace(params(**changes), key=sample_key(seed, 0, prompt, sample))))
    order = rng.permutation(len(requests))
    return Schedule(requests=[requests[i] for i in order], waits=rng.choice([0, 0, 1, 30], len(requests)).tolist())


def run(engine: NativeEngine, schedule: Schedule) -> list[Completion]:
    async def all_of_it() -> list[Completion]:
        tasks = []
        for request, wait in zip(schedule.requests, schedule.waits, strict=True):
            for _ in range(wait):
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(engine.generate(*request)))
        return await asyncio.gather(*tasks)

    return asyncio.run(all_of_it())
