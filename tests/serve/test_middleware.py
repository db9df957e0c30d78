"""Outer layer of the servers: names, sites, media types and sizes; and that one large request stops nobody else."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from posttrain.data.tokenizer import Tokenizer
from posttrain.serve import completions, middleware
from posttrain.serve.body import Body, Refused
from posttrain.serve.middleware import AllowedHosts, RequestGuard
from posttrain.serve.model import Limits, Served
from tests.serve.serving import listening, tiny_served

NAME, LENGTH = "mine", 64
SITE = "https://app.example.org"


@pytest.fixture(scope="module")
def served() -> Served:
    return tiny_served(NAME, LENGTH, slots=2, limits=Limits(queue=6, timeout_s=60.0))


@pytest.fixture(scope="module")
def url(served: Served) -> Iterator[str]:
    with listening(served) as address:
        yield address


@pytest.mark.parametrize(
    ("bound", "names", "allowed", "refused"),
    [
        (
            "127.0.0.1",
            (),
            ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.3.2.1", "[::1]:80", "localhost."),
            (
                "evil.org",
                "127.0.0.1.evil.org",
                "localhost@evil.org",
                "10.0.0.1",
                "0.0.0.0",
                "",
                "localhost:evil",
                "[::2]",
            ),
        ),
        ("172.17.0.1", (), ("172.17.0.1:9", "localhost"), ("172.17.0.2", "evil.org")),
        ("0.0.0.0", ("llm.lan",), ("10.1.2.3:80", "[fe80::1]", "llm.lan:443", "LLM.lan"), ("evil.org", "x.llm.lan")),
    ],
)
def test_hosts(bound: str, names: tuple[str, ...], allowed: tuple[str, ...], refused: tuple[str, ...]) -> None:
    hosts = AllowedHosts(bound, names)
    assert [one for one in allowed if one not in hosts] == [] == [one for one in refused if one in hosts]


def ask(
    method: str = "POST",
    headers: Any = (),
    body: list[bytes] | None = None,
    origins: Any = (),
    max_body: int = middleware.MAX_BODY,
) -> tuple[int, Any]:
    """Status and headers of an answer of an application that reads its body, and answers 200 or fails."""
    sent: list[Any] = []
    waiting = [*(body or [b"{}"])]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        if scope["method"] == "DELETE":
            raise ZeroDivisionError
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        sent.append(message)

    guard = RequestGuard(app, hosts=AllowedHosts("127.0.0.1"), origins=origins, max_body=max_body)
    given = {"Host": "localhost:8000", **dict(headers)}
    pairs = [(name.lower().encode(), value.encode()) for name, value in given.items()]
    asyncio.run(guard({"type": "http", "method": method, "headers": pairs}, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def test_types_and_sites(capsys: pytest.CaptureFixture[str]) -> None:
    """What a page of another site can send without a preflight is refused; clients that are no browsers are not."""
    page, kind = {"Origin": SITE}, {"Content-Type": "application/json; charset=utf-8"}
    assert ask(headers=kind)[0] == ask()[0] == 200
    for other in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/json",
        "",
    ):
        assert ask(headers={"Content-Type": other})[0] == ask(headers={"Content-Type": other, **page})[0] == 415
    for origin in (SITE, "null", "http://localhost:3000", "http://localhost:8000.evil.org"):
        assert ask(headers={"Origin": origin, **kind})[0] == ask(headers={"Origin": origin})[0] == 403
    assert ask(headers={"Origin": "http://localhost:8000", **kind})[0] == 200
    assert ask("GET", {"Host": "evil.org"})[0] == 403
    assert ask("DELETE")[0] == 500 and "ZeroDivisionError" in capsys.readouterr().err


def test_cors() -> None:
    wanted = {"Origin": SITE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    assert ask("OPTIONS", wanted)[0] == 403
    for origins in ([SITE], ["*"]):
        status, headers = ask("OPTIONS", wanted, origins=origins)
        assert (status, headers["access-control-allow-origin"]) == (204, SITE)
        assert headers["access-control-allow-headers"] == "content-type" and headers["vary"] == "Origin"
        status, headers = ask(headers={"Origin": SITE, "Content-Type": "application/json"}, origins=origins)
        assert (status, headers["access-control-allow-origin"]) == (200, SITE)
    assert ask(headers={"Origin": "https://app.example.org.evil.org"}, origins=[SITE])[0] == 403


def test_sizes() -> None:
    """Declared and counted; at the limit a body is still read. A client that goes on sending is cut off."""
    most, half = 1 << 20, b" " * (1 << 19)
    assert ask(body=[half] * 2, max_body=most)[0] == 200
    status, headers = ask(body=[half] * 2 + [b" "], max_body=most)
    assert status == 413 and "connection" not in headers
    assert ask(headers={"Content-Length": str(most + 1)}, max_body=most)[0] == 413
    status, headers = ask(body=[half] * 20, max_body=most)
    assert (status, headers["connection"]) == (413, "close")
    with pytest.raises(Refused, match="commas and brackets") as many:
        Body.of(b'{"a": [' + b"[]," * (1 << 20) + b"0]}")
    assert many.value.status == 413


def test_nothing_is_encoded_that_cannot_fit(url: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of samples and of bytes are refused first, and of prompts that do not fit one at most is encoded."""
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    long = "some words of text " * 10_000
    chats = [{"role": "user", "content": long}]
    parts = [{"role": "user", "content": [{"type": "text", "text": long}]}]
    for path, body, words in (
        ("completions", {"prompt": ["a"] * 5, "n": 2}, "10 samples in one request; at most 8, the server's --slots"),
        ("completions", {"prompt": [long] * 8}, "bytes of text"),
        ("completions", {"prompt": ["é" * 700] * 3}, "bytes of text"),
        ("chat/completions", {"messages": chats}, "messages has 190000"),
        ("chat/completions", {"messages": parts}, "bytes of text"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 9}, "9 samples"),
        ("responses", {"input": long}, "input has 190000"),
    ):
        answer = httpx.post(f"{url}/{path}", json={"model": NAME, **body})
        assert answer.status_code == 400 and words in answer.text, answer.text
    assert encoded == []
    answer = httpx.post(f"{url}/completions", json={"model": NAME, "prompt": ["a" * 65] * 8})
    assert answer.status_code == 400 and encoded.count(65) == 1


