"""Connections of the servers: clients that send or read byte by byte, and too many of them. Without a model."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from posttrain.serve.admission import ConnectionLimits
from posttrain.serve.app import listen, server_of
from posttrain.serve.middleware import AllowedHosts, RequestGuard

pytestmark = pytest.mark.fast

READ_S = 0.4
COUNT = 6
PIECE = b"x" * (1 << 16)
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 400\r\n\r\n"


class Streaming:
    """Application that answers a GET with a stream of so many pieces, and others with the length of their body."""

    def __init__(self) -> None:
        self.pieces = 1
        self.gone = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        count = 0
        while (message := await receive()).get("more_body"):
            count += len(message["body"])
        if message["type"] == "http.disconnect":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["method"] == "GET":
            for _ in range(self.pieces):
                await send({"type": "http.response.body", "body": PIECE, "more_body": True})
                if (await _now(receive))["type"] == "http.disconnect":
                    self.gone.set()
                    return
        await send({"type": "http.response.body", "body": str(count + len(message["body"])).encode()})


async def _now(receive: Any) -> Any:
    """Next message, unless there is none yet."""
    import asyncio

    try:
        return await asyncio.wait_for(receive(), 0.001)
    except TimeoutError:
        return {"type": "nothing"}


@pytest.fixture(scope="module")
def app() -> Streaming:
    return Streaming()


@pytest.fixture(scope="module")
def port(app: Streaming) -> Iterator[int]:
    listener = listen("127.0.0.1", 0, "test")
    limits = ConnectionLimits(count=COUNT, read_s=READ_S)
    server = server_of(RequestGuard(app, hosts=AllowedHosts("127.0.0.1")), limits)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def answer(client: socket.socket) -> tuple[int, Any]:
    response = http.client.HTTPResponse(client)
    response.begin()
    text = response.read()
    return response.status, json.loads(text)["error"] if response.status >= 400 else text


def drip(client: socket.socket, data: bytes) -> None:
    """Send a byte every tenth of a second, until the server closes."""
    try:
        for byte in data:
            client.sendall(bytes([byte]))
            time.sleep(READ_S / 10)
    except OSError:
        return


@pytest.mark.parametrize("before", [b"", b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@pytest.mark.parametrize("given", [b"GET /", HEAD, HEAD + b"{"])
def test_a_request_that_comes_byte_by_byte(port: int, app: Streaming, before: bytes, given: bytes) -> None:
    """408 by the time, in the head or in the body, first on its connection or later, and whether bytes come or none."""
    app.pieces = 0
    for data in (b"", b"y" * 200):
        with connected(port) as client:
            if before:
                client.sendall(before)
                assert answer(client)[0] == 200
            begun = time.monotonic()
            client.sendall(given)
            threading.Thread(target=drip, args=(client, data), daemon=True).start()
            status, error = answer(client)
            assert (status, error["code"]) == (408, "request_timeout") and f"{READ_S} s" in error["message"]
            assert READ_S * 0.9 < time.monotonic() - begun < 10


def test_a_slow_request_of_many_bytes_is_read(port: int) -> None:
    """Longer than the time, and faster than a KiB per second."""
    with connected(port) as client:
        client.sendall(HEAD.replace(b"400", b"8000"))
        for _ in range(8):
            time.sleep(READ_S / 4)
            client.sendall(b"z" * 1000)
        assert answer(client) == (200, b"8000")


def test_a_connection_without_a_request_is_closed(port: int) -> None:
    with connected(port) as client:
        assert client.recv(100) == b""


def test_a_client_that_does_not_read(port: int, app: Streaming) -> None:
    """It is cut off, and what answers it hears of that; one that reads slowly gets all."""
    app.gone.clear()
    app.pieces = 4000
    with connected(port) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert app.gone.wait(20)
    app.pieces = 40
    with connected(port) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        count, begun = 0, time.monotonic()
        while piece := client.recv(1 << 18):
            count += len(piece)
            time.sleep(READ_S / 20)
        assert count > 40 * len(PIECE) and time.monotonic() - begun > READ_S / 2


def test_too_many_connections(port: int, app: Streaming) -> None:
    """One more is 503; when they have been idle for their time, others are answered."""
    app.pieces = 0
    clients = [connected(port) for _ in range(COUNT)]
    time.sleep(0.1)
    with connected(port) as client:
        status, error = answer(client)
        assert (status, error["code"]) == (503, "overloaded") and f"{COUNT} connections" in error["message"]
    for one in clients:
        assert one.recv(10) == b""
        one.close()
    with connected(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(client)[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000,
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    ],
)
def test_what_is_no_request(port: int, raw: bytes) -> None:
    with connected(port) as client:
        client.sendall(raw + b"\r\n")
        status, error = answer(client)
        assert (status, error["code"], error["type"]) == (400, "invalid_request", "invalid_request_error")


def test_large_headers_that_come_at_once(port: int) -> None:
    with connected(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n")
        status, error = answer(client)
        assert (status, error["code"]) == (431, "headers_too_large")
