"""The loop around steps: metrics, evaluation, checkpoints, resuming, a clean stop. Steps of any kind go through it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import jax
import optax

from posttrain.errors import ConfigError
from posttrain.metrics import CompileCounter, peak_memory_gib, tables, to_host
from posttrain.tracking.console import progress_bar
from posttrain.tracking.sinks import Sink
from posttrain.train.checkpoint import Checkpointer
from posttrain.train.trainer import Trainer, check_finite
from posttrain.weights.locate import Origin


@runtime_checkable
class Resumable(Protocol):
    """A stream that knows where it stands."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint is on the disk and the same command goes on from it."""


class StopRequest:
    """Becomes true at the first SIGINT or SIGTERM; the second one interrupts at once."""

    def __init__(self) -> None:
        self.requested = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # Not `print`: the signal may have come in the middle of one.
        os.write(2, b"stopping after this step, with a checkpoint; press Ctrl-C again to stop at once\n")


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a request to stop between steps; other threads than the main one cannot."""
    stop = StopRequest()
    previous = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, stop.handle)
    except ValueError:  # only the main thread may set handlers
        previous = {}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class Every:
    """How often things happen, in steps."""

    checkpoint: int
    evaluation: int | None
    """None: only before the first and after the last step."""


def restore_latest(trainer: Trainer, data: Resumable, checkpointer: Checkpointer, origin: Origin) -> bool:
    """Bring trainer and data to the newest checkpoint; False where there is none.

    ConfigError where the checkpoint continues another model than `origin`, other data, or other parameters.
    """
    step = checkpointer.latest_step()
    if step is None:
        return False
    state, host = checkpointer.restore(step, trainer.state())
    check_origin(checkpointer.directory / str(step), host["origin"], origin)
    trainer.restore(state, host["step"])
    data.restore(host["data"])
    return True


def check_origin(where: Path, saved: Mapping[str, str], origin: Origin) -> None:
    """ConfigError where what lies in `where` began with a model of other parts: `saved` and not those of `origin`."""
    names = sorted({*saved, *origin.parts})
    changed = [
        f"{name} {'is gone' if name not in origin.parts else 'is new' if name not in saved else 'has changed'}"
        for name in names
        if saved.get(name) != origin.parts.get(name)
    ]
    if changed:
        raise ConfigError(
            f"{where}: continues another model: in {origin.name} {', '.join(changed)} since it was written; "
            "give another output, or bring the old model back"
        )


def run_steps(
    trainer: Trainer,
    step: Callable[[], Mapping[str, Any]],
    data: Resumable,
    *,
    origin: Origin,
    num_steps: int,
    checkpointer: Checkpointer,
    sink: Sink,
    learning_rate: optax.Schedule,
    every: Every,
    evaluate: Callable[[], Mapping[str, float]] | None,
    stop: StopRequest,
) -> None:
    """Call `step` until the trainer has done `num_steps` updates. Each call does one update and returns its metrics.

    Metrics of a step that still runs are fetched when the next one has been dispatched, others at once.
    Raises Interrupted after a checkpoint when `stop` is requested, FloatingPointError when a gradient is not finite.
    """
    lines = _StepLines(sink)
    try:
        while trainer.step_number < num_steps:
            lines.start()
            rate = learning_rate(trainer.step_number)
            metrics = step()
            done = trainer.step_number
            lines.add(done, metrics, rate)
            evaluating = every.evaluation is not None and done % every.evaluation == 0 and done < num_steps
            if evaluate is not None and evaluating:
                lines.flush()
                sink.write(done, evaluate())
            if stop.requested or done == num_steps or done % every.checkpoint == 0:
                lines.flush()
                checkpointer.save(
                    done, trainer.state(), {"step": done, "data": data.state(), "origin": dict(origin.parts)}
                )
            if stop.requested and done < num_steps:
                checkpointer.wait()
                raise Interrupted(f"stopped after step {done} of {num_steps}")
    except Exception:
        lines.flush()
        raise
    finally:
        lines.close()
        with progress_bar("writing the checkpoint"):
            checkpointer.wait()


@dataclass(frozen=True, kw_only=True)
class _Pending:
    step: int
    metrics: Mapping[str, Any]
    started: float
    compiled: dict[str, float]


class _StepLines:
    """One line per step, written when its metrics are known; at most one step waits for that."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._compiles = CompileCounter()
        self._pending: _Pending | None = None
        self._started = self._finished = time.perf_counter()

    def start(self) -> None:
        self._started = time.perf_counter()

    def add(self, step: int, metrics: Mapping[str, Any], learning_rate: Any) -> None:
        """A step that was dispatched: the step before is written, and this one too if it is done.

        It is where its metrics are on the host, and where programs run in the thread that calls them, as on a CPU.
        """
        compiled = self._compiles.metrics()
        self.flush()
        shown = {**metrics, "learning_rate": learning_rate}
        self._pending = _Pending(step=step, metrics=shown, started=self._started, compiled=compiled)
        if _are_ready(metrics):
            self.flush()

    def flush(self) -> None:
        """Wait for the pending step and write its line. FloatingPointError if its gradient was not finite."""
        if self._pending is None:
            return
        line, self._pending = self._pending, None
        host = to_host(line.metrics)
        check_finite(host, line.step)
        # A step that was dispatched while another ran began when that one was over.
        begun, self._finished = max(line.started, self._finished), time.perf_counter()
        self._sink.write(line.step, host | _performance(host, self._finished - begun) | line.compiled)
        if shares := tables(line.metrics):
            self._sink.tables(line.step, shares)

    def close(self) -> None:
        self._compiles.close()


def _are_ready(metrics: Mapping[str, Any]) -> bool:
    arrays: list[Any] = [leaf for leaf in jax.tree.leaves(metrics) if isinstance(leaf, jax.Array)]
    return all(array.is_ready() for array in arrays)


def _performance(metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
    result = {
        "step_time": seconds,
        "perf/tokens_per_s": metrics["num_tokens"] / seconds,
        "perf/peak_memory_gib": peak_memory_gib(),
    }
    rollout = metrics.get("timing_s/rollout")
    if rollout:
        result["perf/generated_tokens_per_s"] = metrics["completions/num_tokens"] / rollout
    return result
