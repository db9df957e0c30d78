"""Child processes of reward functions: a server that has imported the functions forks itself for each worker, with a
keeper as the worker's parent, so that a function that kills its parent ends no other, and with limits. The server calls
no function itself; it exits with its parent and kills its workers. Neither imports JAX."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import pickle
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from posttrain.errors import ConfigError
from posttrain.reward.call import CallError, Scores, call_reward
from posttrain.user_code import describe_error, import_object

COMMAND = struct.Struct("<cqqqq")
"""Commands of the parent: FORK with a socket and the three limits, or END with a process id."""
REPLY = struct.Struct("<q")
SIZE = struct.Struct("<q")
FORK, END = b"f", b"e"
PARENT_CHECK_S = 1.0
OVERRUN = 1 << 32
"""Reply to END for a worker that was killed because it started too many processes; wait statuses are smaller."""
ORPHANED = 1 << 33
"""Reply to END for a worker whose keeper has been killed."""
DEATH_S = 5.0
"""Maximum seconds from the end of a process to that of its children."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

MAX_DESCENDANTS = 64
"""Maximum number of processes below a worker during a call."""
WATCH_S = 0.05
"""Seconds between two looks at the number of threads of the machine, one small read."""
MANY_THREADS = 200
"""Growth of that number beyond which processes are counted."""
MIB = 2**20

Function = tuple[str, str]
"""Name of a function, `file.py:name` or `package.module:name`, and an additional folder to import modules from."""


class Limits(NamedTuple):
    """Limits of each process of a reward function; 0: none."""

    memory_mib: int
    """Data of the process (RLIMIT_DATA), its modules included."""
    file_mib: int
    """Size of a file that it writes (RLIMIT_FSIZE)."""
    cpu_s: int
    """CPU seconds of a call (RLIMIT_CPU), at which the process is killed."""

    def apply(self) -> None:
        """Limit this process and those that it starts."""
        _limit(resource.RLIMIT_CORE, 0)
        for kind, limit in ((resource.RLIMIT_DATA, self.memory_mib), (resource.RLIMIT_FSIZE, self.file_mib)):
            if limit:
                _limit(kind, limit * MIB)

    def start_call(self) -> None:
        """Count CPU seconds from here on."""
        if self.cpu_s:
            used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            _limit(resource.RLIMIT_CPU, math.ceil(used) + self.cpu_s)


NO_LIMITS = Limits(memory_mib=0, file_mib=0, cpu_s=0)


def _limit(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


class Watch:
    """Detection of fork bombs. RLIMIT_NPROC cannot bound them: it counts all processes of a user, and root has none."""

    def __init__(self) -> None:
        self._threads = _threads()

    def overrun(self, workers: Collection[int]) -> list[int]:
        """Workers with more than MAX_DESCENDANTS processes below them, all of which are stopped."""
        threads = _threads()
        if threads < self._threads + MANY_THREADS:
            self._threads = min(threads, self._threads)
            return []
        bombs = [pid for pid in workers if len(_descendants(pid)) > MAX_DESCENDANTS]
        for pid in bombs:
            _stop(pid)
        self._threads = _threads() if not bombs else self._threads
        return bombs


def _threads() -> int:
    """Number of threads of the machine; 0 where the kernel does not say."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
    except (OSError, ValueError, IndexError):
        return 0


def _descendants(pid: int) -> set[int]:
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
                parents.setdefault(int(parent), []).append(int(name))
    descendants: set[int] = set()
    waiting = [pid]
    while waiting:
        new = parents.get(waiting.pop(), [])
        descendants.update(new)
        waiting += new
    return descendants


def _stop(pid: int) -> None:
    """Stop a process and all below it, so that they can be killed without new ones being started meanwhile."""
    stopped: set[int] = set()
    end = time.monotonic() + 5.0
    send_signal(pid, signal.SIGSTOP)
    while (new := _descendants(pid) - stopped) and time.monotonic() < end:
        for one in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGSTOP)
        stopped |= new


def send_signal(pid: int, number: int) -> None:
    """Signal a process and its group, if they exist."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)


def children() -> list[int]:
    """Process ids of this process's children, if the kernel lists them."""
    files = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in files for pid in file.read_text().split()]


