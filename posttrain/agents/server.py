"""Sessions of agents on the OpenAI-compatible server: a secret address for each, sampling settings of the run."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.agents.session import SampledTurn, Session
from posttrain.errors import RunError
from posttrain.rollout.types import NewTokens
from posttrain.serve.app import LOOPBACK, application, check_key, listen, server_of
from posttrain.serve.body import ChatAsk, Refused, wrong
from posttrain.serve.middleware import AllowedHosts
from posttrain.serve.model import Backend, Delta, Turns, finish_reason, logprob_entries
from posttrain.serve.writing import written
from posttrain.tools.types import ToolCall

MODEL = "policy"
START_TIMEOUT_S = 30.0
OF_THE_RUN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Fields whose values are those of the run, whatever a request says: the trainer must know the distribution."""


@dataclass(frozen=True)
class Opened:
    """Session as its agent finds it."""

    base_url: str
    api_key: str


@dataclass(frozen=True)
class SessionBackend:
    """Session that answers chats, in the event loop that opened it."""

    session: Session
    loop: asyncio.AbstractEventLoop
    api_key: str

    @property
    def names(self) -> Sequence[str]:
        return (MODEL,)

    async def chat(self, ask: ChatAsk) -> Turns:
        """Sample the next turns, whole: what is recorded is what the agent gets."""
        for name in OF_THE_RUN:
            ask.body.take(name)
        ask.body.finish()
        if not ask.parallel:
            raise wrong("parallel_tool_calls", "false is not supported in a session: all that is sampled is trained on")
        if ask.top_logprobs:
            raise wrong("top_logprobs", "is not supported in a session; ask for logprobs alone")
        sampling = asyncio.run_coroutine_threadsafe(self.session.complete(ask), self.loop)
        try:
            choices = await asyncio.wrap_future(sampling)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the client has hung up
            raise Refused(410, "session_closed", "the session has ended") from None
        return Turns(
            num_prompt_tokens=choices[0].num_prompt_tokens, deltas=self._deltas(choices, ask.logprobs), close=_nothing
        )

    async def _deltas(self, choices: Sequence[SampledTurn], logprobs: bool) -> AsyncIterator[Sequence[Delta]]:
        yield await written(lambda: [self._delta(index, one, logprobs) for index, one in enumerate(choices)])

    def _delta(self, index: int, choice: SampledTurn, logprobs: bool) -> Delta:
        message, done, _ = choice
        part = NewTokens(done.tokens, done.logps, None, done.num_cached)
        calls = [
            ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        ends = self.session.params_of(0).ends
        return Delta(
            index,
            message.get("content") or "",
            logprob_entries(self.session.renderer.tokenizer, [], part, ends) if logprobs else "",
            calls,
            finish=finish_reason(done.stop, calls),
            num_tokens=len(done.tokens),
            num_cached=done.num_cached,
        )


async def _nothing() -> None:
    pass


class Sessions:
    """Sessions under way, on a server in a thread of its own that starts with the first.

    Addresses hold a secret; where others than this machine can reach `host`, requests need the session's key as well.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._sessions: dict[str, SessionBackend] = {}
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._port = 0

    def open(self, session: Session) -> Opened:
        """Begin to serve a session in the running event loop."""
        self._start()
        name, key = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        self._sessions[name] = SessionBackend(session, asyncio.get_running_loop(), key)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return Opened(f"http://{host}:{self._port}/{name}/v1", key)

    def end(self, opened: Opened) -> None:
        """End a session: its later requests are refused, those under way cancelled."""
        self._sessions.pop(opened.base_url.split("/")[3]).session.close()

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join()
        self._server = self._thread = None

    def _lookup(self, request: Any) -> Backend:
        served = self._sessions.get(request.path_params["session"])
        if served is None:
            raise Refused(404, "session_not_found", "there is no such session, or it has ended")
        if self._host not in LOOPBACK:
            check_key(request, served.api_key)
        return served

    def _start(self) -> None:
        if self._thread is not None:
            return
        listener = listen(self._host, 0, "agent.host")
        self._port = listener.getsockname()[1]
        self._server = server_of(application(self._lookup, hosts=AllowedHosts(self._host), prefix="/{session}"))
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), daemon=True, name="server of agents"
        )
        self._thread.start()
        end = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if time.monotonic() > end or not self._thread.is_alive():
                raise RunError(f"agent: the server on {self._host} did not start; is opening a port allowed here?")
            time.sleep(0.005)
