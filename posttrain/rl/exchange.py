"""Exchange of groups between processes: each samples and scores its share, and all learn from the whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from posttrain.rl.sampler import IssuedGroup
from posttrain.rl.types import Example, Group, Trajectory
from posttrain.runtime import processes


def own_share(groups: Sequence[IssuedGroup]) -> list[IssuedGroup]:
    """Groups of this process: every process has begun the same ones."""
    return list(groups[processes.index() :: processes.count()])


def all_groups(own_P: Sequence[Group], issued: Sequence[IssuedGroup]) -> list[Group]:
    """Groups of all processes, in the order in which they were begun. Examples are not sent: each process has them."""
    if processes.count() == 1:
        return list(own_P)
    examples = {group.number: group.example for group in issued}
    sent = processes.all_gathered([[_packed(sample) for sample in group] for group in own_P])
    found: list[Group] = [[_unpacked(sample, examples) for sample in group] for part in sent for group in part]
    return sorted(found, key=lambda group: group[0].group)


def _packed(sample: Trajectory) -> dict[str, Any]:
    # The turn of the model alone: the messages before it are the example's.
    values = {field.name: getattr(sample, field.name) for field in fields(sample) if field.name != "example"}
    return values | {"messages": sample.messages[len(sample.example.messages) :]}


def _unpacked(values: Mapping[str, Any], examples: Mapping[int, Example]) -> Trajectory:
    example = examples[values["group"]]
    return Trajectory(**{**values, "example": example, "messages": [*example.messages, *values["messages"]]})
