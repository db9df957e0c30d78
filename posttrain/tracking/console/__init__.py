"""Console output of a run: one line per step, tables of samples, progress bars."""

from posttrain.tracking.console.bars import progress, progress_bar
from posttrain.tracking.console.screen import console, cut, printable, shown_log
from posttrain.tracking.console.steps import ConsoleSink, shown_number, with_interval

__all__ = [
    "ConsoleSink",
    "console",
    "cut",
    "printable",
    "progress",
    "progress_bar",
    "shown_log",
    "shown_number",
    "with_interval",
]
