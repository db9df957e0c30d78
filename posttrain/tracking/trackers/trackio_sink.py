"""Sink of Trackio: metrics and tables of samples in a local dashboard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.metrics import Sample
from posttrain.tracking.tags import shown
from posttrain.tracking.trackers.run import TrackedRun

COLUMNS = ("prompt", "completion", "reward", "advantage", "stop")


class TrackioSink:
    """Sink of one stage as a Trackio run (`TRACKIO_PROJECT`, `TRACKIO_SPACE_ID`); a resumed stage continues it."""

    def __init__(self, trackio: Any, run: TrackedRun) -> None:
        self._trackio = trackio
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", run.project),
            name=f"{run.name}-{run.identifier[:6]}",
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            resume="allow",
            config=dict(run.settings),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(shown(metrics), step=step)

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """Ignored: `tables.jsonl` has the arrays."""

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        import pandas

        frame = pandas.DataFrame([{name: getattr(row, name) for name in COLUMNS} for row in rows])
        self._run.log({"samples/table": self._trackio.Table(dataframe=frame)}, step=step)

    def close(self) -> None:
        self._run.finish()
