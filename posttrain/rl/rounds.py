"""Turns in rounds: what the engine computes together does not depend on the time that environments take."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from posttrain.rollout.types import Completion, RolloutEngine, SamplingParams

Key = tuple[int, int]


class Rounds:
    """Rollout engine whose samples take their turns together: those of a round are submitted, in a fixed order, when
    every sample waits for its next turn or has ended.

    An engine's log-probabilities change by rounding with the samples that it computes at the same time; so they depend
    on no clock. Samples of one turn are all submitted at once. Samples that are not expected pass.
    """

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        self._order: dict[Key, int] = {}
        self._waiting: dict[Key, list[asyncio.Future[None]]] = {}
        self._live = 0

    def expect(self, keys: Sequence[Key]) -> None:
        """Wait for samples with these sampling keys, which take their turns in this order."""
        if not self._live:
            self._order.clear()
        for key in keys:
            self._order[key] = len(self._order)
        self._live += len(keys)

    def leave(self, count: int) -> None:
        """Wait for so many samples less: they have ended."""
        self._live -= count
        self._release()

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        if params.sample_key in self._order:
            loop = asyncio.get_running_loop()
            turn = loop.create_future()
            self._waiting.setdefault(params.sample_key, []).append(turn)
            # Later: who is last must not go on before the others.
            loop.call_soon(self._release)
            try:
                await turn
            finally:
                if turn.cancelled():
                    self._forget(params.sample_key, turn)
        return await self._engine.generate(prompt, params)

    def update_weights(self, model: Any, version: int) -> None:
        self._engine.update_weights(model, version)

    def close(self) -> None:
        self._engine.close()

    def _release(self) -> None:
        """Begin a round, if all are there."""
        if not self._waiting or len(self._waiting) < self._live:
            return
        waiting, self._waiting = self._waiting, {}
        for key in sorted(waiting, key=self._order.__getitem__):
            for turn in waiting[key]:
                if not turn.done():
                    turn.set_result(None)

    def _forget(self, key: Key, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(key, [])
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._waiting.pop(key, None)