def test_others_are_answered_meanwhile(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose text is being encoded holds up neither /health nor another's completion."""
    begun, go_on = threading.Event(), threading.Event()
    real = completions._prompts

    def slow(value: Any, *rest: Any) -> Any:
        if value == "slow":
            begun.set()
            assert go_on.wait(60)
        return real(value, *rest)

    monkeypatch.setattr(completions, "_prompts", slow)
    answers: list[int] = []

    def large() -> None:
        body = {"model": NAME, "prompt": "slow", "max_tokens": 2}
        answers.append(httpx.post(f"{url}/completions", json=body, timeout=60).status_code)

    thread = threading.Thread(target=large)
    thread.start()
    try:
        assert begun.wait(60)
        assert httpx.get(url.replace("/v1", "/health"), timeout=30).status_code == 200
        body = {"model": NAME, "prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{url}/completions", json=body, timeout=30).status_code == 200 and answers == []
    finally:
        go_on.set()
        thread.join()
    assert answers == [200]


def test_the_servers_have_the_layer(url: str) -> None:
    port = int(url.split(":")[2].split("/")[0])
    for host, kind, status in (("evil.org", "application/json", 403), ("localhost", "text/plain", 415)):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 1})
        client.request("POST", "/v1/completions", body, {"Host": host, "Content-Type": kind})
        assert client.getresponse().status == status
        client.close()
