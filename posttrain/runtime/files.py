"""Files and folders that appear whole or not at all, locks of folders, and digests of what they hold."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from posttrain.errors import DISK, ConfigError, OutsideError, placed

READ_BYTES = 1 << 18
"""Bytes that a thread reads at once."""
SECTION_BYTES = 1 << 26
"""Bytes of a file that a thread digests."""
URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:/")


def check_local(path: str | Path) -> str:
    """Return the path. ConfigError for a URL, such as `gs://bucket`, of which a path would make a folder `gs:`."""
    if URL.match(str(path)):
        raise ConfigError(
            f"{path} is a URL, and runs write to folders only; set a folder (a mounted bucket is one), and copy it to "
            "the bucket afterwards"
        )
    return str(path)


def check_writable(output: Path) -> None:
    """ConfigError for a run's folder that cannot be made or written; nothing is made."""
    whole = output.absolute()
    place = next(path for path in (whole, *whole.parents) if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        why = "not writable (read-only, or of another user)" if place.is_dir() else "a file"
        raise ConfigError(f"output: {output}: cannot be written: {place} is {why}; give another output")


def check_readable(folder: Path, error: BaseException) -> None:
    """OutsideError if a reader's error comes from the system, such as an outage of a network file system, and not from
    what the folder's files hold."""
    number = re.search(r"OS error (\d+)", str(error))
    found = error.errno if isinstance(error, OSError) else int(number[1]) if number else None
    if found not in (None, errno.ENOENT):
        raise OutsideError(f"{folder}: cannot be read ({str(error)[:200]})", DISK) from error
    try:
        entries = [entry for place in _folders(folder) for entry in os.scandir(place)]
        for entry in entries:
            if entry.is_file():
                with open(entry, "rb") as file:
                    while file.read(READ_BYTES):
                        pass
    except OSError as outage:
        raise OutsideError(f"{folder}: cannot be read ({outage})", DISK) from error


def _folders(folder: Path) -> Iterator[str]:
    """The folder and those below it; OSError if one cannot be listed."""

    def fail(error: OSError) -> None:
        raise error

    return (place for place, _, _ in os.walk(folder, onerror=fail))


def cache_folder(name: str) -> Path:
    """`$XDG_CACHE_HOME/posttrain/NAME`, by default below `~/.cache`. ConfigError for a URL."""
    base = os.environ.get("XDG_CACHE_HOME")
    with placed("XDG_CACHE_HOME: "):
        return (Path(check_local(base)) if base else Path.home() / ".cache") / "posttrain" / name


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file under another name, then rename it: a killed process leaves no partial file."""
    partial = file.with_suffix(".tmp")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.rename(file)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target` to write; it takes the place of `target` unless the block raises."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        yield new
        if target.exists():
            target.rename(Path(temporary) / "old")
        new.rename(target)


LOCK_NAME = ".lock"
LOCK_TRIES, LOCK_WAIT_S = 5, 0.1
"""Attempts to lock a folder: whoever asks for its state holds the lock for an instant."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which names the host. BlockingIOError if another process holds it."""
    import fcntl

    with (folder / LOCK_NAME).open("a+") as lock:
        for left in reversed(range(LOCK_TRIES)):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    raise
                time.sleep(LOCK_WAIT_S)
        lock.truncate(0)
        lock.write(f"{secrets.token_hex(8)} {socket.gethostname()}")
        lock.flush()
        yield


def is_locked(folder: Path) -> bool | None:
    """True while a process holds the folder's lock. None if that cannot be told: it was never locked, or last by
    another host, whose lock this one need not see."""
    import fcntl

    try:
        lock = (folder / LOCK_NAME).open("r")
    except OSError:
        return None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return False if lock.read().partition(" ")[2] == socket.gethostname() else None


def digest(content: str | bytes, length: int = 16) -> str:
    """First hexadecimal digits of the SHA-256 of a content.

    >>> digest("posttrain", 8)
    '79e5a2f9'
    """
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:length]


