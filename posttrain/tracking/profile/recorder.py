"""Recording of a few training steps: given ones, or the first ones after the time of a step has become stable."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from posttrain.metrics import CompileCounter
from posttrain.runtime.profiler import start_recording, stop_recording
from posttrain.tracking.console import console
from posttrain.tracking.profile.report import describe_profile, read_profile

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
