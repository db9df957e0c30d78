"""The one console, what may be printed on it, and the log among its lines."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PLAIN_WIDTH = 120
"""Columns of a log file or a notebook, where `COLUMNS` does not say otherwise."""


@functools.cache
def console() -> Console:
    """The one console of lines and tables: plain text in logs and notebooks, on whatever `sys.stdout` is then."""
    from rich.console import Console

    found = Console(force_jupyter=False, highlight=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = PLAIN_WIDTH
    return found


def printable(text: str, encoding: str) -> str:
    """The text with what cannot be seen or encoded as Python escapes: a newline is `\\n`."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if encoding.lower().replace("-", "") not in ("utf8", "utf16", "utf32"):
        shown = shown.replace("±", "+-").replace("…", "...")
    return shown.encode(encoding, errors="backslashreplace").decode(encoding)


def clean(text: str, cells: int, output: Console | None = None, *, keep_end: bool = False) -> Text:
    """Anyone's text as a table cell: printable, at most `cells` wide, and never read as markup."""
    from rich.text import Text

    encoding = (console() if output is None else output).encoding
    return Text(cut(printable(text, encoding), cells, encoding, keep_end=keep_end))


def cut(text: str, cells: int, encoding: str = "utf-8", *, keep_end: bool = False) -> str:
    """The start (or the end) of a text, as many terminal cells wide; what is missing is marked."""
    from rich.cells import cell_len

    if cell_len(text) <= cells:
        return text
    mark = printable("…", encoding)
    room, kept = cells - len(mark), []
    for character in reversed(text) if keep_end else text:
        room -= cell_len(character)
        if room < 0:
            break
        kept.append(character)
    return mark + "".join(reversed(kept)) if keep_end else "".join(kept) + mark


class _LogHandler(logging.Handler):
    """Lines of the package's log among those of the run."""

    def emit(self, record: logging.LogRecord) -> None:
        console().print(record.getMessage(), style="dim", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def shown_log() -> Iterator[None]:
    """Print what the package logs meanwhile, such as the kernels that it chose, and only here: a library that sets up
    logging for all would print it once more."""
    logger, handler = logging.getLogger("posttrain"), _LogHandler()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
