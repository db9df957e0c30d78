"""Child processes of reward functions: a server that has imported the functions and forks itself for each worker. The
server calls no function itself; it exits with its parent and kills its workers. Neither imports JAX."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from posttrain.errors import ConfigError
from posttrain.reward.call import CallError, CallResult, call_reward
from posttrain.user_code import describe_error, import_object

COMMAND = struct.Struct("<cq")
"""Commands of the parent: FORK with a socket, or END with a process id."""
REPLY = struct.Struct("<q")
SIZE = struct.Struct("<q")
FORK, END = b"f", b"e"
PARENT_CHECK_S = 1.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

Function = tuple[str, str]
"""Name of a function, `file.py:name` or `package.module:name`, and an additional folder to import modules from."""


def serve(descriptor: int, functions: Sequence[Function]) -> NoReturn:
    """Import the functions, report the outcome, then fork and kill workers on request until the parent is gone."""
    parent = os.getppid()
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    loaded, failure = _import(functions)
    workers = _Workers(control, loaded)
    with contextlib.suppress(OSError):
        control.sendall(SIZE.pack(len(failure)) + failure)
        while not failure and os.getppid() == parent:
            if not select.select([control], [], [], PARENT_CHECK_S)[0]:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, COMMAND.size, 1)
            if not message:
                break
            command, number = COMMAND.unpack(message)
            reply = workers.fork(socket.socket(fileno=descriptors[0])) if command == FORK else workers.end(number)
            control.sendall(REPLY.pack(reply))
    workers.end_all()
    os._exit(0)


def _import(functions: Sequence[Function]) -> tuple[list[Any], bytes]:
    """Import the functions; return them with the error message, if any."""
    try:
        return [import_object(spec, Path(folder)) for spec, folder in functions], b""
    except ConfigError as error:
        return [], str(error).encode()


class _Workers:
    """Workers of a server: fork and kill."""

    def __init__(self, control: socket.socket, functions: Sequence[Callable[..., Any]]):
        self._control, self._functions = control, functions
        self._pids: set[int] = set()

    def fork(self, connection: socket.socket) -> int:
        """Fork a worker at the other end of the connection; return its process id."""
        server = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forking after an import has started a thread
            pid = os.fork()
        if pid:
            connection.close()
            self._pids.add(pid)
            return pid
        try:
            self._control.close()
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == server:
                _prefer_when_out_of_memory()
                _work(connection, self._functions)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)

    def end(self, pid: int) -> int:
        """Kill a worker and all processes that it started; return its wait status."""
        self._pids.discard(pid)
        status = _kill(pid)
        # Its orphans, including those in sessions of their own, become children of this process.
        while orphans := [child for child in _children() if child not in self._pids]:
            for child in orphans:
                _kill(child)
        return status

    def end_all(self) -> None:
        for pid in tuple(self._pids):
            self.end(pid)


def _work(connection: socket.socket, functions: Sequence[Callable[..., Any]]) -> None:
    """Handle calls until the parent closes the connection."""
    own = os.getpid()
    with asyncio.Runner() as runner:
        while (request := receive(connection)) is not None:
            reply = _answer(request, functions, lambda made: runner.run(_result(made)))
            if os.getpid() != own:
                os._exit(0)  # the function forked, and its child has returned here as well
            sys.stdout.flush()
            sys.stderr.flush()
            send(connection, pickle.dumps((reply, len(_children()))))
    os._exit(0)


def _answer(
    request: bytes, functions: Sequence[Callable[..., Any]], wait: Callable[[Awaitable[Any]], Any]
) -> CallResult | str:
    """Result of a call, or the error message."""
    try:
        index, keywords, loggers, count = pickle.loads(request)
    except Exception as error:
        return f"its arguments cannot be read in a child process ({describe_error(error)}); use isolate: thread"
    try:
        return call_reward(functions[index], keywords, loggers, count, wait)
    except CallError as error:
        return str(error)


async def _result(made: Awaitable[Any]) -> Any:
    return await made


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(SIZE.pack(len(data)) + data)


def receive(connection: socket.socket) -> bytes | None:
    """Receive one message; None at the end of the connection."""
    header = _read(connection, SIZE.size)
    return None if header is None else _read(connection, SIZE.unpack(header)[0])


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def _kill(pid: int) -> int:
    """Kill a child with its process group; return its wait status."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0


def _children() -> list[int]:
    """Process ids of this process's children, if the kernel lists them."""
    found = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in found for pid in file.read_text().split()]


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _prefer_when_out_of_memory() -> None:
    """Make the kernel kill a worker that fills the memory, not the training process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
