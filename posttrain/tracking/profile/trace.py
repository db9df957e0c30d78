"""Reader of recorded traces: steps, spans of the host, and operations of each device, all in nanoseconds."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

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
