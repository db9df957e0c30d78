"""Training loop around steps of any kind: metrics, evaluation, checkpoints, resume, clean stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, runtime_checkable

import jax
import optax

from posttrain.data.prefetch import MAX_BATCHES, BatchStream, Prefetch
from posttrain.errors import ConfigError
from posttrain.kernels.platform import platform_of
from posttrain.metrics import CompileCounter, Timer, device_peak_gib, new_peak, peak_memory_gib, tables, to_host
from posttrain.runtime import processes
from posttrain.runtime.profiler import span, step_span
from posttrain.runtime.xla import trim_host_memory
from posttrain.tracking.console import console, progress_bar
from posttrain.tracking.profile import StepRecorder
from posttrain.tracking.sink import Sink
from posttrain.train.checkpoint import Checkpointer, DamagedCheckpoint
from posttrain.train.trainer import Trainer, check_finite
from posttrain.weights.locate import Origin


@runtime_checkable
class Resumable(Protocol):
    """Data stream with a restorable position."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Interrupted(processes.SameEverywhere):
    """Raised after a requested stop; the checkpoint is on disk and the same command resumes from it. `number`: that of
    the signal."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number = number


class Wish(IntEnum):
    """Request after a step; the largest of all processes counts."""

    GO_ON = 0
    END = 1
    """The stage ends as after its last step."""
    STOP = 2
    """The run stops with a checkpoint, from which the same command goes on."""


class StopRequest:
    """Stop flag: set by the first SIGINT or SIGTERM; a second one interrupts immediately."""

    def __init__(self) -> None:
        self.requested, self._ends, self._number = False, False, signal.SIGINT

    @property
    def wish(self) -> Wish:
        return Wish.STOP if self.requested else Wish.END if self._ends else Wish.GO_ON

    def end_stage(self) -> None:
        """Let the stage end after the step that runs."""
        self._ends = True

    def begin_stage(self) -> None:
        """Forget what the stage before was told after its last step."""
        self._ends = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt(number)
        self.requested, self._number = True, signal.Signals(number)
        # Not `print`: the signal may interrupt one.
        os.write(2, b"stopping after this step, with a checkpoint; press Ctrl-C again to stop at once\n")

    def interrupted(self, message: str) -> Interrupted:
        """Error of the stop, the same in all processes: SIGTERM, if one of them has got it."""
        ended = processes.any_of(self._number == signal.SIGTERM)
        return Interrupted(message, signal.SIGTERM if ended else signal.SIGINT)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Convert SIGINT and SIGTERM into a stop request between steps; no effect outside the main thread."""
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


def crosses(before: int, done: int, every: int) -> bool:
    """Tell whether a multiple of `every` lies above `before`, up to `done`.

    >>> crosses(8, 16, 10), crosses(16, 19, 10)
    (True, False)
    """
    return done // every > before // every


@dataclass(frozen=True, kw_only=True)
class Every:
    """Intervals in steps."""

    checkpoint: int
    evaluation: int | None
    """Evaluation interval; None: only before the first and after the last step."""


@dataclass(frozen=True)
class Restored:
    """Outcome of a restore."""

    damaged: Sequence[int]
    """Steps after the one that was restored, which are set aside."""
    ended_of: int | None
    """Number of steps of a stage that was ended after the step that was restored; None: it was not."""


def restore_latest(
    trainer: Trainer, data: Resumable, checkpointer: Checkpointer, origin: Origin, *, strict: bool
) -> Restored:
    """Restore trainer and data from the newest checkpoint that is intact, if there is any; sets damaged ones after it
    aside, with a warning for each.

    Raises ConfigError if the checkpoint belongs to another model than `origin`, other data, or other parameters, and
    where the only one, or with `strict` the newest, is damaged.
    """
    damaged: dict[int, DamagedCheckpoint] = {}
    ended_of = None
    for step in (steps := checkpointer.steps()):
        try:
            state, host = checkpointer.restore(step, trainer.state())
        except DamagedCheckpoint as error:
            if strict or step == steps[-1]:
                raise ConfigError(f"{error}; {_remedy(steps, step, strict=strict)}") from error
            damaged[step] = error
            continue
        check_origin(checkpointer.directory / str(step), host["origin"], origin)
        trainer.restore(state, host["step"])
        data.restore(host["data"])
        ended_of = host.get("ended_of")
        break
    if not steps:
        checkpointer.warm_up(trainer.state())
    for step, found in damaged.items():
        line = f"WARNING: {found}; it is now {checkpointer.set_aside(step)}, and an earlier one is resumed from"
        console().print(line, style="bold yellow", markup=False, soft_wrap=True)
    return Restored([*damaged], ended_of)


