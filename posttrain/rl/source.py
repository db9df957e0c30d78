"""Source of groups: numbered prompts, beside the groups that earlier steps left unfinished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from posttrain.rl.sampler import IssuedGroup
from posttrain.rl.types import Example
from posttrain.rollout.types import Completion


@runtime_checkable
class PromptStream(Protocol):
    """Endless places in a list of examples, with a position to resume from."""

    def __next__(self) -> int: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Source:
    """Stream of groups over the prompts of a dataset. Its state holds the unfinished groups as well, with sampled
    tokens, so that a resumed run goes on with the same tokens."""

    def __init__(self, prompts: PromptStream, examples: Sequence[Example]):
        self._prompts, self._examples = prompts, examples
        self.issued = 0
        """Number of groups begun since the start of the run."""
        self.unfinished: Sequence[IssuedGroup] = ()
        """Groups for a later step to go on with."""

    def take(self, count: int, version: int) -> list[IssuedGroup]:
        """Begin `count` new groups under a version of the weights."""
        first = self.issued
        self.issued += count
        return [
            IssuedGroup(number=number, example=self._examples[next(self._prompts)], version=version)
            for number in range(first, first + count)
        ]

    def state(self) -> dict[str, Any]:
        unfinished = [_to_json(group) for group in self.unfinished]
        return {"prompts": self._prompts.state(), "issued": self.issued, "unfinished": unfinished}

    def restore(self, state: dict[str, Any]) -> None:
        self._prompts.restore(state["prompts"])
        self.issued = state["issued"]
        by_row = {example.index: example for example in self._examples}
        self.unfinished = [_from_json(group, by_row) for group in state["unfinished"]]


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
