"""Experiment trackers, offline: what each is told, under which names, and that a resumed stage continues its run."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posttrain.errors import ConfigError
from posttrain.metrics import Sample
from posttrain.tracking import trackers
from posttrain.tracking.trackers import MlflowSink, TrackedRun, TrackioSink, WandbSink
from tests.stages.runs import posttrain, sft_stage, write_run

pytestmark = pytest.mark.fast

ROW = Sample(prompt="1+1=", completion="2", reward=1.0, rewards={"correct": 1.0}, advantage=0.5, stop="stop")


class Recorder:
    """Object that records the calls of its methods; `values` answer calls by name."""

    def __init__(self, **values: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._values = values

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self._values.get(name)

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackedRun:
    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    return TrackedRun(folder=tmp_path / "math", stage="0-rl", settings={"group_size": 8, "model.path": "m"})


def feed(sink: Any) -> None:
    sink.write(3, {"reward": 0.5, "none": math.nan, "eval/reward": 0.25})
    sink.tables(3, {"moe/share": np.ones((2, 2))})
    sink.samples(3, [ROW])
    sink.close()


def test_a_tracked_run_is_known_by_its_folder_not_by_its_path(run: TrackedRun, tmp_path: Path) -> None:
    """A resumed run finds its own, also where it was moved; a new run at the same place does not continue the old."""
    first = run.identifier
    assert replace(run).identifier == first and replace(run, stage="1-rl").identifier != first
    (tmp_path / "math").rename(tmp_path / "moved")
    assert replace(run, folder=tmp_path / "moved").identifier == first
    assert run.identifier != first


def test_wandb(run: TrackedRun) -> None:
    own = Recorder()
    module = Recorder(init=own, Table="table", Histogram="histogram")
    feed(WandbSink(module, run))
    ((_, given),) = module.of("init")
    assert given["project"] == "posttrain" and given["name"] == "math/0-rl" and given["resume"] == "allow"
    assert given["id"] == run.identifier and given["config"]["group_size"] == 8
    assert [args[0] for args, _ in own.of("log")] == [
        {"step": 3, "train/reward": 0.5, "eval/reward": 0.25},
        {"step": 3, "moe/share": "histogram"},
        {"step": 3, "samples/table": "table"},
    ]
    assert own.calls[-1][0] == "finish" and module.of("Table")[0][1]["data"] == [["1+1=", "2", 1.0, 0.5, "stop"]]


@pytest.mark.parametrize("resumed", [False, True])
def test_mlflow(run: TrackedRun, resumed: bool) -> None:
    made = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    experiment = SimpleNamespace(experiment_id="7")
    client = Recorder(get_experiment_by_name=experiment, search_runs=[made] if resumed else [], create_run=made)
    module = SimpleNamespace(
        MlflowClient=lambda: client, entities=SimpleNamespace(Param=lambda k, v: (k, v), Metric=lambda *a: a)
    )
    feed(MlflowSink(module, run))
    assert len(client.of("create_run")) == (0 if resumed else 1)
    logged = [kwargs for _, kwargs in client.of("log_batch")]
    if not resumed:
        assert logged.pop(0) == {"params": [("group_size", "8"), ("model.path", "m")]}
    assert [(name, value, step) for name, value, _, step in logged[0]["metrics"]] == [
        ("train/reward", 0.5, 3),
        ("eval/reward", 0.25, 3),
    ]
    ((args, _),) = client.of("log_text")
    assert args[0] == "r1" and "    1+1=" in args[1] and args[2] == "samples/step_000003.md"
    assert client.of("set_terminated") == [(("r1",), {})]


def test_trackio(run: TrackedRun) -> None:
    own = Recorder()
    module = Recorder(init=own, Table="table")
    feed(TrackioSink(module, run))
    ((_, given),) = module.of("init")
    assert given["project"] == "posttrain" and given["resume"] == "allow" and given["config"]["model.path"] == "m"
    assert own.of("log") == [
        (({"train/reward": 0.5, "eval/reward": 0.25},), {"step": 3}),
        (({"samples/table": "table"},), {"step": 3}),
    ]
    assert list(module.of("Table")[0][1]["dataframe"]["completion"]) == ["2"]


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(trackers, "import_module", missing)
    with pytest.raises(ConfigError, match=r"^trackers: wandb is not installed; pip install 'posttrain\[wandb\]'"):
        trackers.require("wandb")


def test_a_tracker_is_opened_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRACKIO_SPACE_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.delenv(name, raising=False)
    retries: list[str | None] = []

    class Client(Recorder):
        def get_experiment_by_name(self, name: str) -> None:
            retries.append(os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES"))
            self.calls.append(("asked", (name,), {}))

    wandb, client, trackio = Recorder(), Client(), Recorder()
    modules = {"wandb": wandb, "mlflow": SimpleNamespace(MlflowClient=lambda: client), "trackio": trackio}
    monkeypatch.setattr(trackers, "import_module", modules.__getitem__)
    for name in modules:
        trackers.check_tracker(name)
    assert [name for name, _, _ in wandb.calls] == ["login"] and trackio.calls == []
    assert client.calls == [("asked", ("posttrain",), {})] and retries == ["1"]
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_tracker_that_cannot_be_opened_ends_a_run_first(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> Any:
        raise RuntimeError("unsupported URI 'sqlite:///mlflow.db'\nuse another")

    monkeypatch.setattr(trackers, "import_module", lambda _: SimpleNamespace(MlflowClient=refused))
    # A dataset that is not there is found later.
    stage = sft_stage(dataset={"path": "missing.jsonl"})
    error = posttrain(command, write_run(tmp_path, stage, trackers=["mlflow"])).error
    assert error == (
        "trackers: mlflow cannot be opened (RuntimeError: unsupported URI 'sqlite:///mlflow.db' use another); set "
        "MLFLOW_TRACKING_URI to a server or to a database such as sqlite:///mlflow.db, or remove it"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_another_machine_opens_its_own_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "import_module", lambda name: pytest.fail(f"imported {name}"))
    file = write_run(tmp_path, sft_stage(), trackers=["mlflow"])
    assert posttrain("check", file, "--devices", "1").code == 0
