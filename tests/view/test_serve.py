"""The command: it prints an address that answers, indexes beside it, and ends with its child when interrupted."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.stages.runs import posttrain, start
from tests.view.helpers import make_run

END_S = 120.0


@pytest.mark.thorough
def test_the_command_serves_until_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = make_run(tmp_path / "run", [1, 2]).path
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    with start("view", run) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            end = time.monotonic() + END_S
            while httpx.get(f"{address}api/runs").json()[0]["progress"]["indexed"] < 2:
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(END_S) == 130
            assert process.stdout.read() == ""
        finally:
            process.kill()
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    assert "is no run: it has no config.yaml" in posttrain("view", tmp_path).error
