"""Outer layer of all servers: Host, Origin, Content-Type and the size of bodies are checked before anything is read."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from posttrain.serve.body import Refused

JSON = "application/json"
MAX_BODY = 64 << 20
"""Maximum bytes of a request."""
MAX_HEAD = 16 << 10
"""Maximum bytes of the first line and the headers of a request."""
PREFLIGHT_AGE_S = 600
"""Seconds for which a browser keeps the answer to a preflight request."""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _name(host: str) -> str:
    """Name of a host to be compared: small letters, and addresses in one form."""
    bare = host.lower().strip("[]")
    return str(_address(bare) or bare)


class AllowedHosts:
    """Names by which a server that listens on `host` may be asked, against DNS rebinding: a page of another site whose
    name leads to this machine. IPv6 addresses are the same in any form.

    Always localhost, loopback addresses and `host` itself. A server on all addresses (0.0.0.0, ::) also has this
    machine's name and any address, since rebinding needs a name. `names`: further ones, such as that of a proxy.
    """

    def __init__(self, host: str, names: Sequence[str] = ()):
        bound = _address(host)
        self._any_address = bound is not None and bound.is_unspecified
        own = [socket.gethostname(), socket.getfqdn()] if self._any_address else []
        self._names = {_name(name) for name in ("localhost", host, *own, *names)}

    def __contains__(self, header: str) -> bool:
        """Tell whether the value of a Host header is one of the names, with any port."""
        parts = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@/\s]+?))\.?(?::\d*)?", header)
        if parts is None:
            return False
        name = _name(parts[1] or parts[2])
        address = _address(name)
        if address is not None and (self._any_address or address.is_loopback):
            return True
        return name in self._names


class RequestGuard:
    """ASGI middleware that refuses what a page of another site can send through a user's browser, and what is too
    large; and answers 500 for an exception that nothing else has caught.

    `origins`: sites whose pages may ask, as `https://HOST[:PORT]`, or `*`; they get the headers of CORS. `max_body`:
    bytes of a request. `form`: an error's JSON; `headers`: those of every refusal; `options`: `posttrain serve` is told
    of as the way to allow a name or a site.
    """

    def __init__(
        self,
        app: Any,
        *,
        hosts: AllowedHosts,
        origins: Sequence[str] = (),
        max_body: int = MAX_BODY,
        options: bool = False,
        form: Callable[[Refused], Mapping[str, Any]] = lambda refused: refused.wire,
        headers: Mapping[str, str] | None = None,
    ):
        self._app, self._hosts, self._form = app, hosts, form
        self._origins = frozenset(origins)
        self._max_body, self._options = max_body, options
        self._headers = headers or {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begun = False
        cors: list[tuple[bytes, bytes]] = []
        body = _Body(receive, self._max_body, self._too_large)

        async def send_with_cors(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                # Clients read no answer while they send.
                closing = [] if await body.drop() else [(b"connection", b"close")]
                message = {**message, "headers": [*message.get("headers", ()), *cors, *closing]}
            await send(message)

        try:
            headers = _headers_of(scope)
            if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD:
                raise Refused(431, "headers_too_large", f"the headers must have at most {MAX_HEAD >> 10} KiB")
            self._check_host(headers)
            origin = self._checked_origin(scope, headers)
            if origin is not None:
                cors = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
                if scope["method"] == "OPTIONS":
                    return await self._answer_preflight(headers, send_with_cors)
            self._check_body(scope, headers)
        except Refused as refused:
            return await self._refuse(refused, send_with_cors)
        try:
            await self._app(scope, body.receive, send_with_cors)
        except Refused as refused:
            if begun:
                raise
            await self._refuse(refused, send_with_cors)
        except Exception:
            traceback.print_exc()
            if not begun:
                failed = Refused(500, "internal_error", "the server has failed; its output says how")
                await self._refuse(failed, send_with_cors)

    def _check_host(self, headers: Mapping[str, list[str]]) -> None:
        for host in headers.get("host", ()):
            if host not in self._hosts:
                remedy = "; start it with --allowed-host NAME for one that leads here" if self._options else ""
                raise Refused(403, "host_not_allowed", f"Host {host[:80]!r} is no name of this server{remedy}")

    def _checked_origin(self, scope: Any, headers: Mapping[str, list[str]]) -> str | None:
        """Origin of a page that `origins` allow; None for the server's own pages, and without a browser."""
        allowed = None
        for origin in headers.get("origin", ()):
            if origin in self._origins or "*" in self._origins:
                allowed = origin
            elif origin.partition("://")[2].lower() not in {host.lower() for host in headers.get("host", ())}:
                # A form's media type is told first: it is what a person with a client of their own has to change.
                self._check_body(scope, headers)
                remedy = "; start the server with --allowed-origin ORIGIN to let them" if self._options else ""
                words = f"Origin {origin[:80]!r} is another site, whose pages may not ask{remedy}"
                raise Refused(403, "origin_not_allowed", words)
        return allowed

    def _check_body(self, scope: Any, headers: Mapping[str, list[str]]) -> None:
        """Refuse a body of another type than JSON, and one that is too large by its own words."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return
        for given in headers.get("content-type", ()):
            if given.partition(";")[0].strip().lower() != JSON:
                raise Refused(
                    415,
                    "unsupported_media_type",
                    f"Content-Type {given[:80]!r} must be application/json (curl: -H 'Content-Type: application/json')",
                )
        for length in headers.get("content-length", ()):
            if length.isdecimal() and int(length[:20]) > self._max_body:
                raise self._too_large()

    async def _answer_preflight(self, headers: Mapping[str, list[str]], send: Any) -> None:
        asked = ", ".join(headers.get("access-control-request-headers", ()))
        answer = {
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": asked or "authorization, content-type",
            "access-control-max-age": str(PREFLIGHT_AGE_S),
        }
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in answer.items()]
        await send({"type": "http.response.start", "status": 204, "headers": encoded})
        await send({"type": "http.response.body", "body": b""})

    async def _refuse(self, refused: Refused, send: Any) -> None:
        body = json.dumps(self._form(refused), ensure_ascii=False).encode()
        headers = {"content-type": JSON, "content-length": str(len(body))}
        encoded = [
            (name.lower().encode(), value.encode("latin-1")) for name, value in {**headers, **self._headers}.items()
        ]
        await send({"type": "http.response.start", "status": refused.status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})

    def _too_large(self) -> Refused:
        option = "; start the server with a higher --max-body" if self._options else ""
        words = f"the body must be at most {self._max_body / 2**20:g} MiB{option}"
        return Refused(413, "request_too_large", words)


class _Body:
    """Body of a request while it is read, of at most so many bytes."""

    def __init__(self, receive: Callable[[], Awaitable[Any]], most: int, refusal: Callable[[], Refused]):
        self._receive, self._most, self._refusal = receive, most, refusal
        self._count = 0
        self._whole = False

    async def receive(self) -> Any:
        """Next message. Refused beyond the most bytes."""
        message = await self._next()
        if self._count > self._most:
            raise self._refusal()
        return message

    async def drop(self) -> bool:
        """Read what is left, and keep nothing of it; False if that is more than a client sends by mistake."""
        while not self._whole and self._count <= 4 * self._most:
            await self._next()
        return self._whole

    async def _next(self) -> Any:
        message = await self._receive()
        self._count += len(message.get("body", b""))
        self._whole = self._whole or not message.get("more_body")
        return message


def _headers_of(scope: Any) -> dict[str, list[str]]:
    """Values of each header by its name in small letters."""
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return found
