"""Prompt stream for partial rollouts: keeps a fixed number of prompts in flight across steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from posttrain.data.pipeline import PromptBatches
from posttrain.rl.sampler import PartialGroup
from posttrain.rl.types import Example
from posttrain.rollout.types import Completion


class OversampledPrompts:
    """Stream of new prompts that fills up `in_flight` beside the `unfinished` groups of the previous step. Its state
    holds both, including sampled tokens, so that a resumed run continues with the same tokens."""

    def __init__(self, prompts: PromptBatches, examples: Sequence[Example], in_flight: int):
        """`prompts`: stream of single prompts."""
        self._prompts, self._in_flight = prompts, in_flight
        self._examples = {example.index: example for example in examples}
        self.unfinished: Sequence[PartialGroup] = ()

    def __next__(self) -> list[int]:
        return [index for _ in range(self._in_flight - len(self.unfinished)) for index in next(self._prompts)]

    def state(self) -> dict[str, Any]:
        return {"prompts": self._prompts.state(), "unfinished": [_to_json(group) for group in self.unfinished]}

    def restore(self, state: dict[str, Any]) -> None:
        self._prompts.restore(state["prompts"])
        self.unfinished = [_from_json(group, self._examples) for group in state["unfinished"]]


def _to_json(group: PartialGroup) -> dict[str, Any]:
    completions = {str(sample): asdict(completion) for sample, completion in group.completions.items()}
    return {"row": group.example.index, "step": group.step, "prompt": group.prompt, "completions": completions}


def _from_json(group: dict[str, Any], examples: Mapping[int, Example]) -> PartialGroup:
    completions = {int(sample): _completion(fields) for sample, fields in group["completions"].items()}
    return PartialGroup(
        example=examples[group["row"]], step=group["step"], prompt=group["prompt"], completions=completions
    )


def _completion(fields: dict[str, Any]) -> Completion:
    lists = ("tokens", "logps", "kept_logps", "weights_versions")
    return Completion(**{**fields, **{name: tuple(fields[name]) for name in lists}})
