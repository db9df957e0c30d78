"""Progress of long work: a bar on a terminal, periodic lines elsewhere."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from posttrain.tracking.console.screen import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

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
