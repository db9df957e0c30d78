"""Report of recorded steps: the time table in lines of text, the advice, and both as JSON beside the trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from posttrain.runtime.files import write_whole
from posttrain.runtime.profiler import latest_trace
from posttrain.tracking.profile.advice import advice
from posttrain.tracking.profile.table import TimeTable, time_table
from posttrain.tracking.profile.trace import Trace

FILE = "profile.json"
NAME_CELLS = 48


def read_profile(folder: Path, *, compilations: int = 0) -> TimeTable:
    """Read the newest trace of a folder, and write `profile.json` beside it."""
    table = time_table(Trace.read(latest_trace(folder)), compilations=compilations)
    write_whole(folder / FILE, json.dumps({**table.as_json(), "advice": advice(table)}, indent=1))
    return table


def describe_profile(table: TimeTable, folder: Path) -> Iterator[str]:
    """Lines of a time table."""
    first, last = table.steps[0], table.steps[-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    yield (
        f"profile of {steps}: {table.seconds:.4g} s a step, {table.explained:.1%} of it explained, devices compute in "
        f"{table.device_busy:.0%}"
    )
    yield f"  {'phase':<28}{'seconds':>10}{'share':>9}{'devices':>9}{'calls':>9}"
    for phase in table.phases:
        devices = f"{phase.device_busy:.0%}" if table.programs else "-"
        numbers = f"{phase.seconds:>10.4g}{phase.share:>9.1%}{devices:>9}{phase.calls:>9.4g}"
        yield f"  {_cut(phase.name, 28):<28}{numbers}"
    yield from _shares("devices by program", table.programs, table.seconds)
    yield from _shares("devices by kind of operation", table.kinds, table.seconds)
    for name, program, seconds in table.ops[:3]:
        yield f"  largest operation: {_cut(name, NAME_CELLS)} of {program or 'an unnamed program'}, {seconds:.3g} s"
    for line in advice(table):
        yield f"  {line}"
    yield f"  trace for XProf or TensorBoard (--logdir): {folder}"


def _shares(title: str, seconds: Mapping[str, float], whole: float) -> Iterator[str]:
    if seconds:
        parts = [f"{name or 'unnamed'} {value / whole:.1%}" for name, value in list(seconds.items())[:5]]
        yield f"  {title}: {', '.join(parts)}"


def _cut(text: str, cells: int) -> str:
    return text if len(text) <= cells else f"{text[: cells - 1]}…"
