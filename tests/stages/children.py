"""The command line in processes of their own that begin with everything imported: forked from a server that has done
nothing but import. To import takes longer than a tiny run, and a test of kills starts several."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = ["posttrain.cli", "posttrain.runs.run", "transformers", "orbax.checkpoint", "grain", "tensorstore", "pandas"]
CONTEXT = multiprocessing.get_context("forkserver")


class Child:
    """A forked command line; of `subprocess.Popen`, what tests of runs need."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]):
        CONTEXT.set_forkserver_preload(IMPORTED)
        with tempfile.NamedTemporaryFile(prefix="child-", delete=False) as out:
            self._out = Path(out.name)
        self._process = CONTEXT.Process(target=_main, args=([*arguments], dict(environment), str(self._out)))
        with _environment(environment):  # the server's, if this is the first
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it printed, once it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired("posttrain", timeout or 0.0, self._out.read_bytes())
        text = self._out.read_text() if self._out.exists() else ""
        self._out.unlink(missing_ok=True)
        return text, None


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    _set_environment({**wanted, "PYTHONPATH": str(ROOT)})
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


def _main(arguments: list[str], environment: dict[str, str], out: str) -> None:
    """Program of the child. JAX has begun no backend, so that it reads its flags now."""
    file = os.open(out, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(ROOT)
    _set_environment(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["posttrain", *arguments]
    from posttrain.cli import main

    main()
