"""Agent in a child process: a command that finds the endpoint in its environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from posttrain.sandbox.run import GRACE_S, start

OUTPUT_BYTES = 64 * 1024
"""Part of the end of stdout and stderr that is kept, each."""
ROW_BYTES = 100 * 1024
"""Maximum number of bytes of a variable with the keywords; the system takes 128 KiB."""
NO_DEADLINE_S = 1e9
"""Deadline of the supervisor, which is told when to end."""
PIPE_S, POLL_S = 1.0, 0.005
"""Seconds that output may stay open after the end of a command, and between two looks at its supervisor."""


class CommandFailed(Exception):
    """Command that ended with an error; the message is one line, `said` its error output."""

    def __init__(self, message: str, said: str):
        super().__init__(message)
        self.said = said


async def run_command(command: Sequence[str], *, base_url: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run a command to its end, and then end all that it has started, in sessions of their own or not; cancelling ends
    it at once.

    Its environment has `OPENAI_BASE_URL`, `OPENAI_API_KEY`, and the keywords `given` as JSON in the file
    `POSTTRAIN_ROW_FILE` and, if they are at most 100 KiB, in `POSTTRAIN_ROW`. Returns the JSON object in the last line
    of its output; None without one. CommandFailed for an exit code.
    """
    with _environment(base_url, json.dumps(given, default=str)) as environment:
        job = {
            "argv": list(command),
            "python": None,
            "timeout_s": NO_DEADLINE_S,
            "may_fork": True,
            "confined": False,
            "peer": None,
        }
        process, report = start(job, stdin=subprocess.DEVNULL, folder=None, environment=environment)
        stdout, stderr, said = bytearray(), bytearray(), bytearray()
        assert process.stdout is not None and process.stderr is not None
        pipes = {process.stdout: stdout, process.stderr: stderr, os.fdopen(report, "rb"): said}
        *outputs, reported = [asyncio.ensure_future(_tail(pipe, kept)) for pipe, kept in pipes.items()]
        try:
            await reported
            await asyncio.wait(outputs, timeout=PIPE_S)
        finally:
            await _end(process)
            for reader in (*outputs, reported):
                reader.cancel()
            await asyncio.gather(*outputs, reported, return_exceptions=True)
    code = marshal.loads(bytes(said))["code"] if said else None
    if code != 0:
        text = (stderr.strip() or stdout.strip()).decode(errors="replace")
        last = text.splitlines()[-1:]
        why = "its supervisor was killed" if code is None else f"exit code {code}"
        raise CommandFailed(f"{why}{f': {last[0][:200]}' if last else ''}", text)
    return _last_object(stdout.decode(errors="replace"))


@contextlib.contextmanager
def _environment(base_url: str, row: str) -> Iterator[dict[str, str]]:
    with tempfile.NamedTemporaryFile("w", prefix="posttrain-row-", suffix=".json", encoding="utf-8") as file:
        file.write(row)
        file.flush()
        yield {
            **{name: value for name, value in os.environ.items() if name != "POSTTRAIN_ROW"},
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": "session",
            "POSTTRAIN_ROW_FILE": file.name,
            **({"POSTTRAIN_ROW": row} if len(row) <= ROW_BYTES else {}),
            # The devices belong to the trainer.
            "JAX_PLATFORMS": "cpu",
        }


async def _tail(pipe: IO[bytes], kept: bytearray) -> None:
    """Read a pipe to its end, and keep its last bytes."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    try:
        while part := await reader.read(1 << 16):
            kept += part
            del kept[:-OUTPUT_BYTES]
    finally:
        transport.close()


async def _end(process: subprocess.Popen[bytes]) -> None:
    """End a supervisor with all that it has started."""
    process.terminate()
    for _ in range(round(GRACE_S / POLL_S)):
        if process.poll() is not None:
            return
        await asyncio.sleep(POLL_S)
    process.kill()
    process.wait()


def _last_object(text: str) -> dict[str, Any] | None:
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
