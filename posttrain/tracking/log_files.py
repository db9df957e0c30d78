"""Log files of a run: `log.txt`, what its first process has printed, and `hosts/NUMBER.log` of each of several."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import jax

from posttrain import __version__
from posttrain.errors import ConfigError, OneLine
from posttrain.runtime import processes

LOG_NAME = "log.txt"
REMOVED_LINE = re.compile(r"[^\n]*\n(?:\x1b\[\?25h)?\r?\x1b\[1A\x1b\[2K")
"""Last state of a progress bar, whose line the terminal removes again."""
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Control sequences of terminals: colours, cursor, links."""


class _Log(logging.Handler):
    """Lines of a log, each with its time, from any thread; kept in memory until there is a file."""

    def __init__(self) -> None:
        super().__init__()
        self._file: TextIO | None = None
        self._kept: list[str] = []

    def open(self, path: Path) -> None:
        """Write to this file from now on, after what it has, and first what was kept."""
        self.acquire()
        try:
            if self._file is None:
                self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
                self._file.writelines(self._kept)
                self._file.flush()
                self._kept = []
        finally:
            self.release()

    def line(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = [f"{stamp} {line}".rstrip() + "\n" for line in text.splitlines()]
        self.acquire()
        try:
            if self._file is None:
                self._kept += lines
            else:
                self._file.writelines(lines)
                self._file.flush()
        finally:
            self.release()

    def ended(self, error: BaseException) -> None:
        """Say how the process ends. A signal is no fault, and has no traceback: after it all processes stop at the same
        step."""
        explained = isinstance(error, KeyboardInterrupt | processes.SameEverywhere | OneLine)
        self.line(str(error) if explained else "".join(traceback.format_exception(error)))
        self.line(f"ended by {type(error).__name__}")

    def emit(self, record: logging.LogRecord) -> None:
        self.line(f"{record.levelname} {record.name}: {record.getMessage()}")

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()


class _Copied:
    """Stream whose whole lines go to the log too, as a terminal shows them at last; in all else the stream itself."""

    def __init__(self, stream: Any, log: _Log) -> None:
        self._stream, self._log, self._rest = stream, log, ""

    def write(self, text: str) -> int:
        *whole, self._rest = REMOVED_LINE.sub("", self._rest + text).split("\n")
        for line in whole:
            # Of a line that was redrawn, the last state.
            shown = CONTROL.sub("", line).rstrip("\r").rpartition("\r")[2]
            if shown.strip():
                self._log.line(shown)
        return int(self._stream.write(text))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_open: list[_Log] = []
"""Log of the run of this process, if there is one."""


def keep_line(text: str) -> None:
    """Write a line that a terminal shows in place to the log of the run, if there is one."""
    for log in _open:
        log.line(text)


class RunLog:
    """Log of one call of a run, which `open` gives a file: a call that is refused before leaves none."""

    def __init__(self) -> None:
        self._log = _Log()
        self._folder: Path | None = None

    def claim(self, output: Path) -> None:
        """Name the folder, which is this call's now."""
        self._folder = output

    def open(self) -> None:
        """Begin `log.txt` of the folder, or go on with it, with what was printed so far."""
        if self._folder is not None and processes.writes():
            self._log.open(self._folder / LOG_NAME)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Keep what is printed in this block, on `sys.stdout` and `sys.stderr`, and how it ends; in the first process.

        An error opens the file where the folder is claimed, unless it refuses the call.
        """
        if not processes.writes():
            yield
            return
        self._log.line(f"begun: {_process()}")
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Copied(stream, self._log) for stream in before)
        _open.append(self._log)
        try:
            yield
            self._log.line("ended")
        except BaseException as error:
            if not isinstance(error, ConfigError):
                self.open()
            self._log.ended(error)
            raise
        finally:
            _open.remove(self._log)
            sys.stdout, sys.stderr = before
            self._log.close()


def _process() -> str:
    of = f"process {processes.index()} of {processes.count()}, " if processes.count() > 1 else ""
    devices = ", ".join(f"{device.device_kind} {device.id}" for device in jax.local_devices())
    host = f"{socket.gethostname()}, pid {os.getpid()}"
    return f"{of}{host}, posttrain {__version__}, JAX {jax.__version__}, devices {devices}"


@contextmanager
def host_log(output: Path) -> Iterator[None]:
    """Keep a log of this process in `hosts/NUMBER.log` if the run has several: its start and devices, what the package
    logs, the lines of `sys.stderr`, and how it ends."""
    if processes.count() == 1:
        yield
        return
    folder = output / "hosts"
    folder.mkdir(exist_ok=True)
    log = _Log()
    log.open(folder / f"{processes.index()}.log")
    with ExitStack() as stack:
        stack.callback(log.close)
        log.line(f"begun: {_process()}")
        logger = logging.getLogger("posttrain")
        if logger.handlers:  # else its warnings go to sys.stderr, which they would not with a handler
            logger.addHandler(log)
            stack.callback(logger.removeHandler, log)
        stderr, sys.stderr = sys.stderr, _Copied(sys.stderr, log)
        stack.callback(setattr, sys, "stderr", stderr)
        try:
            yield
        except BaseException as error:
            log.ended(error)
            raise
        log.line("ended")
