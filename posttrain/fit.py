"""The loop around steps: metrics, evaluation, checkpoints, resuming, a clean stop. Steps of any kind go through it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import optax

from posttrain.checkpoint import Checkpointer
from posttrain.metrics import CompileCounter, Metrics, peak_memory_gib, to_host
from posttrain.sinks import Sink
from posttrain.trainer import Trainer, check_finite


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


def restore_latest(trainer: Trainer, data: Resumable, checkpointer: Checkpointer) -> bool:
    """Bring trainer and data to the newest checkpoint; False where there is none."""
    step = checkpointer.latest_step()
    if step is None:
        return False
    state, host = checkpointer.restore(step, trainer.state())
    trainer.restore(state, host["step"])
    data.restore(host["data"])
    return True


def run_steps(
    trainer: Trainer,
    step: Callable[[], Mapping[str, Any]],
    data: Resumable,
    *,
    num_steps: int,
    checkpointer: Checkpointer,
    sink: Sink,
    learning_rate: optax.Schedule,
    every: Every,
    evaluate: Callable[[], Mapping[str, float]] | None,
    stop: StopRequest,
) -> None:
    """Call `step` until the trainer has done `num_steps` updates. Each call does one update and returns its metrics.

    Raises Interrupted after a checkpoint when `stop` is requested, FloatingPointError when a gradient is not finite.
    """
    compiles = CompileCounter()
    try:
        while trainer.step_number < num_steps:
            start = time.perf_counter()
            rate = learning_rate(trainer.step_number)
            metrics: Metrics = {**step(), "learning_rate": rate}
            host = to_host(metrics)
            check_finite(host, trainer.step_number)
            seconds = time.perf_counter() - start
            sink.write(trainer.step_number, host | _performance(host, seconds) | compiles.metrics())
            done = trainer.step_number
            if (
                evaluate is not None
                and every.evaluation is not None
                and done % every.evaluation == 0
                and done < num_steps
            ):
                sink.write(done, evaluate())
            if stop.requested or done == num_steps or done % every.checkpoint == 0:
                checkpointer.save(done, trainer.state(), {"step": done, "data": data.state()})
            if stop.requested and done < num_steps:
                checkpointer.wait()
                raise Interrupted(f"stopped after step {done} of {num_steps}")
    finally:
        compiles.close()
        checkpointer.wait()


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
