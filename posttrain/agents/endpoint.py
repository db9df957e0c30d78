"""OpenAI-compatible endpoint on loopback, with an address of its own for each session."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from posttrain.agents.session import RequestRefused, SampledTurn, Session
from posttrain.data.messages import checked_tools, from_wire, to_wire
from posttrain.errors import ConfigError, RunError

MODEL = "policy"
START_TIMEOUT_S = 30.0
MAX_BODY = 64 << 20
"""Maximum bytes of a request."""
MAX_DEPTH = 100
"""Maximum nesting of a request, and of the arguments of calls in it."""
FINISH = {"stop": "stop", "length": "length"}


class Endpoint:
    """Server in a thread of its own; sessions sample in the event loop that opened them.

    Addresses hold a secret. The sampling settings are those of the run, whatever a request says, except for its
    `max_tokens`, `stop` and `tools`.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[Session, asyncio.AbstractEventLoop]] = {}
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._port = 0

    def open(self, session: Session) -> str:
        """Begin to serve a session in the running event loop; returns its base URL."""
        self._start()
        name = secrets.token_urlsafe(16)
        self._sessions[name] = session, asyncio.get_running_loop()
        return f"http://127.0.0.1:{self._port}/{name}/v1"

    def end(self, base_url: str) -> None:
        """End a session: its later requests are refused, those under way cancelled."""
        session, _ = self._sessions.pop(base_url.split("/")[3])
        session.close()

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join()
        self._server = self._thread = None

    def _start(self) -> None:
        if self._thread is not None:
            return
        import uvicorn

        config = uvicorn.Config(
            _application(self._sessions), host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True, name="agent endpoint")
        self._thread.start()
        end = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if time.monotonic() > end or not self._thread.is_alive():
                raise RunError("agent: the endpoint on 127.0.0.1 did not start; is opening a port allowed here?")
            time.sleep(0.005)
        self._port = self._server.servers[0].sockets[0].getsockname()[1]


def check_extra() -> None:
    """ConfigError without the extra `agents`."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"agent: needs the extra agents ({error}); pip install 'posttrain[agents]'") from error


def _application(sessions: dict[str, tuple[Session, asyncio.AbstractEventLoop]]) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    async def chat(request: Request) -> Any:
        served = sessions.get(request.path_params["session"])
        try:
            if served is None:
                raise RequestRefused(404, "session_not_found", "there is no such session, or it has ended")
            session, loop = served
            body = _checked(await _received(request))
            sampled = asyncio.run_coroutine_threadsafe(_complete(session, body), loop)
            choices = await asyncio.wrap_future(sampled)
        except RequestRefused as refused:
            error = {"message": str(refused), "type": "invalid_request_error", "code": refused.code}
            return JSONResponse({"error": error}, status_code=refused.status)
        except asyncio.CancelledError:
            error = {"message": "the session has ended", "type": "invalid_request_error", "code": "session_closed"}
            return JSONResponse({"error": error}, status_code=410)
        answer = _response(choices)
        if body.get("stream"):
            return StreamingResponse(_stream(answer), media_type="text/event-stream")
        return JSONResponse(answer)

    async def models(request: Request) -> Any:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "posttrain"}]})

    return Starlette(
        routes=[
            Route("/{session}/v1/chat/completions", chat, methods=["POST"]),
            Route("/{session}/v1/models", models, methods=["GET"]),
        ]
    )


async def _received(request: Any) -> bytes:
    """Body of a request."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise RequestRefused(413, "request_too_large", f"the body must be at most {MAX_BODY >> 20} MiB")
    return bytes(body)


def _checked(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
        if not isinstance(body, dict):
            raise TypeError("the body must be a JSON object")
        json.dumps(body, ensure_ascii=False).encode()  # lone surrogates are no text
        body["messages"], body["tools"] = from_wire(body.get("messages")), checked_tools(body.get("tools"))
        _check_depth(body)
        count, tokens = body.get("n") or 1, body.get("max_completion_tokens") or body.get("max_tokens")
        if type(count) is not int or count < 1:
            raise TypeError(f"n={count!r} must be a positive integer")
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise TypeError(f"max_tokens={tokens!r} must be a positive integer")
        stop = body.get("stop") or ()
        stops = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stops, tuple | list) or not all(isinstance(one, str) and one for one in stops):
            raise TypeError("stop must be strings that are not empty")
    except UnicodeEncodeError as error:
        raise RequestRefused(400, "invalid_request_error", "the body has a lone surrogate, which is no text") from error
    except RecursionError as error:
        raise RequestRefused(400, "invalid_request_error", "the body is nested too deeply") from error
    except (ValueError, TypeError, ConfigError) as error:
        raise RequestRefused(400, "invalid_request_error", " ".join(str(error).split())) from error
    return {**body, "n": count, "max_tokens": tokens, "stop": tuple(stops)}


def _check_depth(body: Any) -> None:
    left = [body]
    for _ in range(MAX_DEPTH):
        left = [item for one in left for item in (one.values() if isinstance(one, dict) else one)]
        left = [item for item in left if isinstance(item, dict | list | tuple)]
    if left:
        raise TypeError(f"the body is nested too deeply; at most {MAX_DEPTH} levels")


async def _complete(session: Session, body: dict[str, Any]) -> list[SampledTurn]:
    if body["n"] > session.max_turns:
        rule = f"n={body['n']} must be at most {session.max_turns}: each choice is a turn (agent.max_turns)"
        raise RequestRefused(400, "invalid_request_error", rule)
    asked = [
        session.complete(body["messages"], body["tools"], body["max_tokens"], body["stop"]) for _ in range(body["n"])
    ]
    return list(await asyncio.gather(*asked))


def _response(choices: list[SampledTurn]) -> dict[str, Any]:
    prompt = choices[0].num_prompt_tokens
    sampled = sum(len(choice.completion.tokens) for choice in choices)
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [
            {
                "index": index,
                "message": to_wire(choice.message),
                "logprobs": None,
                "finish_reason": "tool_calls"
                if choice.message.get("tool_calls")
                else FINISH.get(choice.completion.stop, "stop"),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }


async def _stream(answer: dict[str, Any]) -> AsyncIterator[str]:
    """SampledTurn as server-sent events: one chunk for each choice, and its end."""
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in answer["choices"]:
        calls = choice["message"].get("tool_calls")
        delta = {"role": "assistant", "content": choice["message"]["content"]}
        if calls:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        for piece, finish in ((delta, None), ({}, choice["finish_reason"])):
            chunk = {**head, "choices": [{"index": choice["index"], "delta": piece, "finish_reason": finish}]}
            yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"
