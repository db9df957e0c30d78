"""Sink of Weights & Biases: metrics, tables of samples, histograms, the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.metrics import Sample
from posttrain.tracking.tags import grouped, shown
from posttrain.tracking.trackers.run import TrackedRun

STEP = "step"
COLUMNS = ("prompt", "completion", "reward", "advantage", "stop")


class WandbSink:
    """Sink of one stage as a run of Weights & Biases (`WANDB_PROJECT`, `WANDB_MODE`); a resumed stage continues it.

    The step is a metric of its own: a resumed stage repeats steps, which W&B's own counter would drop.
    """

    def __init__(self, wandb: Any, run: TrackedRun) -> None:
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.project),
            name=run.name,
            id=run.identifier,
            resume="allow",
            config=dict(run.settings),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **shown(metrics)})

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        found = {grouped(name): self._wandb.Histogram(table.ravel().tolist()) for name, table in tables.items()}
        self._run.log({STEP: step, **found})

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        data = [[getattr(row, name) for name in COLUMNS] for row in rows]
        self._run.log({STEP: step, "samples/table": self._wandb.Table(columns=list(COLUMNS), data=data)})

    def close(self) -> None:
        self._run.finish()
