"""Endpoint of a run's last metrics, in the text format of Prometheus."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from posttrain.config.run import MetricsServerSection
from posttrain.errors import ConfigError
from posttrain.metrics import Sample
from posttrain.runtime import processes
from posttrain.tracking.console import console

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class LastMetrics:
    """Newest value of each metric of the stage that runs; written by the run, read by the endpoint's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stage, self._step, self._time = "", 0, 0.0
        self._values: dict[str, float] = {}

    def begin(self, stage: str) -> None:
        """Forget the stage before."""
        with self._lock:
            self._stage, self._step, self._time, self._values = stage, 0, time.time(), {}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._step, self._time = step, time.time()
            self._values |= metrics

    def text(self) -> str:
        """All values as Prometheus reads them: gauges named `posttrain_<metric>`, with `_` for what it does not allow
        in names, and the stage as their label."""
        with self._lock:
            stage, values = self._stage, dict(self._values)
            own = {"step": (float(self._step), "Last step."), "updated_seconds": (self._time, "Unix time of its line.")}
        if not stage:
            return ""
        lines: list[str] = []
        for name, (value, text) in (own | {name: (value, name) for name, value in values.items()}).items():
            gauge = f"posttrain_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
            while f"# TYPE {gauge} gauge" in lines:  # of two names that differ in what became `_`
                gauge += "_"
            lines += [f"# HELP {gauge} {_escaped(text)}", f"# TYPE {gauge} gauge"]
            lines.append(f'{gauge}{{stage="{_escaped(stage)}"}} {_number(value)}')
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class MetricsSink:
    """Sink of one stage whose metrics the endpoint shows."""

    def __init__(self, last: LastMetrics, stage: str) -> None:
        self._last = last
        last.begin(stage)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last.add(step, metrics)

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """Ignored: a gauge is one number."""

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Ignored: a gauge is one number."""

    def close(self) -> None:
        """Nothing to close: the endpoint lives as long as the run."""


@contextmanager
def serving(section: MetricsServerSection | None) -> Iterator[LastMetrics | None]:
    """Serve the last metrics in this block, from the first process of the run; None where nothing is served.
    ConfigError for an address that cannot be used, such as a port that is taken."""
    if section is None or not processes.writes():
        yield None
        return
    last = LastMetrics()
    server = _bound(section, last)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True, name="metrics")
    thread.start()
    host = f"[{section.host}]" if ":" in section.host else section.host
    console().print(f"metrics: http://{host}:{section.port}{PATH}", markup=False, highlight=False, soft_wrap=True)
    try:
        yield last
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def check_address(section: MetricsServerSection | None) -> None:
    """Bind the address of the endpoint as a run will, for a moment. ConfigError if it cannot be used."""
    if section is not None and processes.writes():
        _bound(section, LastMetrics()).server_close()


def _bound(section: MetricsServerSection, last: LastMetrics) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        """Answers with the last metrics, and with nothing else of the run."""

        timeout = 10

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != PATH:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            body = last.text().encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing is printed of requests."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in section.host else socket.AF_INET
        daemon_threads = True

    try:
        return Server((section.host, section.port), Handler)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"metrics_server: {section.host}:{section.port} cannot be used ({error}); give another port, or remove it"
        ) from error
