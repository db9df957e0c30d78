"""Metric sinks: `metrics.jsonl`, `samples.jsonl`, and all sinks of a stage combined."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from posttrain.metrics import Sample
from posttrain.runtime import processes
from posttrain.tracking.notebook import NotebookSink, in_notebook
from posttrain.tracking.sink import Sink
from posttrain.tracking.steps import ConsoleSink
from posttrain.tracking.tensorboard_sink import TensorBoardSink
from posttrain.tracking.trackers import TrackedRun, open_tracker

TABLE_DIGITS = 5
"""Decimals of the numbers in `tables.jsonl`."""


class JsonlSink:
    """JSONL sink: `metrics.jsonl`, `samples.jsonl` and, if there are tables, `tables.jsonl` in `directory`.

    Strict JSON, one object per line with step, stage and time. NaN (nothing was counted) is null, an infinity the
    string "inf" or "-inf". Each line is flushed; a partial last line of a killed process is removed on opening. Several
    stages may share the files.
    """

    def __init__(self, directory: str | os.PathLike[str], stage: str) -> None:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._stage = stage
        self._metrics_path, self._samples_path = folder / "metrics.jsonl", folder / "samples.jsonl"
        self._tables_path = folder / "tables.jsonl"
        self._metrics, self._samples = _open_for_append(self._metrics_path), _open_for_append(self._samples_path)

    def truncate_after(self, step: int, *, evaluation: bool) -> None:
        """Remove this stage's lines of later steps, which a run that resumes at `step` writes again.

        `evaluation`: also remove evaluations at `step` itself, since the final one runs after the last checkpoint.
        Raises ValueError for a line that is not a JSON object with `step` and `stage`.
        """

        def written_again(line: Mapping[str, Any]) -> bool:
            evaluated = evaluation and any(name.startswith("eval/") for name in line)
            return line["stage"] == self._stage and (line["step"] > step or (line["step"] == step and evaluated))

        self.close()
        tables = [self._tables_path] if self._tables_path.exists() else []
        for path in (self._metrics_path, self._samples_path, *tables):
            _keep_lines(path, lambda line: not written_again(line))
        self._metrics, self._samples = _open_for_append(self._metrics_path), _open_for_append(self._samples_path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        _write_line(self._metrics, {**self._head(step), **metrics})

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        rounded = {name: np.round(table.astype(np.float64), TABLE_DIGITS).tolist() for name, table in tables.items()}
        with _open_for_append(self._tables_path) as file:
            _write_line(file, {**self._head(step), **rounded})

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        for row in rows:
            _write_line(self._samples, {**self._head(step), **asdict(row)})

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()

    def _head(self, step: int) -> dict[str, Any]:
        return {"step": step, "stage": self._stage, "time": round(time.time(), 3)}


def _write_line(file: TextIO, entry: Mapping[str, Any]) -> None:
    file.write(json.dumps(_strict(entry), ensure_ascii=False, allow_nan=False) + "\n")
    file.flush()


def _strict(value: Any) -> Any:
    """Replace numbers that JSON cannot represent."""
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _open_for_append(path: Path) -> TextIO:
    """Open for appending, after removing a partial last line."""
    with path.open("ab+") as file:
        file.seek(0)
        whole = sum(len(line) for line in file if line.endswith(b"\n"))
        file.truncate(whole)
    # A lone surrogate is written as its JSON escape.
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def _keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a JSONL file with the lines selected by `keep`, atomically."""
    part = path.with_name(path.name + ".part")
    with path.open("rb") as source, part.open("wb") as target:
        for number, line in enumerate(source, start=1):
            try:
                kept = keep(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number}: not a line of metrics ({error!r}); delete this line, or move the file away"
                ) from error
            if kept:
                target.write(line)
        target.flush()
        os.fsync(target.fileno())
    part.replace(path)


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
    -1 all entries. Only the first process of a run has sinks. `sample_tables`: the console prints
    every table of samples, not only the last. `trackers`: `wandb`, `mlflow`, `trackio`; they and
    TensorBoard show the `settings`. `watchers`: more sinks, closed with the others.
    """
    if not processes.writes():
        return Sinks()
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
    return Sinks(*sinks, *watchers)
