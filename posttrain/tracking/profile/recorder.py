"""Recording of a few training steps, given ones or the first stable ones, and the report of where their time went."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from posttrain.metrics import CompileCounter
from posttrain.runtime.files import write_whole
from posttrain.runtime.profiler import latest_trace, start_recording, stop_recording
from posttrain.tracking.console import console
from posttrain.tracking.profile.advice import advice
from posttrain.tracking.profile.table import TimeTable, time_table
from posttrain.tracking.profile.trace import Trace

NUM_RECORDED = 3
"""Number of steps recorded by `auto`."""
NUM_STABLE, SPREAD = 4, 0.15
"""The time of a step is stable when this many last ones differ from their median by at most this share of it."""
PATIENCE = 30
"""Number of steps after which `auto` records even if their time is not stable."""


class StepRecorder:
    """Recorder of steps into a trace below `folder`, with a report when the last one is done.

    `steps`: first and last, counted from 1, or `auto`.
    """

    def __init__(self, folder: Path, steps: Literal["auto"] | Sequence[int], num_steps: int) -> None:
        self._folder, self._num_steps = folder, num_steps
        self._range = None if isinstance(steps, str) else (steps[0], min(steps[1], num_steps))
        self._seconds: deque[float] = deque(maxlen=NUM_STABLE)
        self._seen = 0
        self._closed = False
        self._compiles: CompileCounter | None = None

    @property
    def recording(self) -> bool:
        return self._compiles is not None

    def observe(self, seconds: float) -> None:
        """Note the wall time of a step that was done."""
        self._seconds.append(seconds)
        self._seen += 1

    def start_if_due(self, step: int, prepare: Callable[[], None]) -> None:
        """Start to record if `step`, about to begin, is the first one to record or beyond; `prepare` is called
        before."""
        if self._range is None and self._is_due(step):
            self._range = step, min(step + NUM_RECORDED - 1, self._num_steps)
        if self._range is None or self._closed or self.recording or step < self._range[0]:
            return
        # A run resumed after these steps; several steps at once may begin before and end after them.
        self._closed = self._seen == 0 and step > self._range[1]
        if self._closed:
            return
        prepare()
        self._folder.mkdir(parents=True, exist_ok=True)
        start_recording(self._folder)
        self._compiles = CompileCounter()

    def ends(self, done: int) -> bool:
        """Tell whether all steps that are recorded now are done."""
        return self.recording and self._range is not None and self._range[1] <= done

    def finish(self) -> None:
        """Write trace and report, and print the report."""
        compiled, self._closed = self._stop(), True
        table = read_profile(self._folder, compilations=compiled)
        for line in describe_profile(table, self._folder):
            console().print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Drop what is being recorded: the run stopped before the last of these steps."""
        if self.recording:
            self._stop()
            console().print(f"profile: the run stopped in the recorded steps; {self._folder} holds their trace only")

    def _stop(self) -> int:
        assert self._compiles is not None
        compiled = int(self._compiles.metrics()["perf/compilations"])
        self._compiles.close()
        self._compiles = None
        stop_recording(self._folder)
        return compiled

    def _is_due(self, step: int) -> bool:
        """Tell whether `auto` begins at this step: the time is stable, patience has ended, or so has the stage."""
        if self._num_steps - step + 1 <= NUM_RECORDED:
            return True
        if len(self._seconds) < NUM_STABLE:
            return False
        middle = statistics.median(self._seconds)
        return self._seen >= PATIENCE or max(abs(s - middle) for s in self._seconds) <= SPREAD * middle


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
