"""Source of groups: numbered prompts, beside the groups that earlier steps left unfinished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from posttrain.rl.curriculum import Curriculum
from posttrain.rl.sampler import IssuedGroup
from posttrain.rollout.trajectory import Example, Group
from posttrain.rollout.types import Completion


@runtime_checkable
class PromptStream(Protocol):
    """Endless places in a list of examples, with a position to resume from."""

    def __next__(self) -> int: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Source:
    """Stream of groups over the prompts of a dataset, in its order or drawn by a curriculum. Its state holds the
    unfinished groups as well, with sampled tokens, so that a resumed run goes on with the same tokens."""

    def __init__(self, prompts: PromptStream, examples: Sequence[Example], curriculum: Curriculum | None = None):
        self._prompts, self._examples, self._curriculum = prompts, examples, curriculum
        self._by_row = {example.index: example for example in examples}
        self._places = {} if curriculum is None else {example.index: n for n, example in enumerate(examples)}
        self.issued = 0
        """Number of groups begun since the start of the run."""
        self.unfinished: Sequence[IssuedGroup] = ()
        """Groups for a later step to go on with."""

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
        unfinished = [_to_json(group) for group in self.unfinished]
        state = {"prompts": self._prompts.state(), "issued": self.issued, "unfinished": unfinished}
        return state if self._curriculum is None else {**state, "curriculum": self._curriculum.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._prompts.restore(state["prompts"])
        if self._curriculum is not None:
            self._curriculum.restore(state["curriculum"])
        self.issued = state["issued"]
        self.unfinished = [_from_json(group, self._by_row) for group in state["unfinished"]]


def _to_json(group: IssuedGroup) -> dict[str, Any]:
    completions = {str(sample): asdict(completion) for sample, completion in group.completions.items()}
    return {
        "row": group.example.index,
        "number": group.number,
        "version": group.version,
        "completions": completions,
    }


def _from_json(group: dict[str, Any], examples: Mapping[int, Example]) -> IssuedGroup:
    completions = {int(sample): _completion(fields) for sample, fields in group["completions"].items()}
    return IssuedGroup(
        number=group["number"],
        example=examples[group["row"]],
        version=group["version"],
        completions=completions,
    )


def _completion(fields: dict[str, Any]) -> Completion:
    lists = ("tokens", "logps", "kept_logps", "weights_versions")
    return Completion(**{**fields, **{name: tuple(fields[name]) for name in lists}})
