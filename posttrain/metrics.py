"""Metrics on their way to the sinks: sums that are divided once, timers, compilations, peak memory."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.monitoring
import numpy as np
from jax import Array

from posttrain.tree import Max, Mean, Metric, added

MetricT = TypeVar("MetricT", bound=Metric)
Metrics = dict[str, Metric | float | Array]
"""Names to sums with weights, or to plain numbers; on the device until a sink wants them."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion as people read it."""

    prompt: str
    completion: str
    reward: float | None
    """The weighted sum; `None` where every reward function failed or did not apply."""
    rewards: Mapping[str, float | None]
    """By reward function; `None` where it failed or did not apply."""
    advantage: float | None
    """`None` in an evaluation, and where the group was left out."""
    stop: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More columns for the files, as JSON allows; not in the console's table."""


# jax's own record of one program built: XLA ran, or the persistent compilation cache answered.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def to_host(metrics: Mapping[str, Metric | float | Array]) -> dict[str, float]:
    """All single numbers as Python floats in one transfer; NaN where nothing was counted (weight 0)."""
    fetched = jax.device_get({name: value for name, value in metrics.items() if not _is_table(value)})
    return {name: value.value() if isinstance(value, Mean | Max) else float(value) for name, value in fetched.items()}


def tables(metrics: Mapping[str, Metric | float | Array]) -> dict[str, np.ndarray]:
    """The metrics that are arrays of numbers, such as the share of each expert of each layer."""
    found = jax.device_get({name: value for name, value in metrics.items() if _is_table(value)})
    return {name: np.asarray(value) for name, value in found.items()}


def _is_table(value: object) -> bool:
    return isinstance(value, Array | np.ndarray) and value.ndim > 0


def merge(*parts: Mapping[str, MetricT]) -> dict[str, MetricT]:
    """Metrics of equal names merged, exact for any split; a name may be missing from some parts."""
    merged: dict[str, MetricT] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = added(merged[name], value) if name in merged else value
    return merged


class Timer:
    """Wall seconds per phase: `with timer("rollout"): ...` adds to `timing_s/rollout`.

    JAX returns before the device is done: a phase that ends in device work must fetch or block on its result.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        seconds, self._seconds = self._seconds, {}
        return {f"timing_s/{phase}": value for phase, value in seconds.items()}


class CompileCounter:
    """Programs that this process built, and the seconds it took: `perf/compilations`, `perf/compile_s`.

    Every program counts, also one of a single operation outside `jit`, one built by another thread, and one that came
    from the persistent compilation cache (a new program all the same, only cheaper). Tracing is not in the seconds.
    `close` stops the counting.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._programs, self._seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self._programs += 1
                self._seconds += duration_secs

    def metrics(self) -> dict[str, float]:
        """Programs and seconds since the last call."""
        with self._lock:
            programs, seconds = self._programs, self._seconds
            self._programs, self._seconds = 0, 0.0
        return {"perf/compilations": float(programs), "perf/compile_s": seconds}

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._record)


def peak_memory_gib() -> float:
    """The highest use so far, of the fullest local device; on the CPU platform of the process's resident set."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s is not None]
    if peaks:
        return max(peaks) / 2**30
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (2**30 if sys.platform == "darwin" else 2**20)
