"""Recording of a few training steps, the report of where their time went, and advice on what to change."""

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
from posttrain.tracking.trace import TimeTable, Trace, time_table

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


DATA, REWARDS, SYNC, NETWORK, HOST, TAIL, PAUSE = 0.05, 0.2, 0.1, 0.3, 0.25, 0.2, 0.1
"""Shares of a step from which a cause is named."""
COMPUTE = ("update", "reference", "actor", "teacher", "logps")
"""Phases in which the devices should always compute."""


def advice(table: TimeTable) -> list[str]:
    """Causes in order of their cost, or what takes most where nothing stands out."""
    found = sorted(_causes(table), key=lambda cause: -cause[0])
    if found:
        return [text for _, text in found]
    largest = table.phases[0]
    return [
        f"nothing stands out: devices compute in {table.device_busy:.0%} of the step, {largest.name} takes "
        f"{largest.share:.0%} of it"
    ]


def _causes(table: TimeTable) -> Iterator[tuple[float, str]]:
    """Shares of a step with their causes."""
    if table.compilations:
        yield (
            1.0,
            f"recompiling: {table.compilations:.3g} programs a step are compiled while training; each new shape of a "
            "batch or of a request costs one. In RL keep rollout.warm_up on; a reward or loss of your own may call "
            "jax.jit anew in every step",
        )
    if (share := table.share("data")) >= DATA:
        yield (
            share,
            f"waiting for data: {share:.0%} of a step. A dataset function or the tokenizer is slower than the device: "
            "read rows from a .parquet or .jsonl file, and keep dataset.shuffle on, which packs further ahead",
        )
    if (share := table.share("rewards")) >= REWARDS:
        yield (
            share,
            f"rewards: {share:.0%} of a step, in which the devices wait. Make slow rewards async, or set "
            "rewards[].isolate: process, so that they run beside each other; lower rewards[].timeout_s",
        )
    if table.tail >= TAIL:
        yield (
            table.tail,
            f"rollout tail: {table.tail:.0%} of a step decodes with at most a quarter of the slots, for the longest "
            "answers. Set asynchronous, which samples them beside the updates, or lower sampling.max_tokens",
        )
    if (share := table.share("sync")) >= SYNC:
        yield (
            share,
            f"sync: {share:.0%} of a step brings the weights to the sampler. Set rollout.tensor: trained, or "
            "rollout.merge_lora: false under LoRA",
        )
    yield from _idle_devices(table)
    network = table.kinds.get("network", 0.0) / table.seconds
    if network >= NETWORK:
        yield (
            network,
            f"network: devices spend {network:.0%} of a step in collectives. Set a smaller mesh.tensor, or more tokens "
            "a pass by micro_batch_rows; posttrain plan shows the bytes",
        )
    for phase, setting in (("evaluation", "eval_every"), ("checkpoint", "checkpoint_every")):
        if (share := table.share(phase)) >= PAUSE:
            yield share, f"{phase}: {share:.0%} of the recorded steps. Set a larger {setting}"


def _idle_devices(table: TimeTable) -> Iterator[tuple[float, str]]:
    """Causes where devices wait for the host. Without device operations in the trace none can be told."""
    if not table.programs:
        return
    if (idle := table.idle(*COMPUTE)) >= HOST:
        yield (
            idle,
            f"host-bound update: devices wait for the host in {idle:.0%} of a step. Set more rows a pass "
            "(micro_batch_rows), or more tokens a step",
        )
    if (idle := table.idle("rollout")) >= HOST:
        yield (
            idle,
            f"host-bound rollout: devices wait for the host in {idle:.0%} of a step. Set a larger rollout.decode_steps "
            "or rollout.slots, so that a dispatch does more",
        )
