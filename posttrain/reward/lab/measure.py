"""Measurement of a reward function on cases: values, failures, changes between calls, and times of single calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from posttrain.reward.call import Convention, convention_of
from posttrain.reward.function import Reward
from posttrain.reward.keywords import accepted
from posttrain.reward.lab.cases import ANSWER_COLUMNS, Case, Kind, LabRow, sample_of
from posttrain.reward.rubric import Rubric
from posttrain.reward.types import RewardError
from posttrain.rollout.trajectory import Trajectory

NUM_TIMED = 30
"""Maximum number of calls with a single sample that are timed."""
TIMED_S = 2.0
"""Seconds after which no further call is timed."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Values of a reward function for all cases, and what was seen besides."""

    name: str
    graded: bool
    """True if the function can tell right answers from wrong ones."""
    rows: Sequence[LabRow]
    cases: Sequence[Case]
    values: Float[np.ndarray, " N"]
    """NaN: not applicable or failed."""
    failures: Sequence[RewardError]
    """Failures of the first call; `sample` is the number of the case."""
    notes: Sequence[str]
    unequal: dict[str, list[int]]
    """Cases whose value changed, by the change of the call: `again`, `in another order`."""
    times_s: Sequence[float]
    """Durations of calls with a single sample."""

    def of(self, kind: Kind) -> dict[int, float]:
        """Highest value of the cases of a kind by row; rows without a value are left out."""
        found: dict[int, float] = {}
        for case, value in zip(self.cases, self.values, strict=True):
            if case.kind is kind and not np.isnan(value):
                found[case.row] = max(float(value), found.get(case.row, float(value)))
        return found


async def measure(
    reward: Reward, rows: Sequence[LabRow], cases: Sequence[Case], encode: Callable[[str], Sequence[int]]
) -> Measured:
    """Score all cases three times, the third time in another order, then a few one by one. A function that fails on all
    of them is called once."""
    rubric = Rubric([reward])
    samples = [sample_of(rows[case.row], case, number, encode) for number, case in enumerate(cases)]
    with rubric.running():
        first = await rubric.score([samples])
        values = first.parts_PG[reward.name][0]
        failed = {error.sample for error in first.errors}
        left = [number for number in range(len(cases)) if number not in failed]
        unequal: dict[str, list[int]] = {}
        times: list[float] = []
        if left:
            for change, order in (("again", left), ("in another order", left[::-1])):
                repeated = (await rubric.score([[samples[n] for n in order]])).parts_PG[reward.name][0]
                same = np.isclose(repeated, values[order], rtol=1e-5, atol=1e-7, equal_nan=True)
                if not same.all():
                    unequal[change] = [number for number, equal in zip(order, same, strict=True) if not equal]
            for number in left[:: -(-len(left) // NUM_TIMED)]:
                if sum(times) < TIMED_S:
                    times.append(await _timed(rubric, samples[number]))
    return Measured(
        name=reward.name,
        graded=is_graded(reward, rows[0]),
        rows=rows,
        cases=cases,
        values=values,
        failures=first.errors,
        notes=first.notes,
        unequal=unequal,
        times_s=times,
    )


async def _timed(rubric: Rubric, sample: Trajectory) -> float:
    start = time.perf_counter()
    await rubric.score([[sample]])
    return time.perf_counter() - start


def is_graded(reward: Reward, row: LabRow) -> bool:
    """Tell whether a function reads what tells right answers from wrong ones."""
    convention, names = convention_of(reward.function), accepted(reward.function)
    if convention is Convention.VERL or names is None:
        return True
    if convention is Convention.VERIFIERS:
        return bool(names & {"answer", "state", "info", "task"})
    answers = {name for name, value in row.row.items() if str(value) == row.answer}
    return bool(names & (answers | set(ANSWER_COLUMNS) | {"reward_model"}))
