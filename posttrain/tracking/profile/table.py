"""Table of a step's wall time: by phase, with the share in which devices compute, by program and by operation."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from posttrain.tracking.profile.trace import Trace, busy, innermost, own_times

KeyT = TypeVar("KeyT")

UNEXPLAINED = "unexplained"
NUM_OPS = 8
"""Number of operations in a table."""
KINDS = {
    "network": re.compile(r"all-(reduce|gather|to-all)|reduce-scatter|collective|ppermute|send|recv|^nccl", re.I),
    "products": re.compile(r"dot|convolution|gemm|matmul|einsum|cutlass", re.I),
    "kernels": re.compile(r"custom-call|attention|splash|paged|gmm|mosaic|pallas|triton", re.I),
    "copies": re.compile(r"copy|transpose|bitcast|reshape|memcpy|memset|concatenate|dynamic-update-slice", re.I),
}
"""Kinds of operations by their names; the first that matches counts."""


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """Time of a phase: of the innermost span, in seconds of a step."""

    name: str
    seconds: float
    share: float
    """Share of the step's wall time."""
    calls: float
    """Number of spans in a step."""
    device_busy: float
    """Share of the phase in which a device computes, a mean over devices."""


@dataclass(frozen=True, kw_only=True)
class TimeTable:
    """Wall time of the recorded steps, as a mean over them."""

    steps: Sequence[int]
    seconds: float
    """Wall time of a step."""
    phases: Sequence[PhaseTime]
    """Phases by falling time; `unexplained` is what no span covers."""
    programs: Mapping[str, float]
    """Seconds of a step in which a device runs each program, by falling time."""
    kinds: Mapping[str, float]
    """Seconds of a step by kind of operation."""
    ops: Sequence[tuple[str, str, float]]
    """Largest operations: name, program, seconds of a step."""
    tail: float
    """Share of a step in which at most a quarter of the sampler's slots decode."""
    compilations: float = 0.0
    """Programs compiled in a step."""

    @property
    def explained(self) -> float:
        """Share of the wall time that phases explain."""
        return 1.0 - self.share(UNEXPLAINED)

    @property
    def device_busy(self) -> float:
        """Share of a step in which a device computes."""
        return sum((phase.device_busy * phase.share for phase in self.phases), 0.0)

    def share(self, *names: str) -> float:
        """Share of a step in these phases and their parts (`rollout` has `rollout/decode`)."""
        return sum((p.share for p in self._named(names)), 0.0)

    def idle(self, *names: str) -> float:
        """Share of a step in which devices wait in these phases."""
        return sum((p.share * (1.0 - p.device_busy) for p in self._named(names)), 0.0)

    def _named(self, names: Sequence[str]) -> Iterator[PhaseTime]:
        return (p for p in self.phases if any(p.name == name or p.name.startswith(f"{name}/") for name in names))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "explained": self.explained, "device_busy": self.device_busy}


def time_table(trace: Trace, *, compilations: int = 0) -> TimeTable:
    """Table of a trace's whole steps. ValueError if there is none."""
    if not trace.steps:
        raise ValueError("the trace holds no whole step")
    number = len(trace.steps)
    wall = sum(step.end - step.start for step in trace.steps)
    unions = [_Union(busy(ops)) for ops in trace.ops.values()]
    seconds: dict[str, float] = defaultdict(float)
    worked: dict[str, float] = defaultdict(float)
    tail = 0.0
    for step in trace.steps:
        for left, right, span in innermost(trace.spans, step.start, step.end):
            name = UNEXPLAINED if span is None else span.name
            seconds[name] += right - left
            worked[name] += sum((union.within(left, right) for union in unions), 0.0) / max(len(unions), 1)
            if span is not None and span.values.get("slots", 0) >= 4 * span.values.get("rows", 0) > 0:
                tail += right - left
    calls = Counter(
        span.name for span in trace.spans if any(step.start <= span.start < step.end for step in trace.steps)
    )
    phases = [
        PhaseTime(
            name=name,
            seconds=time / number / 1e9,
            share=time / wall,
            calls=calls[name] / number,
            device_busy=worked[name] / time,
        )
        for name, time in _falling(seconds)
    ]
    programs, kinds, ops = _by_operation(trace)
    return TimeTable(
        steps=[step.values["step_num"] for step in trace.steps],
        seconds=wall / number / 1e9,
        phases=phases,
        programs=programs,
        kinds=kinds,
        ops=ops,
        tail=tail / wall,
        compilations=compilations / number,
    )


def kind_of(op: str) -> str:
    """Kind of an operation, from its name.

    >>> kind_of("all-gather-start.3"), kind_of("fusion.12")
    ('network', 'fusions and others')
    """
    return next((kind for kind, pattern in KINDS.items() if pattern.search(op)), "fusions and others")


def _by_operation(trace: Trace) -> tuple[dict[str, float], dict[str, float], list[tuple[str, str, float]]]:
    """Seconds of a step by program, by kind and of the largest operations, a mean over devices."""
    programs: dict[str, float] = defaultdict(float)
    kinds: dict[str, float] = defaultdict(float)
    ops: dict[tuple[str, str], float] = defaultdict(float)
    scale = 1e9 * len(trace.steps) * max(len(trace.ops), 1)
    first, last = trace.steps[0].start, trace.steps[-1].end
    for found in trace.ops.values():
        for op, own in own_times([op for op in found if first <= op.start < last]):
            programs[op.program] += own / scale
            kinds[kind_of(op.name)] += own / scale
            ops[op.name, op.program] += own / scale
    largest = [(name, program, own) for (name, program), own in _falling(ops)[:NUM_OPS]]
    return dict(_falling(programs)), dict(_falling(kinds)), largest


def _falling(seconds: Mapping[KeyT, float]) -> list[tuple[KeyT, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


class _Union:
    """Disjoint intervals in order, and their time within others."""

    def __init__(self, intervals: Sequence[tuple[float, float]]) -> None:
        self._intervals, self._ends = intervals, [end for _, end in intervals]

    def within(self, left: float, right: float) -> float:
        return sum(self._overlaps(left, right), 0.0)

    def _overlaps(self, left: float, right: float) -> Iterator[float]:
        for index in range(bisect_right(self._ends, left), len(self._intervals)):
            start, end = self._intervals[index]
            if start >= right:
                return
            yield min(end, right) - max(start, left)
