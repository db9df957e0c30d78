"""Files and folders that appear whole or not at all, and digests of what they hold."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
