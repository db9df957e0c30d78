"""Token microscope: replays in a child process, what they leave in the cache, and errors that are shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.runs import replay as recipe
from posttrain.runs.replay import PLACE, TokenLosses
from posttrain.view.microscope import Microscope, write_token_losses
from tests.view.helpers import STAGE, make_run

END_S = 120.0


@pytest.fixture
def microscope(tmp_path: Path) -> Iterator[Microscope]:
    found = Microscope(tmp_path / "cache")
    yield found
    found.close()


@pytest.mark.thorough
def test_a_replay_that_cannot_be_is_said(microscope: Microscope, tmp_path: Path) -> None:
    """The child ends with the error of `posttrain replay`, which the page shows; red if it is only printed."""
    stage = make_run(tmp_path / "run", [2]).path / STAGE
    assert microscope.state(stage, 2) == {"state": "absent"}
    assert microscope.start(stage, 2) == {"state": "running"}
    end = time.monotonic() + END_S
    while (state := microscope.state(stage, 2))["state"] == "running":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert state["state"] == "failed" and "is neither the output folder of a run" in state["error"]
    assert microscope.tokens(stage, 2, 20, 0) == []


@pytest.mark.fast
def test_columns_are_kept(microscope: Microscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = make_run(tmp_path / "run", [2]).path / STAGE
    columns: dict[str, Any] = {name: np.zeros(4, np.int64) for name in PLACE}
    columns |= {"update": np.asarray([0, 0, 1, 1]), "sample": np.asarray([0, 1, 0, 1])}
    columns["share"] = np.asarray([1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(
        recipe, "token_losses", lambda stage, step: TokenLosses(columns=columns, loss=10.0, logged=10.0)
    )
    file = microscope.file(stage, 2)
    file.parent.mkdir()
    write_token_losses(stage, 2, file)
    assert microscope.start(stage, 2) == {"state": "done", "loss": 10.0, "logged": 10.0, "sum": 10.0, "updates": 2}
    assert [(one["update"], one["share"]) for one in microscope.tokens(stage, 2, 0, 1)] == [(0, [2.0]), (1, [4.0])]
