"""Lines of `metrics.jsonl`, `samples.jsonl` and `tables.jsonl` in a run's folder, as a sink writes them."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from posttrain.metrics import Sample

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
        self._metrics, self._samples = open_for_append(self._metrics_path), open_for_append(self._samples_path)

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
            keep_lines(path, lambda line: not written_again(line))
        self._metrics, self._samples = open_for_append(self._metrics_path), open_for_append(self._samples_path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        write_line(self._metrics, {**self._head(step), **metrics})

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        rounded = {name: np.round(table.astype(np.float64), TABLE_DIGITS).tolist() for name, table in tables.items()}
        with open_for_append(self._tables_path) as file:
            write_line(file, {**self._head(step), **rounded})

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        for row in rows:
            write_line(self._samples, {**self._head(step), **asdict(row)})

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()

    def _head(self, step: int) -> dict[str, Any]:
        return {"step": step, "stage": self._stage, "time": round(time.time(), 3)}


def write_line(file: TextIO, entry: Mapping[str, Any]) -> None:
    """Write an object as a line of strict JSON."""
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


def open_for_append(path: Path) -> TextIO:
    """Open for appending, after removing a partial last line."""
    with path.open("ab+") as file:
        file.seek(0)
        whole = sum(len(line) for line in file if line.endswith(b"\n"))
        file.truncate(whole)
    # A lone surrogate is written as its JSON escape.
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
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
