"""Sandbox for code of models: a fresh process with limits, in a scratch folder, without network or other files."""

from __future__ import annotations

import contextlib
import functools
import itertools
import marshal
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from posttrain.errors import RunError

GRACE_S = 10.0
"""Seconds after the deadline in which the supervisor must have killed everything."""
PROGRAM = "import sys; sys.path.insert(0, {root!r}); from posttrain.sandbox.supervisor import main; sys.path.pop(0); "
UNPROTECTED = {
    "network": "it can reach the network",
    "files": "it can read and write files outside of its scratch folder",
    "truncation": "it can empty files outside of its scratch folder",
    "modes": "it can change modes, owners, times and attributes of files outside of its scratch folder",
    "memory": "it can hold memory beyond memory_mib, of which some may outlive it",
    "priorities": "it can change priorities and processors of other processes",
    "processes": "it can start processes, of which some may outlive it, and signal others",
}
"""Consequence of each protection that the kernel does not offer."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of a program."""

    stdout: str
    stderr: str
    code: int | None
    """Exit code; negative: number of the signal that ended it. None after a timeout."""
    timed_out: bool
    missing: Sequence[str]
    """Protections that this kernel does not offer: keys of `UNPROTECTED`."""


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    files: Mapping[str, str | bytes] | None = None,
    stdin: str = "",
    memory_mib: int = 1024,
    file_mib: int = 16,
    output_kib: int = 64,
    may_fork: bool = False,
) -> Result:
    """Run a command in a new scratch folder that holds `files` (text by relative path), and remove the folder.

    `timeout_s`: wall-clock seconds, after which the command is killed with all that it started. `memory_mib`: address
    space of each process. `file_mib`: size of a file that it writes. `output_kib`: part of stdout and of stderr that is
    kept, each. `may_fork`: allow further processes. Raises RunError if the sandbox itself fails.
    """
    return _run(list(argv), None, files or {}, stdin, timeout_s, memory_mib, file_mib, output_kib, may_fork)


def run_python(
    source: str,
    *,
    timeout_s: float,
    argv: Sequence[str] = (),
    files: Mapping[str, str | bytes] | None = None,
    stdin: str = "",
    memory_mib: int = 1024,
    file_mib: int = 16,
    output_kib: int = 64,
    may_fork: bool = False,
) -> Result:
    """Run a Python program, as `run` does a command, with this interpreter's packages."""
    return _run(list(argv), source, files or {}, stdin, timeout_s, memory_mib, file_mib, output_kib, may_fork)


def run_test(
    program: str,
    test: str,
    *,
    timeout_s: float,
    program_files: Mapping[str, str | bytes] | None = None,
    test_files: Mapping[str, str | bytes] | None = None,
    modules: Sequence[str] = (),
    memory_mib: int = 1024,
    file_mib: int = 16,
    output_kib: int = 64,
) -> Result:
    """Run a test, which is trusted, on a program, which is not, each in a sandbox of its own; the result is the test's,
    with code 0 if it has run to its end.

    The test finds the program's names, and its `modules` where it imports them. Only plain values cross between the
    two, so that the program neither reads the test nor has a part in comparisons. A program that ends fails the test.
    """
    given = (memory_mib, file_mib, output_kib)
    ask, answer = os.pipe(), os.pipe()
    pipes = [*ask, *answer]
    try:
        with (
            _job([], program, program_files or {}, timeout_s, *given[:2], False) as served,
            _job([], test, test_files or {}, timeout_s, *given[:2], False) as tested,
        ):
            folder = str(served["folder"])
            process, report = start(
                {**served, "peer": (ask[0], answer[1], None)},
                stdin=subprocess.DEVNULL,
                folder=folder,
                environment=_environment(folder),
                descriptors=[ask[0], answer[1]],
            )
            with process, open(report, "rb"):
                os.close(pipes.pop(0))
                os.close(pipes.pop())
                try:
                    return _supervise(
                        {**tested, "peer": (answer[0], ask[1], list(modules))},
                        b"",
                        timeout_s,
                        output_kib * 1024,
                        pipes,
                        (process.stdout, process.stderr),
                    )
                finally:
                    _stop(process)
    finally:
        for pipe in pipes:
            os.close(pipe)


@functools.cache
def missing_protections() -> tuple[str, ...]:
    """Lines about protections that this machine's kernel does not offer to sandboxed programs; empty: all are there."""
    missing = run_python("", timeout_s=60.0).missing
    return tuple(f"sandbox: this kernel does not confine a program: {UNPROTECTED[name]}" for name in missing)


def _run(
    argv: list[str],
    source: str | None,
    files: Mapping[str, str | bytes],
    stdin: str,
    timeout_s: float,
    memory_mib: int,
    file_mib: int,
    output_kib: int,
    may_fork: bool,
) -> Result:
    with _job(argv, source, files, timeout_s, memory_mib, file_mib, may_fork) as job:
        return _supervise(job, stdin.encode(), timeout_s, output_kib * 1024)


