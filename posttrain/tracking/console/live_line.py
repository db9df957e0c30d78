"""Line of a terminal that is redrawn in place, below everything else that is printed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from posttrain.tracking.console.screen import cut

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable

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
