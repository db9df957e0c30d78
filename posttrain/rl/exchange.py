"""Exchange of groups between processes: each samples and scores its share, and all learn from the whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

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
    sent = processes.all_gathered(([[fields_of(sample) for sample in group] for group in own_P], own))
    groups_P: list[Group] = [
        [trajectory_of(sample, examples) for sample in group] for part, _ in sent for group in part
    ]
    return groups_P, Rewards.concatenated([rewards for _, rewards in sent if rewards is not None])


def fields_of(sample: Trajectory) -> dict[str, Any]:
    """Fields of a trajectory without its example, for `trajectory_of`."""
    # What follows the prompt alone, unless the environment made the prompt.
    values = {field.name: getattr(sample, field.name) for field in fields(sample) if field.name != "example"}
    prompt = None
    if sample.turns or sample.error is not None:
        prompt = {"messages": sample.example.messages, "prompt_tokens": sample.example.prompt_tokens}
    more = [fields_of(row) for row in sample.more]
    return values | {"messages": sample.completion_messages, "prompt": prompt, "more": more}


def trajectory_of(values: Mapping[str, Any], examples: Mapping[int, Example]) -> Trajectory:
    """Trajectory of `fields_of`. `examples`: by number of the group."""
    values = dict(values)
    prompt = values.pop("prompt")
    example = examples[values["group"]]
    example = example if prompt is None else replace(example, **prompt)
    more = [trajectory_of(row, examples) for row in values["more"]]
    messages = [*example.messages, *values["messages"]]
    return Trajectory(**{**values, "example": example, "messages": messages, "more": more})
