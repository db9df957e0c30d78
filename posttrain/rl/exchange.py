"""Groups as plain data: exchanged between processes, and kept in checkpoints of what is ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from posttrain.reward.types import RewardError, Rewards
from posttrain.rl.sampler import IssuedGroup
from posttrain.rl.store import TOKENS
from posttrain.rollout.trajectory import Example, Group, Trajectory, Turn
from posttrain.runtime import processes
from posttrain.tree import Mean


@dataclass(frozen=True, kw_only=True)
class QueuedGroup:
    """Group between its beginning and its step."""

    issued: IssuedGroup
    group: Group | None
    """None: not all of its samples are there."""


@dataclass(frozen=True, kw_only=True)
class QueuedWave:
    """Groups of a step that were begun together."""

    groups: Sequence[QueuedGroup]
    rewards: Rewards | None = None
    """None: not all groups are scored."""
    observed: bool = False
    """True if the source has taken note of the rewards."""


Queue = Mapping[int, Sequence[QueuedWave]]
"""Waves of groups that are ahead, by step."""


def new_wave(issued: Sequence[IssuedGroup]) -> QueuedWave:
    """Wave of groups of which nothing is sampled."""
    return QueuedWave(groups=[QueuedGroup(issued=one, group=None) for one in issued])


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


State = dict[str, Any]


def packed(queue: Queue) -> State:
    """State of a queue; numpy arrays stand among JSON. Of groups that are not sampled only their beginning."""
    rows: list[Trajectory] = []
    steps = [
        {"step": step, "waves": [_wave_state(wave, rows) for wave in waves]} for step, waves in sorted(queue.items())
    ]
    arrays: dict[str, np.ndarray] = {}
    if rows:
        for name, dtype in TOKENS.items():
            arrays[name] = np.concatenate([np.asarray(getattr(row, name), dtype) for row in rows])
        if rows[0].experts is not None:
            arrays["experts"] = np.concatenate([row.experts for row in rows if row.experts is not None])
    return {"steps": steps, "tokens": arrays}


def unpacked(state: State, example: Callable[[int], Example]) -> Queue:
    """Queue of a state. `example`: that of a row of the dataset."""
    rows = Rows(state["tokens"])
    return {step["step"]: [_wave(wave, rows, example) for wave in step["waves"]] for step in state["steps"]}


class Rows:
    """Token sequences, one after the other."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays, self._start = arrays, 0

    def take(self, length: int) -> State:
        """Columns of the next sequence."""
        start, self._start = self._start, self._start + length
        columns: State = {name: self._arrays[name][start : self._start].tolist() for name in TOKENS}
        experts = self._arrays.get("experts")
        return {**columns, "experts": None if experts is None else experts[start : self._start]}


def _wave_state(wave: QueuedWave, rows: list[Trajectory]) -> State:
    groups = [_group(one, rows) for one in wave.groups]
    rewards = None if wave.rewards is None else _rewards_state(wave.rewards)
    return {"groups": groups, "rewards": rewards, "observed": wave.observed}


def _wave(state: State, rows: Rows, example: Callable[[int], Example]) -> QueuedWave:
    groups = []
    for one in state["groups"]:
        issued = IssuedGroup(number=one["number"], version=one["version"], example=example(one["row"]))
        samples = [_sample(fields, issued, rows) for fields in one["samples"] or ()]
        groups.append(QueuedGroup(issued=issued, group=samples or None))
    rewards = None if state["rewards"] is None else _rewards(state["rewards"])
    return QueuedWave(groups=groups, rewards=rewards, observed=state["observed"])


def _group(one: QueuedGroup, rows: list[Trajectory]) -> State:
    """JSON of a group, whose token sequences are added to `rows`."""
    samples = None
    if one.group is not None:
        samples = [_without_columns(fields_of(sample)) for sample in one.group]
        rows += [row for sample in one.group for row in sample.rows]
    return {
        "number": one.issued.number,
        "row": one.issued.example.index,
        "version": one.issued.version,
        "samples": samples,
    }


def _without_columns(fields: State) -> State:
    plain = {name: value for name, value in fields.items() if name not in (*TOKENS, "experts")}
    prompt = fields["prompt"]
    if prompt is not None:
        plain["prompt"] = {"messages": list(prompt["messages"]), "prompt_tokens": list(prompt["prompt_tokens"])}
    more = [_without_columns(row) for row in fields["more"]]
    return {**plain, "more": more, "messages": list(fields["messages"]), "length": len(fields["tokens"])}


def _with_columns(fields: State, rows: Rows) -> State:
    # The first row of a sample, then its others.
    own = {**fields, **rows.take(fields["length"]), "turns": [Turn(*turn) for turn in fields["turns"]]}
    del own["length"]
    return {**own, "more": [_with_columns(row, rows) for row in fields["more"]]}


def _sample(fields: State, issued: IssuedGroup, rows: Rows) -> Trajectory:
    return trajectory_of(_with_columns(fields, rows), {issued.number: issued.example})


def _rewards_state(rewards: Rewards) -> State:
    return {
        "total": rewards.total_PG.tolist(),
        "parts": {name: part.tolist() for name, part in rewards.parts_PG.items()},
        "errors": [asdict(error) for error in rewards.errors],
        "metrics": {name: [float(mean.total), float(mean.weight)] for name, mean in rewards.metrics.items()},
        "extras": {name: list(values) for name, values in rewards.extras.items()},
        "notes": list(rewards.notes),
    }


def _rewards(state: State) -> Rewards:
    return Rewards(
        total_PG=np.asarray(state["total"], np.float32),
        parts_PG={name: np.asarray(part, np.float32) for name, part in state["parts"].items()},
        errors=[RewardError(**error) for error in state["errors"]],
        metrics={name: Mean(total=total, weight=weight) for name, (total, weight) in state["metrics"].items()},
        extras=state["extras"],
        notes=state["notes"],
    )
