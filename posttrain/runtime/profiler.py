"""Spans of work in traces of `jax.profiler`, and recording such a trace. XProf and TensorBoard show both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SPAN = "phase "
"""Prefix of span names in a trace."""
STEP = "step"
"""Name of the spans of whole steps, with their number as `step_num`."""


@contextmanager
def span(name: str, **values: int) -> Iterator[None]:
    """Name the work of this block in a recorded trace, with `values` beside it; two microseconds where none is.

    Blocks may nest: the time of the inner one is not counted for the outer one.
    """
    import jax

    with jax.profiler.TraceAnnotation(SPAN + name, **values):
        yield


@contextmanager
def step_span(step: int) -> Iterator[None]:
    """Mark one step of training; programs started in it belong to it."""
    import jax

    with jax.profiler.StepTraceAnnotation(STEP, step_num=step):
        yield


def start_recording(folder: Path) -> None:
    """Record everything from now on; RuntimeError if something records already."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # one event for each Python call would slow the host down
    jax.profiler.start_trace(str(folder), profiler_options=options)


def stop_recording(folder: Path) -> Path:
    """Write the trace below `folder`; returns its file, an XSpace protocol buffer."""
    import jax

    jax.profiler.stop_trace()
    return latest_trace(folder)


def latest_trace(folder: Path) -> Path:
    """Newest trace in a folder that `start_recording` wrote to. FileNotFoundError if there is none."""
    found = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not found:
        raise FileNotFoundError(f"{folder} holds no trace (plugins/profile/*/*.xplane.pb)")
    return found[-1]
