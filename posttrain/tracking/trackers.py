"""Experiment trackers, whose packages are optional: W&B, MLflow, Trackio; each can be opened before a run begins."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.errors import ConfigError
from posttrain.metrics import Sample
from posttrain.runtime import processes
from posttrain.runtime.files import write_whole
from posttrain.tracking.sink import Sink, grouped, markdown_of, shown

PROJECT = "posttrain"
"""Project of runs whose tracker has none in its environment, such as `WANDB_PROJECT`."""


TRACKED = "tracked.txt"
"""File of a stage with the identifier of its tracked run."""


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
        """Identifier by which a resumed stage finds its tracked run again, also where it was moved; drawn for each run,
        so that another one of the same folder does not continue it."""
        file = self.folder / self.stage / TRACKED
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, secrets.token_hex(8))
        return file.read_text(encoding="utf-8")


def project() -> str:
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
            project=os.environ.get("WANDB_PROJECT", project()),
            name=run.name,
            id=run.identifier,
            resume="allow",
            config=dict(run.settings),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    @staticmethod
    def check(wandb: Any) -> None:
        """Log in, as the run will; nothing where it is offline or disabled."""
        wandb.login(verify=True)

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
        name = self._experiment()
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

    @classmethod
    def check(cls, mlflow: Any) -> None:
        """Ask the server or the database for the experiment; a server that is not there is asked twice, not for four
        minutes."""
        with _default_environment(MLFLOW_HTTP_REQUEST_MAX_RETRIES="1"):
            mlflow.MlflowClient().get_experiment_by_name(cls._experiment())

    @staticmethod
    def _experiment() -> str:
        return os.environ.get("MLFLOW_EXPERIMENT_NAME", project())

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
            project=os.environ.get("TRACKIO_PROJECT", project()),
            name=f"{run.name}-{run.identifier[:6]}",
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            resume="allow",
            config=dict(run.settings),
        )

    @staticmethod
    def check(trackio: Any) -> None:
        """Log in to the hub of `TRACKIO_SPACE_ID`; nothing else is asked for by files of this machine."""
        if os.environ.get("TRACKIO_SPACE_ID"):
            from huggingface_hub import whoami

            whoami()

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


@contextmanager
def _default_environment(**values: str) -> Iterator[None]:
    """Set variables of the environment that have no value, for a while."""
    missing = values.keys() - os.environ.keys()
    os.environ.update({name: values[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


SINKS: dict[str, Any] = {"wandb": WandbSink, "mlflow": MlflowSink, "trackio": TrackioSink}
REMEDIES = {
    "wandb": "run `wandb login`, or set WANDB_MODE=offline",
    "mlflow": "set MLFLOW_TRACKING_URI to a server or to a database such as sqlite:///mlflow.db",
    "trackio": "run `hf auth login`, or unset TRACKIO_SPACE_ID",
}
ERROR_CHARACTERS = 400


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


def check_dashboards(*, tensorboard: bool, trackers: Sequence[str]) -> None:
    """Open what the first process of a run will open beside files of the run's folder; ConfigError if it cannot be.

    Nothing is written but the tables of a new database of MLflow.
    """
    if not processes.writes():
        return
    if tensorboard:
        try:
            from tensorboard.plugins.hparams import plugin_data_pb2  # noqa: F401
            from tensorboard.summary.writer import record_writer  # noqa: F401
        except Exception as error:
            raise ConfigError(
                f"tensorboard: cannot be imported ({type(error).__name__}: {error}); mend its installation, or set "
                "tensorboard: false"
            ) from error
    for name in trackers:
        check_tracker(name)


def check_tracker(name: str) -> None:
    """Open a tracker as a run will, without a run. ConfigError if it cannot be opened."""
    with _opening(name):
        SINKS[name].check(require(name))


def open_tracker(name: str, run: TrackedRun) -> Sink:
    """Open the sink of a tracker: `wandb`, `mlflow` or `trackio`. ConfigError if it cannot be opened."""
    with _opening(name):
        sink: Sink = SINKS[name](require(name), run)
        return sink


@contextmanager
def _opening(name: str) -> Iterator[None]:
    """Report what a tracker's package raises as one line with a remedy."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARACTERS]
        raise ConfigError(f"trackers: {name} cannot be opened ({text}); {REMEDIES[name]}, or remove it") from error
