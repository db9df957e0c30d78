"""The LLM judge against a small server: limits hold over processes, failures are retried, and are never a 0."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rewards import judge


class Server(ThreadingHTTPServer):
    """Scores a completion by its digit; other words of it decide about faults."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.running = self.most = 0
        self.takes_s = 0.03
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][0]["content"]
        server = self.server
        with server.lock:
            before = sum(text == one["messages"][0]["content"] for one in server.seen)
            server.seen.append({**body, "key": self.headers["authorization"]})
            server.times.append(time.monotonic())
            server.running += 1
            server.most = max(server.most, server.running)
        time.sleep(server.takes_s)
        with server.lock:
            server.running -= 1
        status, headers = 200, {}
        if "busy" in text and not before:
            status, headers = 429, {"Retry-After": "0.3"}
        if ("flaky" in text and before < 2) or "down" in text:
            status = 503
        if "refused" in text:
            status = 400
        said = "no idea" if "mute" in text else f"Well.\nScore: {text.split('#')[1]}"
        content = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(judge, "FIRST_DELAY_S", 0.01)
    (tmp_path / "rubric.txt").write_text(
        "Q: {prompt} A: {completion} Gold: {answer}; of 10, braces {} stay. #{completion}#"
    )
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server: Server, tmp_path: Path, completions: list[Any], **changes: Any) -> list[Any]:
    fields: dict[str, Any] = {
        "base_url": server.url,
        "model": "m",
        "rubric": str(tmp_path / "rubric.txt"),
        "lowest": 0,
        "highest": 10,
    }
    return asyncio.run(judge.judged(completions, ["p {completion}"] * len(completions), **fields | changes))


def test_scores_and_requests(server: Server, tmp_path: Path) -> None:
    found = ask(server, tmp_path, ["7", [{"role": "assistant", "content": "10"}]], answer=["a", "b"], api_key="secret")
    assert found == [0.7, 1.0]
    first = next(one for one in server.seen if "#7#" in one["messages"][0]["content"])
    assert first["messages"][0]["content"] == "Q: p {completion} A: 7 Gold: a; of 10, braces {} stay. #7#"
    assert (first["model"], first["temperature"], first["key"]) == ("m", 0.0, "Bearer secret")


def test_failures_are_retried_and_then_errors(server: Server, tmp_path: Path) -> None:
    """Red if an unreadable reply or a refused request were a score."""
    found = ask(server, tmp_path, ["3 busy", "4 flaky", "5 down", "6 refused", "7 mute", "11", "8"], retries=2)
    assert found[:2] == pytest.approx([0.3, 0.4]) and found[6] == 0.8
    messages = [str(error) for error in found[2:6]]
    assert all(isinstance(error, Exception) for error in found[2:6])
    assert messages[0].endswith(
        "no reply after 3 requests; the last: status 503: " + messages[0].rpartition("503: ")[2]
    )
    assert "status 400" in messages[1] and "no line 'Score: NUMBER'" in messages[2]
    assert messages[3] == "the judge's score 11 is outside of its scale, 0 to 10"
    texts = [one["messages"][0]["content"] for one in server.seen]
    assert [sum(word in text for text in texts) for word in ("busy", "flaky", "down", "refused")] == [2, 3, 3, 1]
    times = [at for at, text in zip(server.times, texts, strict=True) if "busy" in text]
    assert times[1] - times[0] >= 0.3, "Retry-After"


def test_no_server(server: Server, tmp_path: Path) -> None:
    (error,) = ask(server, tmp_path, ["1"], base_url="http://127.0.0.1:9/v1", retries=1)
    assert "no reply after 2 requests; the last: ConnectError" in str(error)


OTHER = """
import asyncio, sys
from rewards import judge
print("ready", flush=True)
sys.stdin.readline()
asyncio.run(judge.judged(["1"] * 6, ["p"] * 6, base_url=sys.argv[1], model="m", rubric=sys.argv[2], lowest=0,
                         highest=10, concurrency=3))
"""


def test_places_are_shared_by_processes(server: Server, tmp_path: Path) -> None:
    """Red with a semaphore alone: two processes would have six requests at a time."""
    command = [sys.executable, "-c", OTHER, server.url, str(tmp_path / "rubric.txt")]
    server.takes_s = 0.2
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": Path(__file__).resolve().parents[2]}
    others = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for other in others:
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
    for other in others:
        assert other.stdin is not None
        other.stdin.write(b"go\n")
        other.stdin.flush()
    assert [other.communicate(timeout=60)[0] for other in others] == [b"", b""]
    assert len(server.seen) == 12 and server.most <= 3


def test_requests_per_minute(server: Server, tmp_path: Path) -> None:
    ask(server, tmp_path, ["1"] * 5, requests_per_minute=1200)
    assert max(server.times) - min(server.times) >= 4 * 60 / 1200 - 0.05


def test_retry_after() -> None:
    assert judge.retry_after(None) == 0 and judge.retry_after("2.5") == 2.5 and judge.retry_after("soon") == 0
    assert 5 < judge.retry_after(formatdate(time.time() + 8, usegmt=True)) <= 8
