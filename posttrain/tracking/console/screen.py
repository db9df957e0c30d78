"""Shared console, printable text, log lines, and a line that is redrawn in place."""

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
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable


DEFAULT_WIDTH = 80
"""Width in columns for log files and notebooks, unless `COLUMNS` is set."""


@functools.cache
def console() -> Console:
    """Shared console for lines and tables: plain text in logs and notebooks, on the current `sys.stdout`; silent in all
    processes of a run but the first."""
    from rich.console import Console

    from posttrain.runtime import processes

    shared = Console(force_jupyter=False, highlight=False, quiet=not processes.writes())
    if not shared.is_terminal and "COLUMNS" not in os.environ:
        shared.width = DEFAULT_WIDTH
    return shared


def printable(text: str, encoding: str) -> str:
    """Escape characters that are invisible or not encodable as Python escapes: a newline is `\\n`."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if encoding.lower().replace("-", "") not in ("utf8", "utf16", "utf32"):
        shown = shown.replace("±", "+-").replace("…", "...")
    return shown.encode(encoding, errors="backslashreplace").decode(encoding)


def clean(text: str, cells: int, output: Console | None = None, *, keep_end: bool = False) -> Text:
    """Format untrusted text as a table cell: printable, at most `cells` wide, never parsed as markup."""
    from rich.text import Text

    encoding = (console() if output is None else output).encoding
    return Text(cut(printable(text, encoding), cells, encoding, keep_end=keep_end))


def cut(text: str, cells: int, encoding: str = "utf-8", *, keep_end: bool = False) -> str:
    """Truncate text to its start (or end) of at most `cells` terminal cells; omissions are marked."""
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
    """Log handler that prints the package's log on the shared console."""

    def emit(self, record: logging.LogRecord) -> None:
        console().print(record.getMessage(), style="dim", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def shown_log() -> Iterator[None]:
    """Print the package's log in this block, such as kernel choices, without propagating it: a library that configures
    the root logger would print it twice."""
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


ERASE = "\r\x1b[2K"
EVERY_S = 0.1
"""Least time between two drawings."""


class LiveLine:
    """Line at the cursor of a terminal; other output of the console erases it first, and the next `show` redraws it."""

    def __init__(self, output: Console) -> None:
        self._console = output
        self._drawn_at = -EVERY_S
        self._drawn = False
        hook: Any = self  # of rich, which is imported late
        output.push_render_hook(hook)

    def show(self, text: str) -> None:
        """Draw the text, cut to the width of the terminal."""
        if time.monotonic() - self._drawn_at < EVERY_S:
            return
        self._drawn, self._drawn_at = True, time.monotonic()
        shown = cut(text, self._console.width - 1, self._console.encoding)
        self._console.file.write(f"{ERASE}{shown}\r")
        self._console.file.flush()

    def close(self) -> None:
        """Erase the line and leave the console to others."""
        if self._drawn:
            self._console.file.write(ERASE)
            self._console.file.flush()
        self._console.pop_render_hook()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Erase the line before anything else that the console prints (rich's render hook)."""
        from rich.control import Control
        from rich.segment import ControlType

        if not self._drawn:
            return renderables
        self._drawn = False
        return [Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)), *renderables]
