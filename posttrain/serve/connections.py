"""Connections of the servers: how many there may be, and how long one may take to send or to read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from posttrain.serve.admission import MIN_RATE, ConnectionLimits
from posttrain.serve.body import Refused
from posttrain.serve.middleware import MAX_HEAD


class Connection(H11Protocol):
    """Connection of a client. One that sends its request byte by byte is refused with 408, and closed where it does not
    read its answer: each would hold a socket, and samples, for good."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **fields: Any):
        super().__init__(*args, **fields)
        self._limits = limits
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._begun = 0.0
        """Time at which the request that is being read began."""
        self._received = 0
        """Bytes of it."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._limits.count:
            words = f"the server has {self._limits.count} connections already; try again later"
            return self._refuse(Refused(503, "overloaded", words))
        self._begin_request()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._reading is None:
            self._begin_request()
        self._received += len(data)
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._end_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_request()
        self._end_write()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_write()

    def send_400_response(self, msg: str) -> None:
        words = f"the request is no HTTP/1.1, or its first line and headers have more than {MAX_HEAD >> 10} KiB"
        self._refuse(Refused(400, "invalid_request", words))

    def _begin_request(self) -> None:
        self._begun, self._received = self.loop.time(), 0
        self._reading = self.loop.call_later(self._limits.read_s, self._check_request)

    def _check_request(self) -> None:
        """Refuse a request that is late for what has arrived of it."""
        end = self._begun + self._limits.read_s + self._received / MIN_RATE
        if self.loop.time() < end:
            self._reading = self.loop.call_at(end, self._check_request)
        elif not self._received:
            self.transport.close()
        else:
            words = f"the request has not arrived within {self._limits.read_s:g} s and one for each KiB"
            self._refuse(Refused(408, "request_timeout", words))

    def _end_request(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None

    def _wait_for_reader(self, left: int) -> None:
        """Close in a while unless the client has read some of the `left` bytes that wait for it."""

        def check() -> None:
            still = self.transport.get_write_buffer_size()
            if left - still < self._limits.read_s * MIN_RATE:
                self.transport.abort()
            else:
                self._wait_for_reader(still)

        self._end_write()
        self._writing = self.loop.call_later(self._limits.read_s, check)

    def _end_write(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._writing = None

    def _refuse(self, refused: Refused) -> None:
        """Answer before the application does, and close."""
        self._end_request()
        body = json.dumps(refused.wire, ensure_ascii=False).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (
                h11.Response(status_code=refused.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
