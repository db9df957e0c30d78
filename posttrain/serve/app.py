"""HTTP: routes, keys, errors, streams of events, and clients that hang up; listening and running."""

from __future__ import annotations

import asyncio
import gc
import secrets
import socket
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from posttrain.errors import ConfigError
from posttrain.serve.admission import ConnectionLimits
from posttrain.serve.body import Body, Refused
from posttrain.serve.chat import ChatRequest, ResponseRequest
from posttrain.serve.completions import Answer, CompletionRequest
from posttrain.serve.metrics import Metrics
from posttrain.serve.middleware import MAX_BODY, MAX_HEAD, AllowedHosts, RequestGuard
from posttrain.serve.model import Backend, Served
from posttrain.serve.writing import encoded, event, written

T = TypeVar("T")
HUNG_UP = 499
"""Status in the metrics of a request whose client hung up."""
KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs (httpx 5 s), which else lose the request
that they send while it is closed."""
PIECE = 1 << 20
"""Bytes of an answer that are sent at once."""
GRACE_S = 2
"""Seconds that answers have to end when the server is stopped."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")

Lookup = Callable[[Any], Backend]
"""Backend of a request, by its address and key. Refused for one that has none."""


def application(
    lookup: Lookup,
    *,
    hosts: AllowedHosts,
    origins: Sequence[str] = (),
    max_body: int = MAX_BODY,
    prefix: str = "",
    served: Served | None = None,
    loads: bool = False,
) -> Any:
    """ASGI application over the backends that `lookup` finds, below a prefix of the path.

    `hosts`, `origins`: names of the server, and other sites whose pages may ask; `max_body`: bytes of a request; see
    `RequestGuard`. `served`: the model of `posttrain serve`, which also answers plain completions and has metrics; with
    `loads` clients may load and drop its adapters.
    """
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route

    metrics = None if served is None else served.metrics

    def route(path: str, answer: Callable[[Any, Backend], Awaitable[Any]], method: str = "POST") -> Route:
        async def endpoint(request: Any) -> Any:
            begun = time.perf_counter()
            try:
                response = await answer(request, lookup(request))
            except Refused as refused:
                headers = {"Retry-After": "1"} if refused.status == 503 else None
                response = JSONResponse(refused.wire, status_code=refused.status, headers=headers)
            except ClientGone:
                response = PlainTextResponse("", status_code=HUNG_UP)
            except Exception:
                traceback.print_exc()
                failed = Refused(500, "internal_error", "the server has failed; its output says how")
                response = JSONResponse(failed.wire, status_code=500)
            return _Measured(response, metrics, path, begun)

        return Route(f"{prefix}{path}", endpoint, methods=[method])

    async def chat(request: Any, backend: Backend) -> Any:
        return await _answer(request, await _read(request, ChatRequest), backend)

    async def responses(request: Any, backend: Backend) -> Any:
        return await _answer(request, await _read(request, ResponseRequest), backend)

    async def completions(request: Any, backend: Backend) -> Any:
        if served is None:
            raise Refused(404, "not_found", "a session answers chats alone: /v1/chat/completions or /v1/responses")
        return await _answer(request, await _read(request, CompletionRequest), served)

    async def models(request: Any, backend: Backend) -> Any:
        return JSONResponse({"object": "list", "data": [_model(name) for name in backend.names]})

    async def model(request: Any, backend: Backend) -> Any:
        name = request.path_params["name"]
        if name not in backend.names:
            raise Refused(404, "model_not_found", f"model {name!r} is not served here", "model")
        return JSONResponse(_model(name))

    async def health(request: Any) -> Any:
        return JSONResponse({"status": "ok"})

    async def measured(request: Any) -> Any:
        assert metrics is not None
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    own = [Route("/health", health), Route("/metrics", measured)] if metrics is not None else []
    app = Starlette(
        routes=[
            route("/v1/chat/completions", chat),
            route("/v1/responses", responses),
            route("/v1/completions", completions),
            route("/v1/models", models, "GET"),
            route("/v1/models/{name:path}", model, "GET"),
            *(route(path, change) for path, change in (_adapter_changes(served) if served and loads else {}).items()),
            *own,
        ],
        exception_handlers={404: _no_route, 405: _no_route},
    )
    return RequestGuard(app, hosts=hosts, origins=origins, max_body=max_body, options=served is not None)


def _adapter_changes(served: Served) -> dict[str, Callable[[Any, Backend], Awaitable[Any]]]:
    """Answers by path to clients that load and drop adapters."""
    from starlette.responses import PlainTextResponse

    async def load(request: Any, backend: Backend) -> Any:
        body = await _read(request, lambda fields: fields)
        name, folder = body.text("lora_name"), body.text("lora_path")
        body.finish()
        await served.load_adapter(name, folder)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: Any, backend: Backend) -> Any:
        body = await _read(request, lambda fields: fields)
        name = body.text("lora_name")
        body.finish()
        served.drop_adapter(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return {"/v1/load_lora_adapter": load, "/v1/unload_lora_adapter": unload}


async def _no_route(request: Any, error: Any) -> Any:
    from starlette.responses import JSONResponse

    refused = Refused(error.status_code, "not_found", f"{request.method} {request.url.path} is not served here")
    return JSONResponse(refused.wire, status_code=refused.status)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "posttrain"}


