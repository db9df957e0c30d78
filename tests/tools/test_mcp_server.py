"""Tools of an MCP server: calls, deadlines, crashes, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.errors import ConfigError, RunError
from posttrain.tools.mcp_server import MAX_RESTARTS, MAX_TIMEOUTS, McpServer, McpTool
from posttrain.tools.types import FailedCall, Tool

pytest.importorskip("mcp", reason="needs the extra mcp")

SERVER = [sys.executable, str(Path(__file__).parent / "server.py")]


def make(command: list[str], timeout_s: float = 20.0, max_chars: int = 50) -> McpServer:
    return McpServer(command, {}, Path.cwd(), timeout_s=timeout_s, max_chars=max_chars)


@pytest.fixture(scope="module")
def server() -> Iterator[McpServer]:
    server = make(SERVER)
    yield server
    server.close()


@pytest.fixture(scope="module")
def tools(server: McpServer) -> dict[str, McpTool]:
    return {tool.name: tool for tool in server.tools()}


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_calls(tools: dict[str, McpTool]) -> None:
    """Of several event loops, one after the other, as the steps of a run have."""
    assert list(tools) == ["echo", "process", "fail", "crash", "hang"]
    assert isinstance(tools["echo"], Tool)
    function = tools["echo"].schema["function"]
    assert (function["description"], function["parameters"]["required"]) == ("Say a text several times.", ["text"])
    assert asyncio.run(tools["echo"]({"text": "ab", "times": 2})) == "abab"
    assert asyncio.run(tools["echo"]({"text": "a" * 60})) == "a" * 50 + "\n[cut: 50 of 60 characters]"
    for name, arguments, text in (
        ("echo", {}, "Error: missing argument text; arguments are text, times (optional)"),
        ("echo", {"text": 3}, "Error: text must be of type string, got 3"),
        ("fail", {}, "Error: Error executing tool fail: out of food"),
    ):
        made = asyncio.run(tools[name](arguments))
        assert (type(made), made) == (FailedCall, text)


def test_a_crash_is_answered_and_the_server_starts_anew(server: McpServer, tools: dict[str, McpTool]) -> None:
    """Red without the restart: every call after the crash fails."""

    async def calls() -> list[str]:
        first = await tools["process"]({})
        crashed = await tools["crash"]({})
        later = await asyncio.gather(tools["process"]({}), tools["process"]({}))
        os.kill(int(later[0]), 9)
        await tools["echo"]({"text": "may meet the end of the process"})
        return [first, crashed, *later, await tools["echo"]({"text": "x"})]

    before = server.restarts
    first, crashed, *later, last = asyncio.run(calls())
    assert isinstance(crashed, FailedCall)
    assert "the server of the tool ended" in crashed
    assert later[0] == later[1] != first
    assert last == "x"
    assert server.restarts - before == 2


@pytest.mark.thorough
def test_a_server_that_hangs_is_ended() -> None:
    """Red without the count: it holds up every later call."""
    server = make(SERVER, timeout_s=1.5)
    try:
        tools = {tool.name: tool for tool in server.tools()}
        process = int(asyncio.run(tools["process"]({})))
        late = [asyncio.run(tools["hang"]({"seconds": 60.0})) for _ in range(MAX_TIMEOUTS)]
        assert late == ["Error: hang took longer than 1.5 seconds"] * MAX_TIMEOUTS
        assert not is_running(process)
        asyncio.run(server.call("echo", {"text": "x"}))
        assert server.restarts == 1
    finally:
        server.close()


def test_no_process_is_left() -> None:
    server = make(SERVER)
    process = int(asyncio.run({tool.name: tool for tool in server.tools()}["process"]({})))
    assert is_running(process)
    server.close()
    deadline = time.monotonic() + 10
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(process)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["no_such_program_of_posttrain"], "does not start (FileNotFoundError: "),
        ([sys.executable, "-c", "raise SystemExit('no database')"], "it says: no database"),
    ],
)
def test_a_server_that_does_not_start(command: list[str], reason: str) -> None:
    server = make(command)
    with pytest.raises(ConfigError) as error:
        server.tools()
    server.close()
    assert reason in str(error.value)
    assert "mend tools.mcp.command" in str(error.value)


@pytest.mark.thorough
def test_a_server_that_ends_again_and_again_ends_the_run() -> None:
    server = make(SERVER)
    tools = {tool.name: tool for tool in server.tools()}
    server._starts = MAX_RESTARTS + 1
    asyncio.run(tools["crash"]({}))
    with pytest.raises(RunError, match="ended 11 times; mend it"):
        asyncio.run(tools["echo"]({"text": "x"}))
    server.close()
