"""Queue of an asynchronous run as data for a checkpoint: JSON, and flat arrays with a value for each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from posttrain.reward.types import RewardError, Rewards
from posttrain.rl.exchange import fields_of, trajectory_of
from posttrain.rl.group_tasks import Queue, QueuedGroup, QueuedWave
from posttrain.rl.record_format import TOKENS
from posttrain.rl.sampler import IssuedGroup
from posttrain.rollout.trajectory import Example, Trajectory, Turn
from posttrain.tree import Mean

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
