"""Tools of a server of the Model Context Protocol that runs as a child process (stdio), through the package `mcp`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from posttrain.config import ToolSection
from posttrain.errors import ConfigError, RunError
from posttrain.runtime.event_loop import LoopThread
from posttrain.tools.types import argument_error, failed, truncate

START_S = 60.0
"""Seconds that a server has to start and to list its tools."""
CLOSE_S = 10.0
"""Seconds that a server has to end, after which it is killed."""
MAX_TIMEOUTS = 3
"""Calls past their deadline in a row after which a server is restarted."""
MAX_RESTARTS = 10
"""Restarts of a server in a run; one more ends the run."""


class McpServer:
    """Child process that serves tools, started with the first call, and again after a crash."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], folder: Path, *, timeout_s: float, max_chars: int
    ):
        self._command, self._env, self._folder = list(command), dict(env), folder
        self._timeout_s, self._max_chars = timeout_s, max_chars
        self._loop = LoopThread(f"mcp {self.title}")
        self._lock = asyncio.Lock()
        self._serving: _Serving | None = None
        self._starts = self._timeouts = 0

    @classmethod
    def of(cls, section: ToolSection) -> McpServer:
        """Make the server of a section with `mcp`. ConfigError without the package, and for variables that are not
        set."""
        assert section.mcp is not None
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError("tools.mcp needs the package mcp; run: pip install 'posttrain[mcp]'")
        server = section.mcp
        if unset := [name for name in server.env_from.values() if name not in os.environ]:
            raise ConfigError(
                f"tools.mcp.env_from: no environment variable {unset[0]} is set; set it where the run starts"
            )
        env = server.env | {name: os.environ[source] for name, source in server.env_from.items()}
        return cls(server.command, env, Path.cwd(), timeout_s=section.timeout_s, max_chars=section.max_chars)

    @property
    def title(self) -> str:
        return " ".join(self._command)

    @property
    def restarts(self) -> int:
        return max(self._starts - 1, 0)

    def tools(self) -> list[McpTool]:
        """List the server's tools, which starts it. ConfigError if it does not start."""
        try:
            listed = self._loop.call(self._list(), timeout_s=2 * START_S)
        except RunError as error:
            raise ConfigError(str(error)) from error
        return [McpTool(self, tool) for tool in listed]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool within the deadline. A failed call, a crash included, is a `FailedCall`; RunError if the server
        crashes again and again."""
        return await self._loop.run(self._call(name, arguments))

    def close(self) -> None:
        """End the process; a later call starts another."""
        if self._serving is not None:
            with contextlib.suppress(TimeoutError):
                self._loop.call(self._stop(), timeout_s=CLOSE_S)
        self._loop.close(CLOSE_S)
        self._lock, self._serving, self._starts = asyncio.Lock(), None, 0

    async def _list(self) -> list[Any]:
        session = (await self._started()).session
        listed: list[Any] = []
        cursor = None
        while True:
            page = await session.list_tools(cursor)
            listed += page.tools
            cursor = page.nextCursor
            if cursor is None:
                return listed

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        from anyio import BrokenResourceError, ClosedResourceError
        from mcp.shared.exceptions import McpError
        from mcp.types import CONNECTION_CLOSED

        for _ in range(2):
            serving = await self._started()
            call = asyncio.ensure_future(serving.session.call_tool(name, dict(arguments)))
            waited = {call, serving.ended}
            await asyncio.wait(waited, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            try:
                if not call.done():
                    call.cancel()
                    return await (self._ended(serving, name) if serving.ended.done() else self._late(serving, name))
                result = call.result()
            except (ClosedResourceError, BrokenResourceError):
                await self._end(serving)  # it ended before the call was sent, which can be made again
                continue
            except McpError as error:
                if error.error.code == CONNECTION_CLOSED:
                    return await self._ended(serving, name)
                return failed(f"{name}: {error}", self._max_chars)
            self._timeouts = 0
            text = "\n".join(map(_block_text, result.content))
            if result.isError:
                return failed(text.removeprefix("Error: "), self._max_chars)
            return truncate(text, self._max_chars)
        return failed(f"{name}: the server of the tool ended", self._max_chars)

    async def _ended(self, serving: _Serving, name: str) -> str:
        """Text of a call during which the process ended."""
        await self._end(serving)
        return failed(f"{name}: the server of the tool ended during the call", self._max_chars)

    async def _late(self, serving: _Serving, name: str) -> str:
        """Text of a call past its deadline. A server that answers none any more is ended."""
        self._timeouts += 1
        if self._timeouts >= MAX_TIMEOUTS:
            await self._end(serving)
        return failed(f"{name} took longer than {self._timeout_s:g} seconds", self._max_chars)

    async def _started(self) -> _Serving:
        """Running server, restarted if it has ended."""
        async with self._lock:
            if self._serving is not None and not self._serving.ended.done():
                return self._serving
            if self._starts > MAX_RESTARTS:
                raise RunError(
                    f"tools: the MCP server `{self.title}` ended {self._starts} times; mend it{self._said()}"
                )
            self._starts += 1
            self._timeouts = 0
            self._serving = await self._start()
            return self._serving

    def _said(self) -> str:
        return "" if self._serving is None else self._serving.said

    async def _start(self) -> _Serving:
        log = cast(TextIO, tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))  # noqa: SIM115 (closed by _end)
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        serving = _Serving(session=None, stop=stop, log=log, ended=asyncio.ensure_future(self._serve(ready, stop, log)))
        await asyncio.wait({ready, serving.ended}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            serving.session = ready.result()
            return serving
        reason, line = f"does not answer within {START_S:g} seconds", serving.last_line()
        if serving.ended.done():
            error = serving.ended.exception()
            reason = "ends at once" if error is None else f"does not start ({_first_line(error)})"
        serving.ended.cancel()
        await asyncio.gather(serving.ended, return_exceptions=True)
        log.close()
        raise RunError(f"tools: the MCP server `{self.title}` {reason}; mend tools.mcp.command{line}")

    async def _serve(self, ready: asyncio.Future[Any], stop: asyncio.Event, log: TextIO) -> None:
        """Hold the session of one process, in one task as the package demands it."""
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        program, *args = self._command
        server = StdioServerParameters(command=program, args=args, env=self._env, cwd=self._folder)
        async with stdio_client(server, errlog=log) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            ready.set_result(session)
            await stop.wait()

    async def _stop(self) -> None:
        if self._serving is not None:
            await self._end(self._serving)

    async def _end(self, serving: _Serving) -> None:
        """End a process, and keep what it said."""
        serving.stop.set()
        # A broken pipe is how a process ends.
        await asyncio.gather(serving.ended, return_exceptions=True)
        serving.said = serving.last_line()
        serving.log.close()


@dataclass
class _Serving:
    """Process under way."""

    session: Any
    stop: asyncio.Event
    log: TextIO
    """Error output of the process."""
    ended: asyncio.Future[None]
    said: str = ""
    """Last line of the error output of a process that has ended."""

    def last_line(self) -> str:
        """Last line of the error output, as a clause of a message."""
        if self.log.closed:
            return self.said
        self.log.seek(0)
        lines = [line for line in self.log.read().splitlines() if line.strip()]
        return f"; it says: {lines[-1].strip()}" if lines else ""


class McpTool:
    """Tool of a server."""

    def __init__(self, server: McpServer, listed: Any):
        self._server, self._name = server, str(listed.name)
        self._parameters: Mapping[str, Any] = listed.inputSchema
        function = {"name": listed.name, "description": listed.description or "", "parameters": self._parameters}
        self._schema = {"type": "function", "function": function}

    @property
    def name(self) -> str:
        return self._name

    @property
    def schema(self) -> Mapping[str, Any]:
        return self._schema

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        fault = argument_error(arguments, self._parameters)
        return failed(fault, len(fault) + 7) if fault is not None else await self._server.call(self._name, arguments)

    def close(self) -> None:
        """End the server, of which all its tools are."""
        self._server.close()


def _block_text(block: Any) -> str:
    """Text of a block of a result; for one that is no text its kind."""
    return str(block.text) if block.type == "text" else f"[{block.type}]"


def _first_line(error: BaseException) -> str:
    """First cause of a failure in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