@contextlib.contextmanager
def _job(
    argv: list[str],
    source: str | None,
    files: Mapping[str, str | bytes],
    timeout_s: float,
    memory_mib: int,
    file_mib: int,
    may_fork: bool,
) -> Iterator[dict[str, object]]:
    """Job of a supervisor with a scratch folder of its own, which is removed in the end. `source`: of a Python program,
    instead of a command."""
    # Modes of what is inside are the program's, those of the outer folder keep other users out.
    outer = Path(tempfile.mkdtemp(prefix="posttrain-sandbox-")).resolve()
    folder = outer / "work"
    try:
        folder.mkdir()
        _write(folder, files)
        python = None
        if source is not None:
            names = (f"main{'_' * count}.py" for count in itertools.count())
            python = next(name for name in names if not (folder / name).exists())
            _write(folder, {python: source})
        yield {
            "argv": argv,
            "python": python,
            "folder": str(folder),
            "timeout_s": timeout_s,
            "memory_mib": memory_mib,
            "file_mib": file_mib,
            "may_fork": may_fork,
            "confined": True,
            "peer": None,
        }
    finally:
        _remove(outer)


def _write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder):
            raise ValueError(f"files: {name!r} lies outside of the scratch folder; use a relative path")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def _supervise(
    job: Mapping[str, object],
    stdin: bytes,
    timeout_s: float,
    limit: int,
    descriptors: Sequence[int] = (),
    beside: Sequence[IO[bytes] | None] = (),
) -> Result:
    """Run the supervisor, and read its report and its program's output; what comes `beside` is thrown away."""
    folder = str(job["folder"])
    with tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        process, report = start(
            job, stdin=given, folder=folder, environment=_environment(folder), descriptors=descriptors
        )
    with process, open(report, "rb"):
        assert process.stdout is not None and process.stderr is not None
        pipes = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray(), report: bytearray()}
        others = {pipe.fileno(): bytearray() for pipe in beside if pipe is not None}
        try:
            _drain(pipes, others, report, time.monotonic() + timeout_s + GRACE_S, limit)
        finally:
            _stop(process)
        stdout, stderr = (
            bytes(pipes[one.fileno()]).decode(errors="replace") for one in (process.stdout, process.stderr)
        )
        said = bytes(pipes[report])
    if not said:
        raise RunError(f"sandbox: it did not start or end: {stderr.strip()[-500:] or 'no message'}")
    found = marshal.loads(said)
    return Result(
        stdout=stdout, stderr=stderr, code=found["code"], timed_out=found["timed_out"], missing=tuple(found["missing"])
    )


def start(
    job: Mapping[str, object],
    *,
    stdin: IO[bytes] | int,
    folder: str | None,
    environment: Mapping[str, str],
    descriptors: Sequence[int] = (),
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a supervisor, which SIGTERM ends with all that it has started; returns it, and the descriptor of its
    report: what was read when it ends is `marshal` of `code`, `timed_out` and `missing`."""
    root = str(Path(__file__).resolve().parents[2])
    report, write_end = os.pipe()
    try:
        # A file: the command line is limited.
        with tempfile.TemporaryFile() as file:
            marshal.dump({**job, "parent": os.getpid(), "report": write_end}, file)
            file.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", PROGRAM.format(root=root) + "main()", str(file.fileno())],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[write_end, file.fileno(), *descriptors],
                start_new_session=True,
                cwd=folder,
                env=environment,
            )
    except BaseException:
        os.close(report)
        raise
    finally:
        os.close(write_end)
    return process, report


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a supervisor with all that it has started."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _remove(folder: Path) -> None:
    """Remove a folder, whatever the modes and the depth of what is in it."""
    names = (f".{number}" for number in itertools.count())
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry)
                continue
            os.chmod(entry, 0o700)
            for inner in list(os.scandir(entry)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner, 0o700)
                    # To the top, so that no path is longer than the system allows.
                    os.rename(inner, next(name for one in names if not (name := folder / one).exists()))
                else:
                    os.unlink(inner)
            os.rmdir(entry)
    os.rmdir(folder)


def _environment(folder: str) -> dict[str, str]:
    """Environment without this process's variables, which may hold keys."""
    path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
    return {"PATH": path, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


def _drain(
    pipes: Mapping[int, bytearray], others: Mapping[int, bytearray], report: int, end: float, limit: int
) -> None:
    """Read all pipes until the report's end or the deadline; keep at most `limit` bytes of each. `others` are read
    until the report comes."""
    every = {**pipes, **others}
    with selectors.DefaultSelector() as selector:
        for pipe in every:
            os.set_blocking(pipe, False)
            selector.register(pipe, selectors.EVENT_READ)
        reported = False
        while selector.get_map() and (time.monotonic() < end):
            ready = selector.select(0.0 if reported else max(0.0, end - time.monotonic()))
            if reported and not [key for key, _ in ready if key.fd in pipes]:
                return
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                if not part:
                    selector.unregister(key.fd)
                    reported = reported or key.fd == report
                every[key.fd].extend(part[: limit - len(every[key.fd])])
