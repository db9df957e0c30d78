"""Exchange of groups between processes: each samples and scores its share, and all learn from the whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from posttrain.reward.rubric import joined
from posttrain.reward.types import Rewards
from posttrain.rl.sampler import IssuedGroup
from posttrain.rollout.trajectory import Example, Group, Trajectory
from posttrain.runtime import processes


def own_share(groups: Sequence[IssuedGroup]) -> list[IssuedGroup]:
    """Groups of this process: every process has begun the same ones, and samples a part of them in order."""
    first, end = (len(groups) * number // processes.count() for number in (processes.index(), processes.index() + 1))
    return list(groups[first:end])


def exchanged(
    own_P: Sequence[Group], own: Rewards | None, issued: Sequence[IssuedGroup]
) -> tuple[list[Group], Rewards]:
    """Groups and rewards of all processes, in the order in which the groups were begun. Examples are not sent: each
    process has them. `own`: None in a process without a group."""
    if processes.count() == 1:
        assert own is not None
        return list(own_P), own
    examples = {group.number: group.example for group in issued}
    sent = processes.all_gathered(([[_packed(sample) for sample in group] for group in own_P], own))
    groups_P: list[Group] = [[_unpacked(sample, examples) for sample in group] for part, _ in sent for group in part]
    return groups_P, joined([rewards for _, rewards in sent if rewards is not None])


def _packed(sample: Trajectory) -> dict[str, Any]:
    # The turn of the model alone: the messages before it are the example's.
    values = {field.name: getattr(sample, field.name) for field in fields(sample) if field.name != "example"}
    return values | {"messages": sample.messages[len(sample.example.messages) :]}


def _unpacked(values: Mapping[str, Any], examples: Mapping[int, Example]) -> Trajectory:
    example = examples[values["group"]]
    return Trajectory(**{**values, "example": example, "messages": [*example.messages, *values["messages"]]})
