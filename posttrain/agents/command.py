"""Agent in a child process: a command that finds the endpoint in its environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

OUTPUT_BYTES = 64 * 1024
"""Part of the end of stdout and stderr that is kept, each."""
WITH_PARENT = (
    "import ctypes, os, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) and os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Program that becomes the command, which the kernel then kills when its parent dies."""


class CommandFailed(Exception):
    """Command that ended with an error; the message is one line."""


async def run_command(command: Sequence[str], *, base_url: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run a command to its end; cancelling kills it with all of its group.

    Its environment has `OPENAI_BASE_URL`, `OPENAI_API_KEY`, and the keywords `given` as JSON in `POSTTRAIN_ROW`.
    Returns the JSON object in the last line of its output; None without one. CommandFailed for an exit code.
    """
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": "session",
        "POSTTRAIN_ROW": json.dumps(given, default=str),
        # The devices belong to the trainer.
        "JAX_PLATFORMS": "cpu",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WITH_PARENT,
        str(os.getpid()),
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        stdout, stderr, code = await asyncio.gather(_tail(process.stdout), _tail(process.stderr), process.wait())
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if code != 0:
        last = (stderr.strip() or stdout.strip()).splitlines()[-1:]
        raise CommandFailed(f"exit code {code}{f': {last[0][:200]}' if last else ''}")
    return _last_object(stdout)


async def _tail(stream: asyncio.StreamReader) -> str:
    kept = b""
    while part := await stream.read(1 << 16):
        kept = (kept + part)[-OUTPUT_BYTES:]
    return kept.decode(errors="replace")


def _last_object(text: str) -> dict[str, Any] | None:
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
