"""Files and folders that appear whole or not at all, and digests of what they hold."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import ConfigError

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


def cache_folder(name: str) -> Path:
    """`$XDG_CACHE_HOME/posttrain/NAME`, by default below `~/.cache`. ConfigError for a URL."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(check_local(base)) if base else Path.home() / ".cache") / "posttrain" / name
    except ConfigError as error:
        raise ConfigError(f"XDG_CACHE_HOME: {error}") from error


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


def digest(content: str | bytes, length: int = 16) -> str:
    """First hexadecimal digits of the SHA-256 of a content.

    >>> digest("posttrain", 8)
    '79e5a2f9'
    """
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:length]
