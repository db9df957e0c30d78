"""Journal of the completions of samples under way: a resumed run replays them and goes on in the middle of a turn."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain.rollout.types import Call, Completion, PausableEngine, RolloutEngine, SamplingParams

Key = tuple[int, int]
COLUMNS = {"tokens": np.int32, "logps": np.float32, "kept_logps": np.float32, "weights_versions": np.int32}
"""Fields of a completion with a value for each token."""


class Turn(NamedTuple):
    """Request of a sample."""

    sample: Key
    key: Key
    prompt: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Sequence[int], params: SamplingParams) -> Turn:
        return cls(params.sample_key, params.key, tuple(prompt))


class Journal:
    """Rollout engine that keeps the completions of its samples until they are forgotten.

    A sample that begins again after a restart asks for the same turns: it gets those that it had, and the engine goes
    on with one that was under way. Where an environment answers otherwise than before, the turns after it are new.
    """

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        self._known: dict[Turn, Completion] = {}

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        turn = Turn.of(prompt, params)
        known = self._known.get(turn)
        if known is None:
            known = await self._engine.generate(prompt, params)
        elif known.stop == "abort":
            assert isinstance(self._engine, PausableEngine), "others have no partial completions"
            known = await self._engine.generate(prompt, params, partial=known)
        self._known[turn] = known
        return known

    def update_weights(self, model: Any, version: int) -> None:
        self._engine.update_weights(model, version)

    def close(self) -> None:
        self._engine.close()

    def forget(self, keys: Collection[Key]) -> None:
        """Forget the samples with these sampling keys."""
        wanted = {*keys}
        self._known = {turn: completion for turn, completion in self._known.items() if turn.sample not in wanted}

    def state(self, under_way: Sequence[Call]) -> dict[str, Any]:
        """Completions, and those of `under_way` so far, as JSON and numpy arrays."""
        partial = {Turn.of(call.prompt, call.params): call.partial for call in under_way if call.partial is not None}
        turns = {**self._known, **partial}
        columns = {
            name: np.concatenate([np.asarray(getattr(one, name), dtype) for one in turns.values()])
            for name, dtype in COLUMNS.items()
            if turns
        }
        return {
            "turns": [
                {
                    **{name: list(ids) for name, ids in turn._asdict().items()},
                    "length": len(one.tokens),
                    "stop": one.stop,
                }
                for turn, one in turns.items()
            ],
            "tokens": columns,
        }

    def restore(self, state: dict[str, Any]) -> None:
        start = 0
        for turn in state["turns"]:
            end = start + turn["length"]
            own: dict[str, Any] = {name: tuple(values[start:end].tolist()) for name, values in state["tokens"].items()}
            known = Turn(*(tuple(turn[name]) for name in Turn._fields))
            self._known[known] = Completion(stop=turn["stop"], **own)
            start = end
