"""Experiment trackers, whose packages are optional: W&B, MLflow, Trackio."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.errors import ConfigError
from posttrain.metrics import Sample
from posttrain.runtime.files import digest
from posttrain.tracking.sink import Sink, grouped, markdown_of, shown

PROJECT = "posttrain"
"""Project of runs whose tracker has none in its environment, such as `WANDB_PROJECT`."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Stage of a run as trackers see it."""

    folder: Path
    """Folder of the run; its name is that of the tracked run."""
    stage: str
    settings: Mapping[str, Any]
    """Configuration as dotted names and plain values."""

    @property
    def name(self) -> str:
        return f"{self.folder.resolve().name}/{self.stage}"

    @property
    def identifier(self) -> str:
        """Identifier by which a resumed stage finds its tracked run again."""
        return digest(f"{self.folder.resolve()}/{self.stage}")

    @property
    def project(self) -> str:
        return os.environ.get("POSTTRAIN_PROJECT", PROJECT)


STEP = "step"
"""Metric of W&B by which the others are drawn."""
COLUMNS = ("prompt", "completion", "reward", "advantage", "stop")
"""Fields of samples in tables."""


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


TAG = "posttrain.run"
"""Tag of MLflow with the identifier of a stage."""
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


SINKS: dict[str, Any] = {"wandb": WandbSink, "mlflow": MlflowSink, "trackio": TrackioSink}


def require(name: str) -> Any:
    """Import a tracker's package. ConfigError if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(
            f"trackers: {name} is not installed; pip install 'posttrain[{name}]', or remove it"
        ) from error


def open_tracker(name: str, run: TrackedRun) -> Sink:
    """Open the sink of a tracker: `wandb`, `mlflow` or `trackio`."""
    sink: Sink = SINKS[name](require(name), run)
    return sink