def file_digest(file: Path) -> str:
    """Digest of a whole file, of which threads read sections: what its disk holds now. `content_digest` reads a file
    once."""
    with file.open("rb") as source, ThreadPoolExecutor(8) as pool:
        size, number = os.fstat(source.fileno()).st_size, source.fileno()

        def section(start: int) -> bytes:
            found = hashlib.sha256()
            for at in range(start, min(start + SECTION_BYTES, size), READ_BYTES):
                found.update(os.pread(number, min(READ_BYTES, start + SECTION_BYTES - at), at))
            return found.digest()

        return digest(b"".join(pool.map(section, range(0, size, SECTION_BYTES))) + size.to_bytes(8))


KEPT_BYTES = 1 << 16
"""Size of a file from which on its digest is kept: a smaller one is read as fast as what was kept of it."""
SETTLED_NS = 2 * 10**9
"""Age of a file's last change from which on another change has another time, on any file system."""
MAX_KEPT = 100_000
"""Digests that are kept of those of twice as many files."""


def content_digest(file: Path) -> str:
    """Digest of a whole file, as `file_digest` makes it, which is kept while the file stays the same.

    A file is known by its device, inode, size, and time of change of the inode in nanoseconds, which no program sets.
    A file that was changed within the last two seconds is read again. OSError if the file cannot be read.
    """
    before, value = file.stat(), None
    identity = f"{before.st_dev} {before.st_ino} {before.st_size} {before.st_ctime_ns}"
    if before.st_size >= KEPT_BYTES:
        value = _KEPT.get(identity)
    if value is None:
        value = file_digest(file)
        settled = time.time_ns() - max(before.st_ctime_ns, before.st_mtime_ns) > SETTLED_NS
        after = file.stat()
        unchanged = (after.st_ino, after.st_size, after.st_ctime_ns) == (
            before.st_ino,
            before.st_size,
            before.st_ctime_ns,
        )
        if before.st_size >= KEPT_BYTES and settled and unchanged:
            _KEPT.put(identity, value)
    return value


class _KeptDigests:
    """Digests of files by their identity, in memory and in lines of a file below the user's cache.

    Processes append to that file at the same time: a line ends with a digest of itself, and one that is not whole does
    not count. Without a folder that can be written, digests are kept in memory only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: Path | None = None
        self._digests: dict[str, str] = {}

    def get(self, identity: str) -> str | None:
        with self._lock:
            self._open()
            return self._digests.get(identity)

    def put(self, identity: str, value: str) -> None:
        with self._lock:
            self._open()
            self._digests[identity] = value
            with suppress(OSError):
                if self._file is not None:
                    self._file.parent.mkdir(parents=True, exist_ok=True)
                    number = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                    try:
                        os.write(number, _kept_line(identity, value).encode())  # one call: lines do not mix
                    finally:
                        os.close(number)

    def _open(self) -> None:
        """Read the file, if this process has not, or if the folder of caches is another one now."""
        file = None
        with suppress(ConfigError, RuntimeError):  # a URL, or no home
            file = cache_folder("digests") / "files.txt"
        if file is None or file == self._file:
            return
        self._file, self._digests = file, {}
        with suppress(OSError):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
                identity, _, value = line.rpartition(" ")[0].rpartition(" ")
                if line == _kept_line(identity, value):
                    self._digests[identity] = value
            if len(self._digests) > 2 * MAX_KEPT:
                self._digests = dict(list(self._digests.items())[-MAX_KEPT:])
                write_whole(file, "".join(_kept_line(*one) for one in self._digests.items()))


def _kept_line(identity: str, value: str) -> str:
    return f"{identity} {value} {digest(f'{identity} {value}', 8)}\n"


_KEPT = _KeptDigests()


def typed_text(value: Any) -> str:
    """Text of a value of plain types, arrays and objects, from which their types can be told: 1, 1.0, true and "1"
    differ, also as keys, whose order does not matter. Such texts are compared, and not read.

    >>> typed_text({"b": [1, 1.0, "1"], 1: None})
    '{"1:int": null, "b:str": [1, 1.0, "1"]}'
    """
    return json.dumps(_typed(value), sort_keys=True)


def _typed(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {f"{key}:{type(key).__name__}": _typed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_typed(item) for item in value]
    kind, content = type(value).__name__, value if isinstance(value, bytes) else None
    if hasattr(value, "tobytes"):  # arrays, and images, whose text is an address
        kind += "".join(f" {getattr(value, name, '')}" for name in ("dtype", "shape", "mode", "size"))
        content = value.tobytes()
    return {kind: str(value) if content is None else digest(content)}
