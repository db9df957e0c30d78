"""Local processes of one run, as the hosts of a cluster would run it: `posttrain launch --processes 2 run CONFIG`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

from posttrain.errors import ConfigError
from posttrain.runtime.join import ADDRESS, COUNT, INDEX

GRACE_S = 15
"""Time in which the others end by themselves after one has failed; they are killed after it."""
_POLL_S = 0.05


def launch(command: Sequence[str], *, num_processes: int, cpu_devices: int) -> int:
    """Run a command of `posttrain` in processes on this machine's CPU; returns the first exit code that is not 0.

    `cpu_devices`: devices of each process. Signals go to all of them. Standard error of every process but the first is
    prefixed with its number, and standard output, where only the first one writes, is dropped. ConfigError for another
    command than `run`, the only one that takes several processes.
    """
    if not command or command[0] != "run":
        raise ConfigError(f"launch: {' '.join(command) or 'no command'}: give run with its configuration")
    address = f"localhost:{_free_port()}"
    children = []
    with contextlib.ExitStack() as stack:
        for index in range(num_processes):
            own = {ADDRESS: address, COUNT: str(num_processes), INDEX: str(index)}
            more = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(cpu_devices)}
            children.append(stack.enter_context(_child(command, index, {**os.environ, **more, **own})))
        stack.enter_context(_forwarded(children))
        return _wait(children)


@contextlib.contextmanager
def _child(command: Sequence[str], index: int, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a session of its own, which a terminal's Ctrl-C does not reach; it is killed at the end."""
    child = subprocess.Popen(
        [sys.executable, "-m", "posttrain", *command],
        env=environment,
        stdout=None if index == 0 else subprocess.DEVNULL,
        stderr=None if index == 0 else subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    reader = threading.Thread(target=_prefix, args=(child.stderr, index)) if child.stderr is not None else None
    if reader is not None:
        reader.start()
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if reader is not None:
            reader.join()


def _prefix(lines: IO[str], index: int) -> None:
    for line in lines:
        print(f"[{index}] {line}", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _forwarded(children: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Send SIGINT and SIGTERM on to all children that run."""

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: Sequence[subprocess.Popen[str]]) -> int:
    """Wait for all; after the first failure only for `GRACE_S`. Returns its exit code, 128 + N after signal N."""
    code, end = 0, float("inf")
    while True:
        codes = [child.poll() for child in children]
        if code == 0 and (failed := [one for one in codes if one]):
            code, end = failed[0], time.monotonic() + GRACE_S
        if None in codes and time.monotonic() > end:
            lost, found = next((number, one) for number, one in enumerate(codes) if one)
            how = f"signal {-found}" if found < 0 else f"exit code {found}"
            what = f"process {lost} of {len(children)} has ended by {how}, and others still wait for it"
            print(f"error: {what}: they are killed; the same command resumes", file=sys.stderr)
        if None not in codes or time.monotonic() > end:
            return code if code >= 0 else 128 - code
        time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port
