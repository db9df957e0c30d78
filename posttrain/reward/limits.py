"""Limits of a reward function's child process: memory, CPU time, file size, and how many processes it starts."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

MAX_DESCENDANTS = 64
"""Maximum number of processes below a worker during a call."""
WATCH_S = 0.05
"""Seconds between two looks at the number of threads of the machine, one small read."""
MANY_THREADS = 200
"""Growth of that number beyond which processes are counted."""
MIB = 2**20


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
        found = [pid for pid in workers if len(_descendants(pid)) > MAX_DESCENDANTS]
        for pid in found:
            _stop(pid)
        self._threads = _threads() if not found else self._threads
        return found


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
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = parents.get(waiting.pop(), [])
        found.update(new)
        waiting += new
    return found


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
    found = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in found for pid in file.read_text().split()]