def serve_workers(descriptor: int, functions: Sequence[Function]) -> NoReturn:
    """Import the functions, report the outcome, then fork and kill workers on request until the parent is gone."""
    parent = os.getppid()
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    loaded, failure = _import(functions)
    workers = _Workers(control, loaded, tempfile.mkdtemp(prefix="posttrain-rewards-"))
    with contextlib.suppress(OSError):
        control.sendall(SIZE.pack(len(failure)) + failure)
        while not failure and os.getppid() == parent:
            if not select.select([control], [], [], workers.check_s)[0]:
                workers.check()
                continue
            message, descriptors, _, _ = socket.recv_fds(control, COMMAND.size, 1)
            if not message:
                break
            command, number, *limits = COMMAND.unpack(message)
            if command == FORK:
                reply = workers.fork(socket.socket(fileno=descriptors[0]), Limits(*limits))
            else:
                reply = workers.end(number)
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
    """Workers of a server: fork, watch and kill. Each has a folder for temporary files, which is removed with it."""

    def __init__(self, control: socket.socket, functions: Sequence[Callable[..., Any]], folder: str):
        self._control, self._functions, self._folder = control, functions, Path(folder)
        self._keepers: dict[int, int] = {}
        self._overrun: set[int] = set()
        self._watch = Watch()

    @property
    def check_s(self) -> float:
        """Seconds until the next check."""
        return WATCH_S if self._keepers else PARENT_CHECK_S

    def check(self) -> None:
        """Kill workers that have started too many processes."""
        for pid in self._watch.overrun(self._keepers):
            self._end(pid)
            self._overrun.add(pid)

    def fork(self, connection: socket.socket, limits: Limits) -> int:
        """Fork a worker at the other end of the connection; return its process id."""
        read, write = os.pipe()
        server = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forking after an import has started a thread
            keeper = os.fork()
        if keeper:
            connection.close()
            os.close(write)
            with open(read, "rb") as opened:
                sent = opened.read()
            if not sent:
                raise ChildProcessError("the keeper cannot fork a worker")
            pid: int = SIZE.unpack(sent)[0]
            self._keepers[pid] = keeper
            return pid
        try:
            os.close(read)
            self._control.close()
            _end_with(server)
            bond = _keep(write, connection)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _prefer_when_out_of_memory()
            self._use_own_folder()
            _work(connection, self._functions, limits, bond)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)

    def _use_own_folder(self) -> None:
        """Let `tempfile` and child programs create their files in this worker's folder."""
        folder = self._folder / str(os.getpid())
        folder.mkdir()
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None

    def end(self, pid: int) -> int:
        """Kill a worker and all processes that it started; return its wait status, OVERRUN or ORPHANED."""
        if pid in self._overrun:
            self._overrun.discard(pid)
            return OVERRUN
        return self._end(pid)

    def _end(self, pid: int) -> int:
        keeper = self._keepers.pop(pid, None)
        if keeper is None:
            return ORPHANED
        if keeper == pid:
            status = _kill(pid)
        elif os.waitpid(keeper, os.WNOHANG)[0]:
            status = ORPHANED
        else:
            _kill(keeper)
            status = _kill(pid)
        # The worker and its orphans, including those in sessions of their own, become children of this process.
        while orphans := [child for child in children() if child not in self._keepers.values()]:
            for child in orphans:
                _kill(child)
        shutil.rmtree(self._folder / str(pid), ignore_errors=True)
        return status

    def end_all(self) -> None:
        for pid in tuple(self._keepers):
            self.end(pid)
        shutil.rmtree(self._folder, ignore_errors=True)


def _keep(write: int, connection: socket.socket) -> socket.socket | None:
    """Fork the worker, which alone returns, tell its process id, and answer it until this process is killed."""
    if sys.platform != "linux":  # orphans become no children of the server, which could not wait for the worker
        os.write(write, SIZE.pack(os.getpid()))
        os.close(write)
        return None
    keeper = os.getpid()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        os.close(write)
        ours.close()
        _end_with(keeper)
        return theirs
    os.write(write, SIZE.pack(pid))
    os.close(write)
    connection.close()
    theirs.close()
    while ours.recv(1 << 16):
        ours.send(b".")
    while True:
        signal.pause()


def _end_with(parent: int) -> None:
    """Make this process the first of a session of its own that is killed at its parent's end."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _check_keeper(bond: socket.socket | None) -> None:
    """Return only if nobody has killed the keeper so far: it would not answer."""
    if bond is None:
        return
    with contextlib.suppress(ConnectionError):
        bond.send(b".")
        if bond.recv(1 << 16):
            return
    time.sleep(DEATH_S)
    os._exit(1)


def _work(
    connection: socket.socket, functions: Sequence[Callable[..., Any]], limits: Limits, bond: socket.socket | None
) -> None:
    """Handle calls until the parent closes the connection."""
    own = os.getpid()
    limits.apply()
    with asyncio.Runner() as runner:
        while (request := receive(connection)) is not None:
            limits.start_call()
            reply = _answer(request, functions, lambda made: runner.run(_result(made)))
            if os.getpid() != own:
                os._exit(0)  # the function forked, and its child has returned here as well
            sys.stdout.flush()
            sys.stderr.flush()
            _check_keeper(bond)
            send(connection, _reply(reply, len(children())))
    os._exit(0)


def _answer(
    request: bytes, functions: Sequence[Callable[..., Any]], wait: Callable[[Awaitable[Any]], Any]
) -> Scores | str:
    """Result of a call, or the error message."""
    try:
        index, keywords, loggers, count = pickle.loads(request)
    except Exception as error:
        return f"its arguments cannot be read in a child process ({describe_error(error)}); use isolate: thread"
    try:
        return call_reward(functions[index], keywords, loggers, count, wait)
    except CallError as error:
        return str(error)


def _reply(answer: Scores | str, num_children: int) -> bytes:
    """Reply of plain values as JSON: code in this process must not make objects in the trainer."""
    try:
        content = answer if isinstance(answer, str) else answer.to_json()
        return json.dumps([content, num_children]).encode()
    except (TypeError, ValueError) as error:
        return json.dumps([f"its values cannot be sent as JSON: {describe_error(error)}", num_children]).encode()


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
    send_signal(pid, signal.SIGKILL)
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _prefer_when_out_of_memory() -> None:
    """Make the kernel kill a worker that fills the memory, not the training process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
