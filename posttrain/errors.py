"""Error classes for users, and nearest-name hints in messages."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator

SIMILAR = 0.65
"""Minimum `difflib` ratio of a misspelling: `stf` for `sft` is above it, words sharing one syllable are below."""
SHORTEST = 4
"""Letters of the shortest beginning of a name that stands for it."""


class OneLine(Exception):
    """Error that a notebook shows as its message alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython prints in place of the traceback."""
        return [f"{type(self).__name__}: {line}" for line in str(self).splitlines()]


class ConfigError(OneLine, ValueError):
    """Invalid configuration or call: one line with location, rule, given value and remedy."""


class placed:
    """Begin the text of a block's ConfigError with the place of what it is about."""

    def __init__(self, where: str):
        self._where = where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError):
            raise ConfigError(f"{self._where}{error}") from error


class RunError(OneLine, RuntimeError):
    """A run-time failure with a one-line, actionable message."""


DISK, LOST = 74, 75
"""Exit codes of a disk that is full or fails, and of a run that has lost one of its processes, as in sysexits.h: I/O
error, and temporary failure."""


class OutsideError(RunError):
    """Failure of the disk or of another process, with its exit code: the same command resumes."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


NO_ROOM = ("No space left on device", "Disk quota exceeded")
FAILING = (errno.EIO, errno.ESTALE, errno.EREMOTEIO)
"""Errors of a disk or a network file system that says nothing about what it holds."""
NO_PEER = ("Gloo ", "NCCL operation", "oordination service", "oordinationService", "heartbeat")
"""Words of errors by which libraries tell that another process has gone; none of their classes does."""


def outside_error(error: BaseException, peer: str | None = None) -> OutsideError | None:
    """Failure outside of the program that an error comes from; None for any other error. `peer`: name of another
    process, where there is one."""
    for one in () if isinstance(error, ConfigError) else _causes(error):
        if isinstance(one, OutsideError):
            return one
        first = " ".join(str(one).split())[:200]
        full = isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(words in str(one) for words in NO_ROOM):
            return OutsideError(f"the disk is full ({first}); make room", DISK)
        if isinstance(one, OSError) and one.errno in FAILING:
            return OutsideError(f"the disk or its network fails ({first})", DISK)
        if peer and isinstance(one, RuntimeError | ValueError) and any(words in str(one) for words in NO_PEER):
            return OutsideError(f"{peer} has vanished ({first})", LOST)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    seen: set[int] = set()
    found: list[BaseException | None] = [error]
    while found:
        one = found.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        found += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]


def nearest_name(name: str, options: Iterable[str]) -> str | None:
    """Return the option most similar to a misspelt name, else the only one that begins with it, if any; capital letters
    do not matter."""
    known, name = {option.lower(): option for option in options}, name.lower()
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=SIMILAR)
    begun = [option for option in known if len(name) >= SHORTEST and option.startswith(name)]
    return known[near[0]] if near else known[begun[0]] if len(begun) == 1 else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Format `; did you mean 'nearest'?`; empty if no option is similar."""
    near = nearest_name(name, options)
    return "" if near is None else f"; did you mean {near!r}?"
