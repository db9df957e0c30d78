"""Turns in rounds: what is submitted together, and in which order, depends on no delay."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from posttrain.data.prompt_images import PromptImages
from posttrain.rl.group_tasks import Journal, Rounds
from posttrain.rollout.types import Completion, Requests, SamplingParams
from posttrain.runtime.event_loop import run_async

TURNS = {(0, n): n % 3 + 1 for n in range(8)}
"""Turns of each sample, by sampling key."""


class Recording:
    """Engine that records which requests it has at once. What is not prepared takes time before that."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int]]] = []
        self._running = 0
        self._prepared: set[tuple[int, int]] = set()

    async def prepare(
        self, prompt: Sequence[int], params: SamplingParams, *, images: PromptImages | None = None
    ) -> None:
        if params.key not in self._prepared:
            await asyncio.sleep(0.001 * (params.key[1] % 3))
            self._prepared.add(params.key)

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        await self.prepare(prompt, params)
        if not self._running:
            self.batches.append([])
        self.batches[-1].append(params.sample_key)
        self._running += 1
        await asyncio.sleep(0.002 * (params.key[1] % 2))
        self._running -= 1
        return Completion(
            tokens=(1,), logps=(0.0,), kept_logps=(0.0,), truncation_logps=(0.0,), stop="length", weights_versions=(0,)
        )

    def update_weights(self, model: object, version: int) -> None: ...

    def close(self) -> None: ...


def params(sample: tuple[int, int], turn: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=1.0, stop_token_ids=(), key=(turn + 9, sample[1]), sample=sample)


async def sample(rounds: Rounds, key: tuple[int, int], draw: random.Random) -> None:
    try:
        for turn in range(TURNS[key]):
            await asyncio.sleep(draw.random() * 0.01)
            await rounds.generate([1], params(key, turn))
        await asyncio.sleep(draw.random() * 0.01)
    finally:
        rounds.leave(1)


def batches(seed: int) -> list[list[tuple[int, int]]]:
    async def run() -> None:
        rounds.expect(list(TURNS))
        draw = random.Random(seed)
        await asyncio.gather(*(sample(rounds, key, draw) for key in reversed(TURNS)))

    engine = Recording()
    rounds = Rounds(engine)
    run_async(run())
    return engine.batches


def test_rounds_do_not_depend_on_delays() -> None:
    """Turned red by: turns that are submitted as they come, or are prepared only then; a round that waits for samples
    that have ended."""
    found = [batches(seed) for seed in range(4)]
    keys = list(TURNS)
    assert found[0] == [keys, [k for k in keys if TURNS[k] > 1], [k for k in keys if TURNS[k] > 2]]
    assert all(one == found[0] for one in found)


def test_a_journal_knows_the_requests_of_a_sample_after_a_restart() -> None:
    """Each is replayed, whichever comes first, until the sample is forgotten."""
    made = [Journal(Recording()) for _ in range(2)]

    async def ask(journal: Journal, *prompts: int) -> None:
        requests = Requests(lambda number: replace(params((0, 5)), key=(3, number), sample=(0, 5)))
        for prompt in prompts:
            await journal.generate([prompt], requests([prompt]))

    run_async(ask(made[0], 1, 2, 1))
    made[1].restore(made[0].state(()))
    run_async(ask(made[1], 2, 1, 1))
    engine = made[1]._engine
    assert isinstance(engine, Recording) and engine.batches == []
    made[1].forget([(0, 5)])
    assert made[1].state(())["turns"] == []


def test_a_cancelled_sample_holds_nobody_up_and_strangers_pass() -> None:
    async def run() -> None:
        rounds.expect([(0, 0), (0, 1)])
        first = asyncio.ensure_future(rounds.generate([1], params((0, 0))))
        await rounds.generate([1], params((7, 7)))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        rounds.leave(1)
        await asyncio.wait_for(rounds.generate([1], params((0, 1))), 10.0)

    engine = Recording()
    rounds = Rounds(engine)
    run_async(run())
    assert [key for batch in engine.batches for key in batch] == [(7, 7), (0, 1)]
