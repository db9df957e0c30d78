"""Callers of reward functions: in child processes, which are reused between steps, killed at a deadline and forked
again, or in threads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from posttrain.errors import ConfigError, RunError
from posttrain.reward.call import CallError, Scores, call_reward
from posttrain.reward.worker import (
    COMMAND,
    END,
    FORK,
    MAX_DESCENDANTS,
    NO_LIMITS,
    ORPHANED,
    OVERRUN,
    REPLY,
    SIZE,
    Function,
    Limits,
)
from posttrain.runtime.user_calls import UserCalls, wait_here

START_TIMEOUT_S = 120.0
"""Timeout for the import of all functions in the child process."""
CONTROL_TIMEOUT_S = 30.0
MAX_REPLY = 1 << 28
"""Maximum bytes of a reply."""
MAX_CHILDREN = 16
"""Maximum number of child processes of a worker after a call; beyond it the worker and all of them are killed."""
PROGRAM = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from posttrain.reward.worker import serve_workers; "


@runtime_checkable
class Caller(Protocol):
    """Interface of a reward function that is called in a child process or a thread."""

    async def prepare(self) -> None:
        """Wait until calls can begin."""
        ...

    async def call(self, keywords: Mapping[str, Any], loggers: Sequence[str], count: int) -> Scores:
        """Call the function on `count` samples. CallError if it fails; cancelling ends the call."""
        ...

    def finish(self, *, strange: bool) -> None:
        """Tidy up after a scoring; `strange`: samples were scored individually."""
        ...

    def close(self) -> None:
        """End what the calls have started."""
        ...


class WorkerProcess:
    """Worker process and the connection to it."""

    def __init__(self, pid: int, number: int, connection: socket.socket):
        self.pid, self.number, self.connection = pid, number, connection
        self.children = 0

    async def ask(self, request: bytes) -> bytes | None:
        """Send a request; return the reply, or None if the worker has died or answers with too much."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.connection, SIZE.pack(len(request)) + request)
            header = await self._read(loop, SIZE.size)
            size = SIZE.unpack(header)[0]
            return await self._read(loop, size) if 0 <= size <= MAX_REPLY else None
        except (ConnectionError, EOFError):
            return None

    async def _read(self, loop: asyncio.AbstractEventLoop, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = await loop.sock_recv(self.connection, min(count - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


class RewardServer:
    """Server process that imports reward functions and forks workers; `start` returns immediately.

    Started with `Popen`, not by forking this process: JAX's threads would not survive a fork.
    """

    def __init__(self, functions: Sequence[Function]):
        self.functions = tuple(functions)
        self._lock = threading.Lock()
        self._ready = False
        self._forked = 0
        self._control: socket.socket | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def start(self) -> None:
        """Start the process if it is not running; it imports the functions in the background."""
        if self._control is not None:
            return
        ours, theirs = socket.socketpair()
        program = f"{PROGRAM}serve_workers({theirs.fileno()}, json.loads(sys.argv[2]))"
        process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(sys.path), json.dumps(self.functions)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            # The devices belong to the trainer; a function that uses JAX runs on the CPU.
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        theirs.close()
        self._control, self._ready = ours, False
        self._end = weakref.finalize(self, _end_server, process, ours)

    def close(self) -> None:
        """Kill the process and all workers."""
        if self._end is not None:
            self._end()
        self._control = self._end = None

    def wait_until_ready(self) -> None:
        """Wait for the imports. RunError if one fails that succeeded in this process."""
        with self._lock:
            self.start()
            if self._ready:
                return
            assert self._control is not None
            self._control.settimeout(START_TIMEOUT_S)
            try:
                failure = _receive(self._control, SIZE.unpack(_receive(self._control, SIZE.size))[0]).decode()
            except OSError as error:
                raise self._failed(f"did not start ({type(error).__name__})") from error
            if failure:
                raise self._failed(f"cannot import: {failure}")
            self._control.settimeout(CONTROL_TIMEOUT_S)
            self._ready = True

    def fork(self, limits: Limits) -> WorkerProcess:
        """Fork a new worker. Call after `wait_until_ready`."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self._ask(FORK, 0, limits, theirs)
        ours.setblocking(False)
        self._forked += 1
        return WorkerProcess(pid, self._forked, ours)

    def end(self, worker: WorkerProcess) -> str:
        """Kill a worker and all processes that it started; return how its process ended."""
        worker.connection.close()
        status = self._ask(END, worker.pid, NO_LIMITS)
        if status == OVERRUN:
            return f"its process started more than {MAX_DESCENDANTS} processes and was killed"
        if status == ORPHANED:
            return "the parent of its process was killed"
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"its process exited with code {code}"
        return f"its process was ended by {signal.Signals(-code).name}"

    def _ask(self, command: bytes, number: int, limits: Limits, descriptor: socket.socket | None = None) -> int:
        assert self._control is not None
        descriptors = [] if descriptor is None else [descriptor.fileno()]
        with self._lock:
            try:
                socket.send_fds(self._control, [COMMAND.pack(command, number, *limits)], descriptors)
                reply: int = REPLY.unpack(_receive(self._control, REPLY.size))[0]
            except OSError as error:
                raise self._failed(f"has ended ({type(error).__name__})") from error
        return reply

    def _failed(self, why: str) -> RunError:
        self.close()
        names = ", ".join(dict.fromkeys(spec for spec, _ in self.functions))
        return RunError(f"rewards: the child process of {names} {why}; resume the run, or use isolate: thread")


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("closed")
        data += part
    return data


def _end_server(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Close the connection, upon which the server kills its workers and exits."""
    control.close()
    try:
        process.wait(CONTROL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class ProcessCaller:
    """Caller of one function in the workers of a server. One worker is reused by the next step, with its module's
    state."""

    def __init__(self, server: RewardServer, index: int, name: str, limits: Limits):
        self._server, self._index, self._name, self._limits = server, index, name, limits
        self._idle: list[WorkerProcess] = []
        self._lock = threading.Lock()

    async def prepare(self) -> None:
        await asyncio.to_thread(self._server.wait_until_ready)

    async def call(self, keywords: Mapping[str, Any], loggers: Sequence[str], count: int) -> Scores:
        """Call the function. CallError if it fails or its process dies; on cancellation the worker is killed."""
        request = self._request(keywords, loggers, count)
        worker = self._oldest() or self._server.fork(self._limits)
        try:
            reply = await worker.ask(request)
        except BaseException:
            with contextlib.suppress(RunError):
                self._server.end(worker)
            raise
        if reply is None:
            raise CallError(self._server.end(worker))
        try:
            sent, worker.children = json.loads(reply)
            answer = sent if isinstance(sent, str) else Scores.from_json(sent, count)
            strange = type(worker.children) is not int
        except (ValueError, TypeError, AttributeError, RecursionError):
            strange = True
        if strange:
            self._server.end(worker)
            raise CallError("its process sent something else than a result")
        if worker.children > MAX_CHILDREN:
            self._server.end(worker)
        else:
            self._idle.append(worker)
        if isinstance(answer, str):
            raise CallError(answer)
        return answer

    def _request(self, keywords: Mapping[str, Any], loggers: Sequence[str], count: int) -> bytes:
        try:
            return pickle.dumps((self._index, dict(keywords), list(loggers), count), protocol=5)
        except Exception as error:
            raise ConfigError(
                f"reward {self._name}: its arguments cannot be sent to a child process "
                f"({type(error).__name__}: {error}); use isolate: thread, or leave the column out"
            ) from error

    def _oldest(self) -> WorkerProcess | None:
        """Longest-running idle worker, which holds what the function has loaded."""
        with self._lock:
            if not self._idle:
                return None
            worker = min(self._idle, key=lambda one: one.number)
            self._idle.remove(worker)
            return worker

    def finish(self, *, strange: bool) -> None:
        """End the workers that were started only because of a failure; after strange samples also the reused one if it
        has child processes."""
        oldest = self._oldest()
        surplus = self._idle
        self._idle = []
        if oldest is not None and strange and oldest.children:
            surplus.append(oldest)
        elif oldest is not None:
            self._idle.append(oldest)
        for worker in surplus:
            self._server.end(worker)

    def close(self) -> None:
        """Close the connections to the workers, which then exit."""
        for worker in self._idle:
            worker.connection.close()
        self._idle = []


class ThreadCaller:
    """Caller that runs each call in a new daemon thread, so that a call that never returns does not keep the process
    alive."""

    def __init__(self, function: Callable[..., Any], name: str):
        self._function, self._calls = function, UserCalls(f"reward {name}", timeout_s=None)

    async def prepare(self) -> None:
        """Do nothing: threads start immediately."""

    def finish(self, *, strange: bool) -> None:
        """Do nothing: threads end by themselves."""

    def close(self) -> None:
        """Do nothing: threads end by themselves."""

    async def call(self, keywords: Mapping[str, Any], loggers: Sequence[str], count: int) -> Scores:
        """Call the function. CallError if it fails; on cancellation the thread is left behind and its coroutine
        cancelled. RunError if too many calls have hung; a function named as file.py:function is killed instead."""
        try:
            scores: Scores = await self._calls.call(call_reward, self._function, keywords, loggers, count, wait_here)
        except RunError:
            raise
        except RuntimeError as error:
            raise CallError(str(error)) from error
        return scores
