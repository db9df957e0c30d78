"""A step's samples as a table: prompts, completions, rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrain.metrics import Sample
from posttrain.tracking.console.screen import clean, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SAMPLE_CELLS = 240
"""Of a completion in a narrow table; never fewer than three lines, nor more than eight."""


def sample_table(title: str, rows: Sequence[Sample], output: Console) -> Table:
    """A table as wide as the console: the prompt's end, the completion's start, rewards, advantage, stop reason."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    names = list(dict.fromkeys(name for row in rows for name in row.rewards))
    scores = [] if len(names) == 1 else names
    heads = [printable(head, output.encoding) for head in ("reward", *scores, "advantage", "stop")]
    body = [
        [
            shown_number(row.reward),
            *(shown_number(row.rewards.get(n)) for n in scores),
            shown_number(row.advantage),
            row.stop,
        ]
        for row in rows
    ]
    body = [[printable(cell, output.encoding) for cell in cells] for cells in body]
    narrowest = 9 if output.width >= 100 else 6
    widths = [max(min(cell_len(h), narrowest), *(cell_len(cells[i]) for cells in body), 1) for i, h in enumerate(heads)]
    # Each column takes 3 more for its padding and border; one border is left over.
    free = max(24, output.width - sum(widths) - 3 * (len(widths) + 2) - 1)
    texts = free // 3, free - free // 3
    table = Table(title=Text(title), title_justify="left", show_lines=True, highlight=False)
    for head, width in zip(("prompt", "completion", *heads), (*texts, *widths), strict=True):
        table.add_column(Text(head), width=width, overflow="fold")
    lines = max(3, min(8, SAMPLE_CELLS // texts[1]))
    for row, cells in zip(rows, body, strict=True):
        prompt = clean(row.prompt, lines * texts[0], output, keep_end=True)
        completion = clean(row.completion, lines * texts[1], output)
        table.add_row(prompt, completion, *(Text(cell) for cell in cells))
    return table


def shown_number(value: float | None) -> str:
    """Number of a sample to three significant digits; `-` where there is none."""
    return "-" if value is None else f"{value:.3g}"
