"""Sinks of a stage, combined, that of each process of several, and that of TensorBoard: event files with scalars,
histograms, sample texts and hyperparameters."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.metrics import Sample
from posttrain.runtime import processes
from posttrain.tracking.history import JsonlSink, keep_lines, open_for_append, write_line
from posttrain.tracking.notebook import NotebookSink
from posttrain.tracking.sink import Sink, grouped, markdown_of, shown
from posttrain.tracking.steps import ConsoleSink
from posttrain.tracking.trackers import TrackedRun, open_tracker


class Sinks:
    """Several sinks combined; all are closed, even if one fails."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, metrics)

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        for sink in self._sinks:
            sink.tables(step, tables)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        for sink in self._sinks:
            sink.samples(step, rows)

    def close(self) -> None:
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)


HOSTS = "hosts"
OWN = ("timing_s/", "perf/", "memory/", "rollout/", "sync/", "data/", "step_time", "num_tokens")
"""Beginnings of the names of metrics that differ between the processes, or stand beside those."""


class HostSink:
    """Sink of one process: `hosts/NUMBER.jsonl`, a line for each of the run's with what this process has measured.

    `host/resident_mib`: memory of the process; `host/wait_s`: seconds since the line before in which it waited for
    another process outside of the devices' programs.
    """

    def __init__(self, directory: str | os.PathLike[str], stage: str) -> None:
        folder = Path(directory) / HOSTS
        folder.mkdir(parents=True, exist_ok=True)
        self._stage, self._path = stage, folder / f"{processes.index()}.jsonl"
        self._file = open_for_append(self._path)
        self._waited_s = processes.waited_s()

    def truncate_after(self, step: int) -> None:
        """Remove this stage's lines of later steps, which a run that resumes at `step` writes again."""
        self._file.close()
        keep_lines(self._path, lambda line: line["stage"] != self._stage or line["step"] <= step)
        self._file = open_for_append(self._path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        own = {name: value for name, value in metrics.items() if name.startswith(OWN)}
        if not own:
            return
        before, self._waited_s = self._waited_s, processes.waited_s()
        more = {"host/resident_mib": resident_mib(), "host/wait_s": self._waited_s - before}
        head = {"step": step, "stage": self._stage, "time": round(time.time(), 3), "host": socket.gethostname()}
        write_line(self._file, head | own | more)

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """Ignored: those of the run are of all processes."""

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Ignored: those of the run are of all processes."""

    def close(self) -> None:
        self._file.close()


def resident_mib() -> float:
    """Memory of this process; NaN where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return float("nan")
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_sinks(
    directory: str | os.PathLike[str],
    *,
    stage: str,
    kind: str,
    num_steps: int,
    tensorboard: bool,
    start_step: int,
    sample_tables: bool,
    trackers: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    watchers: Sequence[Sink] = (),
) -> Sinks:
    """Open console, JSONL and (in `tensorboard/`) TensorBoard sinks of a stage that starts or resumes after
    `start_step`.

    Entries of later steps of this stage are removed, and after the last step also its evaluation; with `start_step` =
    -1 all entries. The first process of a run has these sinks; where there are several, each has one of its own,
    `HostSink`. `sample_tables`: the console prints every table of samples, not only the last. `trackers`: `wandb`,
    `mlflow`, `trackio`; they and TensorBoard show the `settings`. `watchers`: more sinks, closed with the others.
    """
    own = [HostSink(directory, stage)] if processes.count() > 1 else []
    for host in own:
        host.truncate_after(start_step)
    if not processes.writes():
        return Sinks(*own)
    jsonl = JsonlSink(directory, stage)
    jsonl.truncate_after(start_step, evaluation=start_step == num_steps)
    people: Sink = ConsoleSink(kind, num_steps, sample_tables=sample_tables)
    if in_notebook():
        people = NotebookSink(stage, kind, num_steps)
    sinks: list[Sink] = [people, jsonl]
    if tensorboard:
        events = TensorBoardSink(Path(directory) / "tensorboard" / stage, settings or {})
        events.truncate_after(start_step)
        sinks.append(events)
    tracked = TrackedRun(folder=Path(directory), stage=stage, settings=settings or {})
    sinks += [open_tracker(name, tracked) for name in trackers]
    return Sinks(*sinks, *own, *watchers)


def in_notebook() -> bool:
    """Tell whether the process is the kernel of a notebook: Jupyter, Colab, Kaggle."""
    from rich.console import Console

    return Console().is_jupyter


HISTOGRAM_BINS = 30

_event_files = itertools.count()


class TensorBoardSink:
    """TensorBoard sink: grouped scalars and sample texts as an event file in `directory`; NaN is omitted.

    Event records are written directly: TensorBoard's own writer imports TensorFlow if that is installed.
    """

    def __init__(self, directory: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        # The name must be unique, and later names must sort later.
        name = f"events.out.tfevents.{time.time_ns() // 1000:016d}.{socket.gethostname()}.{os.getpid()}"
        self._event = Event
        self._records = RecordWriter((folder / f"{name}.{next(_event_files)}").open("xb"))
        self._emit(file_version="brain.Event:2")
        self._hparams(settings)

    def _hparams(self, settings: Mapping[str, Any]) -> None:
        """Write the settings for the HPARAMS page; texts but for numbers and flags."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_FLOAT
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

        start = SessionStartInfo(start_time_secs=time.time())
        for name, setting in settings.items():
            kind = "bool" if isinstance(setting, bool) else "number" if isinstance(setting, int | float) else "string"
            setattr(start.hparams[name], f"{kind}_value", setting if kind != "string" else str(setting))
        content = HParamsPluginData(session_start_info=start).SerializeToString()
        plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content)
        tensor = TensorProto(dtype=DT_FLOAT, float_val=[0.0])
        tensor.tensor_shape.SetInParent()
        tag, metadata = "_hparams_/session_start_info", SummaryMetadata(plugin_data=plugin)
        self._emit(step=0, summary=Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)]))

    def truncate_after(self, step: int) -> None:
        """Mark later steps in earlier event files as superseded."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._emit(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in shown(metrics).items()]
        self._emit(step=step, summary=Summary(value=values))

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """Write a histogram per table."""
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

        values = []
        for name, table in tables.items():
            counts, edges = np.histogram(table, bins=HISTOGRAM_BINS)
            histogram = HistogramProto(
                min=table.min(),
                max=table.max(),
                num=table.size,
                sum=table.sum(),
                sum_squares=np.square(table).sum(),
                bucket_limit=edges[1:],
                bucket=counts,
            )
            values.append(Summary.Value(tag=grouped(name), histo=histogram))
        self._emit(step=step, summary=Summary(value=values))

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        text = "\n\n---\n\n".join(markdown_of(row) for row in rows)
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode("utf-8", errors="backslashreplace")])
        tensor.tensor_shape.SetInParent()
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag="samples/text", tensor=tensor, metadata=metadata)
        self._emit(step=step, summary=Summary(value=[value]))

    def close(self) -> None:
        self._records.close()

    def _emit(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()
