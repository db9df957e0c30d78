"""Endpoint of a run's metrics: what Prometheus reads while the run trains, and nothing after it."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from posttrain.config.run import MetricsServerSection
from posttrain.config.yaml_file import load_config
from posttrain.errors import ConfigError
from posttrain.runs.run import run
from posttrain.runtime import processes
from posttrain.tracking.metrics_server import LastMetrics, serving
from tests.stages.runs import few_devices, posttrain, rl_stage, sft_stage, write_run

LINE = re.compile(r'(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\{stage="(?P<stage>[^"]+)"\} (?P<value>\S+)')


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def read(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def gauges(text: str) -> dict[str, tuple[str, float]]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = [LINE.fullmatch(line) for line in lines]
    assert None not in found, lines
    return {m["name"]: (m["stage"], float(m["value"])) for m in found if m is not None}


def test_text() -> None:
    last = LastMetrics()
    assert last.text() == ""
    last.begin("0-sft")
    last.add(3, {"rewards/it's/mean": 0.5, "a/b": float("nan"), "a_b": float("inf"), "eval/nll": 2.0})
    last.add(4, {"a/b": -1.0})
    text = last.text()
    assert "# HELP posttrain_rewards_it_s_mean rewards/it's/mean\n# TYPE posttrain_rewards_it_s_mean gauge\n" in text
    assert 'posttrain_a_b_{stage="0-sft"} +Inf\n' in text, "another metric of the same name"
    found = gauges(text)
    assert found["posttrain_step"] == ("0-sft", 4.0) and found["posttrain_a_b"] == ("0-sft", -1.0)
    assert found["posttrain_eval_nll"][1] == 2.0, "the newest value of each"
    last.begin("1-rl")
    assert gauges(last.text()).keys() == {"posttrain_step", "posttrain_updated_seconds"}


def test_a_run_serves_its_last_step(tmp_path: Path, port: int) -> None:
    """Of the stage that trains; the port is free again after a run, also after one that failed."""
    settings = {"metrics_server": {"port": port}}
    file = write_run(tmp_path, sft_stage(num_steps=2), rl_stage(num_steps=1), **settings)
    seen: dict[str, tuple[str, float]] = {}

    def on_step(step: int, metrics: object) -> None:
        seen.update(gauges(read(port)))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(port, "/config.yaml")

    with few_devices(1):
        run(load_config(file), on_step=on_step)
    assert seen["posttrain_nll"][0] == "0-sft" and seen["posttrain_step"][0] == "1-rl"
    with pytest.raises(urllib.error.URLError, match="refused"):
        read(port)
    (tmp_path / "rows.jsonl").unlink()
    assert "rows.jsonl" in posttrain("run", file, f"output={tmp_path / 'other'}").error
    # Another port, or none, is the same run.
    with few_devices(1), pytest.raises(ConfigError, match=r"rows\.jsonl"):
        run(load_config(file, ["metrics_server=null"]))
    with serving(MetricsServerSection(port=port)):
        pass


def test_a_port_that_is_taken_is_refused_by_name(tmp_path: Path, port: int) -> None:
    file = write_run(tmp_path, sft_stage(), metrics_server={"port": port})
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        for command in ("check", "run"):
            error = posttrain(command, file).error
            assert error.startswith(f"metrics_server: 127.0.0.1:{port} cannot be used (") and "in use" in error
    assert not (tmp_path / "out").exists()
    assert "metrics_server: 203.0.113.7:" in posttrain("check", file, "metrics_server.host=203.0.113.7").error
    assert posttrain("check", file).code == 0


def test_the_first_process_alone_serves(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "index", lambda: 1)
    with serving(MetricsServerSection(port=port)) as last:
        assert last is None
        with pytest.raises(urllib.error.URLError, match="refused"):
            read(port)