class ClientGone(Exception):
    """The client has hung up."""


async def _read(request: Any, make: Callable[[Body], T]) -> T:
    """Request that is made of the fields of a body, in a thread: a large one takes seconds to parse and to check."""
    from starlette.requests import ClientDisconnect

    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
    except ClientDisconnect as error:
        raise ClientGone from error
    return await asyncio.to_thread(lambda: make(Body.of(bytes(body))))


async def _answer(request: Any, asked: Any, backend: Any) -> Any:
    """Response to a request: whole, or as a stream of events. What is refused before it begins has a status."""
    answer: Answer = await until_gone(request.receive, asked.begin(backend))
    if asked.streaming.wanted:
        return _Events(answer)
    try:
        value = await until_gone(request.receive, answer.whole())
        return _Whole(await written(lambda: encoded(value).encode()))
    finally:
        await answer.close()


async def until_gone(receive: Callable[[], Awaitable[Any]], work: Awaitable[T]) -> T:
    """Result of some work, which is cancelled when the client hangs up: then ClientGone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    running, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientGone
        return running.result()
    finally:
        for task in (running, leaving):
            task.cancel()
        await asyncio.gather(running, leaving, return_exceptions=True)


class _Whole:
    """Response of JSON, sent in pieces as fast as its client reads them."""

    def __init__(self, body: bytes):
        self._body = body
        self.status_code = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        length = len(self._body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, length, PIECE):
            piece, end = self._body[start : start + PIECE], start + PIECE
            await send({"type": "http.response.body", "body": piece, "more_body": end < length})


class _Events:
    """Response of server-sent events."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self.status_code = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stream() -> None:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                async for text in self._answer.events():
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            except Refused as refused:
                self.status_code = refused.status
                body = event(refused.wire).encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await until_gone(receive, stream())
        except ClientGone:
            self.status_code = HUNG_UP
        finally:
            await self._answer.close()


class _Measured:
    """Response that counts its request when it has been sent."""

    def __init__(self, response: Any, metrics: Metrics | None, path: str, begun: float):
        self._response, self._metrics, self._path, self._begun = response, metrics, path, begun

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            if self._metrics is not None:
                self._metrics.requests[self._path, self._response.status_code] += 1
                self._metrics.request_s.add(time.perf_counter() - self._begun)


def bearer(request: Any) -> str:
    """Key of a request, which clients send as `Authorization: Bearer KEY`."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def check_key(request: Any, key: str) -> None:
    """Refuse a request without the right key."""
    if not secrets.compare_digest(bearer(request).encode(), key.encode()):
        raise Refused(401, "invalid_api_key", "the API key is missing or wrong; send it as Authorization: Bearer KEY")


def check_installed(extra: str, field: str) -> None:
    """ConfigError without the packages of a server. `field`: what asks for it."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{field}: needs the extra {extra} ({error}); pip install 'posttrain[{extra}]'") from error


def listen(host: str, port: int, field: str) -> socket.socket:
    """Open a port; ConfigError if it is taken, or the address is not of this machine. `field`: what asks for it."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"{field}: host {host!r} is not known ({error.strerror}); give an address") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{field}: port {port} of {host} cannot be opened ({error.strerror}); give another port or host"
        ) from error
    return listener


def server_of(app: Any, limits: ConnectionLimits | None = None) -> Any:
    """Server of an application, to be run with sockets that listen. `limits`: of its connections."""
    import uvicorn

    from posttrain.serve.connections import Connection

    config = uvicorn.Config(
        app,
        http=cast(Any, partial(Connection, limits=limits or ConnectionLimits())),
        h11_max_incomplete_event_size=MAX_HEAD,
        log_config=None,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    return uvicorn.Server(config)


def serve(
    served: Served,
    listener: socket.socket,
    api_key: str | None,
    *,
    hosts: AllowedHosts,
    origins: Sequence[str] = (),
    max_body: int = MAX_BODY,
    connections: ConnectionLimits | None = None,
    loads: bool = False,
) -> None:
    """Serve a model until the process is interrupted; then samples under way are ended at once. `hosts`, `origins`,
    `max_body`, `loads`: see `application`; `connections`: see `server_of`."""

    def lookup(request: Any) -> Backend:
        if api_key is not None:
            check_key(request, api_key)
        return served

    app = application(lookup, hosts=hosts, origins=origins, max_body=max_body, served=served, loads=loads)
    server = server_of(app, connections)
    leave = server.handle_exit

    def end() -> None:
        served.closing = True
        served.engine.abort()

    def handle_exit(signal: int, frame: Any) -> None:
        asyncio.get_running_loop().call_soon_threadsafe(end)  # the engine's bookkeeping may be under way
        leave(signal, frame)

    server.handle_exit = handle_exit
    host, number, *_ = listener.getsockname()
    url = f"http://{f'[{host}]' if ':' in host else host}:{number}/v1"
    engine = served.engine
    print(f"{', '.join(served.names)}: {url} ({engine.slots} slots of {engine.max_length} tokens)", flush=True)
    if note := served.form_note:
        print(note, flush=True)
    # What is there now stays: otherwise all threads wait while Python looks through it for garbage, again and again.
    gc.collect()
    gc.freeze()
    try:
        server.run(sockets=[listener])
    finally:
        served.engine.close()
