"""Metrics before the sinks: means, timers, compilation counts, peak memory."""

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

from posttrain.runtime.profiler import span
from posttrain.tree import Metric, added

MetricT = TypeVar("MetricT", bound=Metric)
Metrics = dict[str, Metric | float | Array]
"""Metric names to accumulators or plain numbers, on the device until written."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Completion in readable form, for the sample table and files."""

    prompt: str
    completion: str
    reward: float | None
    """Weighted sum of rewards; None if every reward function failed or did not apply."""
    rewards: Mapping[str, float | None]
    """Reward by function; None if it failed or did not apply."""
    advantage: float | None
    """Advantage; None in an evaluation, and if the group was dropped."""
    stop: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Additional JSON columns for files; not shown in the console's table."""


# JAX's event per built program: compiled by XLA or loaded from the persistent compilation cache.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def to_host(metrics: Mapping[str, Metric | float | Array]) -> dict[str, float]:
    """Fetch all scalar metrics as Python floats in one transfer; NaN if nothing was counted (weight 0)."""
    fetched = jax.device_get({name: value for name, value in metrics.items() if not _is_table(value)})
    return {name: value.value() if isinstance(value, Metric) else float(value) for name, value in fetched.items()}


def tables(metrics: Mapping[str, Metric | float | Array]) -> dict[str, np.ndarray]:
    """Fetch array metrics, such as the share of each expert of each layer."""
    arrays = jax.device_get({name: value for name, value in metrics.items() if _is_table(value)})
    return {name: np.asarray(value) for name, value in arrays.items()}


def _is_table(value: object) -> bool:
    return isinstance(value, Array | np.ndarray) and value.ndim > 0


def merge(*parts: Mapping[str, MetricT]) -> dict[str, MetricT]:
    """Merge metrics of equal names, exact for any split; names may be missing from some parts."""
    merged: dict[str, MetricT] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = added(merged[name], value) if name in merged else value
    return merged


class Timer:
    """Wall-clock timer per phase: `with timer("rollout"): ...` adds to `timing_s/rollout`. A phase that needs more of a
    device's memory than anything before it leaves `memory/rollout/peak_gib`.

    JAX returns before the device is done: a phase that ends in device work must fetch or block on its result.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start, before = time.perf_counter(), device_peak_gib()
        try:
            with span(phase):
                yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start
            self._peaks |= new_peak(phase, before)

    def metrics(self) -> dict[str, float]:
        """Return and reset the seconds and peaks of each phase."""
        seconds, self._seconds, peaks, self._peaks = self._seconds, {}, self._peaks, {}
        return {f"timing_s/{phase}": value for phase, value in seconds.items()} | peaks


class CompileCounter:
    """Counter of compiled programs and compile seconds: `perf/compilations`, `perf/compile_s`.

    Counts every program: single operations outside `jit`, programs of other threads, and loads from the persistent
    compilation cache (cheaper, but still a new program). Tracing time is not included. `close` stops the counting.
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
        """Return and reset programs and seconds."""
        with self._lock:
            programs, seconds = self._programs, self._seconds
            self._programs, self._seconds = 0, 0.0
        return {"perf/compilations": float(programs), "perf/compile_s": seconds}

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._record)


def device_peak_gib() -> float | None:
    """Peak memory of the fullest local device since the process began; None where devices state none, as on CPU."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    return max((s["peak_bytes_in_use"] / 2**30 for s in stats if s is not None), default=None)


def new_peak(phase: str, before: float | None) -> dict[str, float]:
    """`memory/<phase>/peak_gib` if the peak is now above that of `before` the phase: of one that stays below, devices
    tell nothing."""
    peak = device_peak_gib()
    return {} if peak is None or before is None or peak <= before else {f"memory/{phase}/peak_gib": peak}


def peak_memory_gib() -> float:
    """Peak memory of the fullest local device; on CPU the process's peak resident set."""
    if (peak := device_peak_gib()) is not None:
        return peak
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (2**30 if sys.platform == "darwin" else 2**20)
