"""Traces of `jax.profiler`: steps, spans of the host, operations of each device, and the table of a step's time."""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from posttrain.runtime.profiler import SPAN, STEP

DEVICE = "/device:"
"""Beginning of the names of planes with a TPU's or GPU's operations."""
OPS = "XLA Ops"
"""Line of a device plane with its operations; without it, as on GPUs, each line is a stream."""
AHEAD = ("Async", "Steps", "Framework", "Source", "XLA Modules")
"""Beginnings of the names of lines that repeat operations, or tell of copies beside them."""


class Span(NamedTuple):
    """Named time of the host."""

    start: float
    end: float
    name: str
    values: Mapping[str, int]


class Op(NamedTuple):
    """Operation of a device."""

    start: float
    end: float
    name: str
    program: str


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Recorded trace."""

    steps: Sequence[Span]
    """Whole steps in order; `values` has `step_num`."""
    spans: Sequence[Span]
    ops: Mapping[str, Sequence[Op]] = field(default_factory=dict)
    """Operations by device, in order of their starts."""

    @classmethod
    def read(cls, file: Path) -> Trace:
        """Read an XSpace file."""
        import jax

        return cls.of(jax.profiler.ProfileData.from_file(str(file)))

    @classmethod
    def of(cls, data: Any) -> Trace:
        """Trace of a `jax.profiler.ProfileData`."""
        steps: list[Span] = []
        spans: list[Span] = []
        ops: dict[str, list[Op]] = {}
        for plane in data.planes:
            if plane.name.startswith(DEVICE):
                ops.setdefault(plane.name.removeprefix(DEVICE), []).extend(_device_ops(plane))
                continue
            for line in plane.lines:
                for event in line.events:
                    _read_host(event, steps, spans, ops)
        ordered = {device: sorted(found) for device, found in sorted(ops.items()) if found}
        return cls(steps=sorted(steps, key=lambda s: s.start), spans=sorted(spans, key=lambda s: s.start), ops=ordered)


def _read_host(event: Any, steps: list[Span], spans: list[Span], ops: dict[str, list[Op]]) -> None:
    """Add an event of a host thread: a step, a span, or, on CPU, an operation."""
    start, end, name = event.start_ns, event.start_ns + event.duration_ns, event.name
    if name.startswith(SPAN):
        spans.append(Span(start, end, name.removeprefix(SPAN), dict(event.stats)))
        return
    values = dict(event.stats)
    if name == STEP and "step_num" in values:
        steps.append(Span(start, end, name, values))
    elif "hlo_op" in values:
        device = f"CPU:{values.get('device_ordinal', 0)}"
        ops.setdefault(device, []).append(Op(start, end, str(values["hlo_op"]), str(values.get("hlo_module", ""))))


def _device_ops(plane: Any) -> Iterator[Op]:
    lines = list(plane.lines)
    chosen = [line for line in lines if line.name == OPS] or [
        line for line in lines if not line.name.startswith(AHEAD) and line.name != OPS
    ]
    for line in chosen:
        for event in line.events:
            values = dict(event.stats)
            name = str(values.get("hlo_op", event.name)).split(" = ")[0].removeprefix("%")
            yield Op(event.start_ns, event.start_ns + event.duration_ns, name, str(values.get("hlo_module", "")))


def innermost(spans: Iterable[Span], start: float, end: float) -> Iterator[tuple[float, float, Span | None]]:
    """Cut the time from `start` to `end` at the ends of spans; yield each piece with the innermost span, or None.

    The innermost span is the one that began last, in whatever thread.
    """
    inside = sorted((s.start, s.end, number, s) for number, s in enumerate(spans) if s.end > start and s.start < end)
    edges = (min(max(edge, start), end) for piece in inside for edge in piece[:2])
    cuts = sorted({start, end, *edges})
    active: list[tuple[float, float, int, Span]] = []
    following = 0
    for left, right in pairwise(cuts):
        while following < len(inside) and inside[following][0] <= left:
            begun, ended, number, span = inside[following]
            heapq.heappush(active, (-begun, ended, -number, span))
            following += 1
        while active and active[0][1] <= left:
            heapq.heappop(active)
        yield left, right, active[0][3] if active else None


def busy(ops: Sequence[Op]) -> list[tuple[float, float]]:
    """Union of the operations' times, in order."""
    merged: list[tuple[float, float]] = []
    for op in ops:
        if merged and op.start <= merged[-1][1]:
            if op.end > merged[-1][1]:
                merged[-1] = (merged[-1][0], op.end)
        else:
            merged.append((op.start, op.end))
    return merged


def own_times(ops: Sequence[Op]) -> Iterator[tuple[Op, float]]:
    """Each operation with its time less that of the operations inside it, such as those of a loop's body."""
    open_ops: list[list[Any]] = []  # [operation, time of what is inside]
    for op in sorted(ops, key=lambda o: (o.start, -o.end)):
        while open_ops and open_ops[-1][0].end <= op.start:
            yield _closed(open_ops)
        if open_ops and op.end <= open_ops[-1][0].end:
            open_ops[-1][1] += op.end - op.start
        open_ops.append([op, 0.0])
    while open_ops:
        yield _closed(open_ops)


def _closed(open_ops: list[list[Any]]) -> tuple[Op, float]:
    op, inside = open_ops.pop()
    return op, max(0.0, op.end - op.start - inside)


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