def _remedy(steps: Sequence[int], step: int, *, strict: bool) -> str:
    if strict and step != steps[-1]:
        return "restore it from a copy, or run without --strict to resume from the one before"
    return "no intact one is left; restore it from a copy, or delete the stage's folder to start it over"


def check_origin(where: Path, saved: Mapping[str, str], origin: Origin) -> None:
    """Raises ConfigError if the folder's initial model (`saved` parts) differs from `origin`."""
    names = sorted({*saved, *origin.parts})
    changed = [
        f"{name} {'is gone' if name not in origin.parts else 'is new' if name not in saved else 'has changed'}"
        for name in names
        if saved.get(name) != origin.parts.get(name)
    ]
    if changed:
        raise ConfigError(
            f"{where}: the initial model differs: in {origin.name} {', '.join(changed)} since it was written; "
            "use another output, or restore the old model"
        )


def prefetched(stream: BatchStream, trainer: Trainer, steps: int, *, max_batches: int = MAX_BATCHES) -> Prefetch:
    """Batches of so many steps, made ahead, on whose pictures frozen towers begin a step ahead."""

    def more() -> bool:
        return trainer.step_number + 1 < steps

    return Prefetch(stream, begin=trainer.begin, more=more, max_batches=max_batches)


class TrainingLoop:
    """Training steps that are left: iterate over them, and `log` the metrics of each.

    Between steps it writes metrics, evaluates, saves checkpoints, and stops when asked to:

        with TrainingLoop(trainer, batches, ...) as loop:
            for _ in loop:
                loop.log(trainer.step(next(batches)))

    Metrics of a step that still runs on the device are fetched when the next one has been dispatched, others at once.
    Raises Interrupted after a checkpoint when `stop` is requested, FloatingPointError when a gradient is not finite.
    `recorder`: records some of the steps; without one none is. `learning_rate`: schedule that is logged; None: unknown.
    `ended`: a callback has ended the stage after the step that was restored.
    """

    def __init__(
        self,
        trainer: Trainer,
        data: Resumable,
        *,
        origin: Origin,
        num_steps: int,
        checkpointer: Checkpointer,
        sink: Sink,
        learning_rate: optax.Schedule | None,
        every: Every,
        evaluate: Callable[[], Mapping[str, float]] | None,
        stop: StopRequest,
        ended: bool,
        recorder: StepRecorder | None = None,
    ):
        self._trainer, self._data, self._origin, self._num_steps = trainer, data, origin, num_steps
        self._checkpointer, self._sink, self._schedule = checkpointer, sink, learning_rate
        self._every, self._evaluate, self._stop, self._recorder = every, evaluate, stop, recorder
        self.ended = ended
        self._votes = processes.Votes(trainer.mesh)
        self._lines = _StepLines(sink, None if recorder is None else recorder.observe)

    def __enter__(self) -> TrainingLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception):
                self._lines.flush()
        finally:
            self._lines.close()
            if self._recorder is not None:
                self._recorder.close()
            if not processes.is_lost(error):
                with progress_bar("writing the checkpoint"):
                    self._checkpointer.wait()

    @property
    def is_done(self) -> bool:
        """True if no step is left."""
        return self.ended or self._trainer.step_number == self._num_steps

    def __iter__(self) -> Iterator[int]:
        """Yield the number of each step that is left, from 1; the trainer does it, or several, before the next one."""
        trainer, recorder = self._trainer, self._recorder
        while not self.is_done:
            step = trainer.step_number + 1
            if recorder is not None:
                recorder.start_if_due(step, self._lines.flush)
            with step_span(step):
                self._lines.start()
                yield step
                done = trainer.step_number
                self._after(step - 1, done)
                if recorder is not None and recorder.ends(done):
                    self._lines.flush()
            if recorder is not None and recorder.ends(done):
                recorder.finish()

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Hand over the metrics of the step that was done, or of several; the rate is that of the last one."""
        step, rate = self._trainer.step_number, None
        if self._schedule is not None:
            with span("schedule"):
                rate = self._schedule(step - 1)
        self._lines.add(step, metrics, rate)

    def flush(self) -> None:
        """Wait for the step that was dispatched, and write its line."""
        self._lines.flush()

    def _after(self, before: int, done: int) -> None:
        """Evaluate, save and stop, where a step after `before`, up to `done`, is one for it."""
        last = done == self._num_steps
        every = self._every.evaluation
        if self._evaluate is not None and every is not None and crosses(before, done, every) and not last:
            self._lines.flush()
            timer = Timer()
            with timer("evaluation"):
                found = self._evaluate()
            self._sink.write(done, {**found, **timer.metrics()})
        wish = self._votes(self._stop.wish)
        self.ended = wish == Wish.END and not last
        if wish > Wish.GO_ON or last or crosses(before, done, self._every.checkpoint):
            self._lines.flush()
            host = {"step": done, "data": self._data.state(), "origin": dict(self._origin.parts)}
            if self.ended:
                host["ended_of"] = self._num_steps
            started = time.perf_counter()
            with span("checkpoint"):
                # What the update has freed holds no room beside what the writer needs.
                trim_host_memory(platform_of(self._trainer.mesh))
                self._checkpointer.save(done, self._trainer.state(), host)
            self._lines.carry({"timing_s/checkpoint": time.perf_counter() - started})
        if wish == Wish.STOP and not last:
            self._checkpointer.wait()
            raise self._stop.interrupted(f"stopped after step {done} of {self._num_steps}")


@dataclass(frozen=True, kw_only=True)
class _Pending:
    step: int
    metrics: Mapping[str, Any]
    started: float
    compiled: dict[str, float]


class _StepLines:
    """Metric lines: one per step, written once its metrics are available; at most one step is pending."""

    def __init__(self, sink: Sink, observe: Callable[[float], None] | None) -> None:
        self._sink, self._observe = sink, observe
        self._compiles = CompileCounter()
        self._pending: _Pending | None = None
        self._carried: dict[str, float] = {}
        self._started = self._finished = time.perf_counter()
        self._peak = device_peak_gib()

    def start(self) -> None:
        self._started = time.perf_counter()
        if self._pending is None:
            self._peak = device_peak_gib()

    def carry(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the line of the next step."""
        self._carried |= metrics

    def add(self, step: int, metrics: Mapping[str, Any], learning_rate: Any) -> None:
        """Add a dispatched step: write the previous step, and this one if it is done.

        It is done if its metrics are on the host, or if programs run in the calling thread, as on CPU.
        """
        (carried, self._carried), compiled = (self._carried, {}), self._compiles.metrics()
        self.flush()
        shown = {**metrics, **({} if learning_rate is None else {"learning_rate": learning_rate})}
        self._pending = _Pending(step=step, metrics=shown, started=self._started, compiled=compiled | carried)
        if _are_ready(metrics):
            self.flush()

    def flush(self) -> None:
        """Wait for the pending step and write its line. Raises FloatingPointError if its gradient is not finite."""
        if self._pending is None:
            return
        line, self._pending = self._pending, None
        with span("waiting for the device"):
            host = to_host(line.metrics)
        check_finite(host, line.step)
        # A step dispatched while another ran started when that one finished.
        started, self._finished = max(line.started, self._finished), time.perf_counter()
        seconds = self._finished - started
        if self._observe is not None:
            self._observe(seconds)
        peak, self._peak = new_peak("step", self._peak), device_peak_gib()
        with span("log"):
            self._sink.write(line.step, host | _performance(host, seconds) | line.compiled | peak)
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
    if "perf/ideal_s" in metrics:
        result["perf/mfu"] = metrics["perf/ideal_s"] / metrics.get("timing_s/update", seconds)
    if "timing_s/data" in metrics:
        # A wait while the step before still runs is not in the seconds.
        result["perf/data_wait_share"] = min(1.0, metrics["timing_s/data"] / seconds)
    rollout = metrics.get("timing_s/rollout")
    if rollout:
        result["perf/generated_tokens_per_s"] = metrics["completions/num_tokens"] / rollout
    return result
