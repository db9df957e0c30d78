"""Source of groups: numbered prompts, in the order of a dataset or drawn by a curriculum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from posttrain.rl.curriculum import Curriculum
from posttrain.rl.sampler import IssuedGroup
from posttrain.rollout.trajectory import Example, Group


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
