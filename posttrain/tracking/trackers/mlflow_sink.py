"""Sink of MLflow: metrics, parameters, samples as text files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.metrics import Sample
from posttrain.tracking.markdown import markdown_of
from posttrain.tracking.tags import shown
from posttrain.tracking.trackers.run import TrackedRun

TAG = "posttrain.run"
MAX_PARAM = 500
"""Characters of a parameter's value; MLflow refuses more than 6000."""
MAX_PARAMS = 100
"""Parameters of one request."""


class MlflowSink:
    """Sink of one stage as an MLflow run (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`); a resumed stage continues
    it."""

    def __init__(self, mlflow: Any, run: TrackedRun) -> None:
        self._mlflow, self._client = mlflow, mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        earlier = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.identifier}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment, run_name=run.name, tags={TAG: run.identifier}).info.run_id
        params = [mlflow.entities.Param(key, str(value)[:MAX_PARAM]) for key, value in run.settings.items()]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        self._client.log_batch(self._id, metrics=[metric(name, v, now, step) for name, v in shown(metrics).items()])

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """Ignored: MLflow has no histograms; `tables.jsonl` has the arrays."""

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        self._client.log_text(self._id, "\n\n---\n\n".join(map(markdown_of, rows)), f"samples/step_{step:06d}.md")

    def close(self) -> None:
        self._client.set_terminated(self._id)
