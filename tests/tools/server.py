"""Small MCP server for tests, run as a script: echo, its process number, an error, a crash, and calls that hang."""

from __future__ import annotations

import os
import time


def main() -> None:
    """Serve until the input ends."""
    from mcp.server.fastmcp import FastMCP

    app = FastMCP("tests", log_level="ERROR")
    for tool in (echo, process, fail, crash, hang):
        app.add_tool(tool)
    app.run("stdio")


def echo(text: str, times: int = 1) -> str:
    """Say a text several times."""
    return text * times


def process() -> str:
    """Say the number of the process."""
    return str(os.getpid())


def fail() -> str:
    """Raise an error."""
    raise ValueError("out of food")


def crash() -> str:
    """End the process."""
    os._exit(3)


def hang(seconds: float) -> str:
    """Wait, and let nobody else be served."""
    time.sleep(seconds)
    return "late"


if __name__ == "__main__":
    main()
