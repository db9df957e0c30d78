"""Opening of a tracker by its name; the packages are optional."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from posttrain.errors import ConfigError
from posttrain.tracking.sink import Sink
from posttrain.tracking.trackers.run import TrackedRun


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
    from posttrain.tracking.trackers.mlflow_sink import MlflowSink
    from posttrain.tracking.trackers.trackio_sink import TrackioSink
    from posttrain.tracking.trackers.wandb_sink import WandbSink

    sinks: dict[str, Any] = {"wandb": WandbSink, "mlflow": MlflowSink, "trackio": TrackioSink}
    sink: Sink = sinks[name](require(name), run)
    return sink
