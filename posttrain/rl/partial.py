"""The prompts of steps that leave samples to later ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from posttrain.data.pipeline import PromptBatches
from posttrain.rl.sampler import Unfinished
from posttrain.rl.types import Example
from posttrain.rollout.types import Completion


class PromptsAhead:
    """As many new prompts as are missing from `in_flight`, and in `left` what the step before has left. Its state holds
    both, with all that was sampled: a resumed run goes on with the same tokens."""

    def __init__(self, prompts: PromptBatches, examples: Sequence[Example], in_flight: int):
        """`prompts`: one by one."""
        self._prompts, self._in_flight = prompts, in_flight
        self._examples = {example.index: example for example in examples}
        self.left: Sequence[Unfinished] = ()

    def __next__(self) -> list[int]:
        return [index for _ in range(self._in_flight - len(self.left)) for index in next(self._prompts)]

    def state(self) -> dict[str, Any]:
        return {"prompts": self._prompts.state(), "left": [_to_json(group) for group in self.left]}

    def restore(self, state: dict[str, Any]) -> None:
        self._prompts.restore(state["prompts"])
        self.left = [_from_json(group, self._examples) for group in state["left"]]


def _to_json(group: Unfinished) -> dict[str, Any]:
    completions = {str(sample): asdict(completion) for sample, completion in group.completions.items()}
    return {"row": group.example.index, "step": group.step, "prompt": group.prompt, "completions": completions}


def _from_json(group: dict[str, Any], examples: Mapping[int, Example]) -> Unfinished:
    completions = {int(sample): _completion(fields) for sample, fields in group["completions"].items()}
    return Unfinished(
        example=examples[group["row"]], step=group["step"], prompt=group["prompt"], completions=completions
    )


def _completion(fields: dict[str, Any]) -> Completion:
    lists = ("tokens", "logps", "kept_logps", "weights_versions")
    return Completion(**{**fields, **{name: tuple(fields[name]) for name in lists}})
