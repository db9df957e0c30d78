"""What people see while a run goes on: one line per step, tables of samples, progress bars."""

from posttrain.tracking.console.bars import progress, progress_bar
from posttrain.tracking.console.samples import shown_number
from posttrain.tracking.console.screen import console, cut, printable, shown_log
from posttrain.tracking.console.steps import ConsoleSink, with_interval

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
