"""Console: printable text, log lines, progress of long work, and a line that is redrawn in place."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable
    from rich.progress import Progress
    from rich.text import Text


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


def print_lines(lines: Iterable[str]) -> None:
    """Print lines with samples of models, as far as the terminal can show them."""
    for line in lines:
        print(printable(line, sys.stdout.encoding or "utf-8"))


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


T = TypeVar("T")


def progress(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate over items with a bar if they take longer than two seconds. `total`: their number, if known."""
    with progress_bar(description, total) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def progress_bar(
    description: str,
    total: int | None = None,
    *,
    delay_s: float = 2.0,
    closing: bool = True,
    every_s: float = 30.0,
    output: Console | None = None,
) -> Iterator[Callable[[int], None]]:
    """Progress bar for work longer than `delay_s`; yields `advance(count)`. Without a total it shows time only.

    The bar is drawn on a terminal, or in a notebook with ipywidgets, and removed at the end; elsewhere a line is
    printed every `every_s` seconds. With `closing` one line remains, on stderr. Nested bars are not drawn.
    """
    from rich.console import Console

    from posttrain.runtime import processes

    output = Console(stderr=True, highlight=False, quiet=not processes.writes()) if output is None else output
    bar = _Bar(description, total, output)
    drawn = output.is_terminal or (output.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)
    timer = threading.Timer(delay_s, bar.show) if drawn else threading.Timer(every_s, bar.tell, (every_s,))
    timer.daemon = True
    timer.start()
    try:
        yield bar.advance
    finally:
        timer.cancel()
        bar.hide()
    if closing and bar.seconds >= delay_s:
        count = f"{bar.count:,} in " if bar.count else ""
        bar.print(f"{count}{bar.seconds:.1f} s")


_screen = threading.Lock()


class _Bar:
    """Bar shown by a timer thread, advanced and hidden by the worker thread."""

    def __init__(self, description: str, total: int | None, output: Console) -> None:
        self.count = 0
        self._description, self._total, self._output = description, total, output
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._progress: Progress | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def print(self, text: str) -> None:
        line = printable(f"{self._description}: {text}", self._output.encoding)
        self._output.print(line, markup=False, soft_wrap=True)

    def tell(self, every_s: float) -> None:
        """Print a line every `every_s` seconds until the work is done."""
        while not self._over.is_set():
            of = f" of {self._total:,}" if self._total is not None else ""
            self.print(
                f"{self.count:,}{of} after {self.seconds:.0f} s" if of or self.count else f"{self.seconds:.0f} s"
            )
            self._over.wait(every_s)

    def show(self) -> None:
        from rich import progress as parts
        from rich.markup import escape

        with self._lock:
            if self._over.is_set() or not _screen.acquire(blocking=False):
                return
            self._progress = parts.Progress(
                parts.TextColumn("{task.description}"),
                parts.BarColumn(),
                parts.MofNCompleteColumn(),
                parts.TimeElapsedColumn(),
                parts.TimeRemainingColumn(),
                console=self._output,
                transient=True,
            )
            self._progress.add_task(escape(self._description), total=self._total, completed=self.count)
            self._progress.start()

    def advance(self, count: int) -> None:
        with self._lock:
            self.count += count
            if self._progress is not None:
                self._progress.advance(self._progress.task_ids[0], count)

    def hide(self) -> None:
        with self._lock:
            self._over.set()
            if self._progress is not None:
                self._progress.stop()
                _screen.release()
                self._progress = None
