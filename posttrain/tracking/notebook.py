"""Live display of a stage in a notebook: one output that is updated with curves, samples and the time to go."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from posttrain.metrics import Sample
from posttrain.tracking.console import cut
from posttrain.tracking.curves import Curves
from posttrain.tracking.history import Point
from posttrain.tracking.steps import LAYOUTS, Trend, number, seconds, shown_number

EVERY_S = 1.0
"""Least time between two updates."""
MORE = ("completions/mean_length", "completions/clipped_ratio", "entropy", "rewards/accuracies", "grad_norm")
"""Metrics drawn after the main one, where the stage has them."""
NUM_CURVES, NUM_SAMPLES, TEXT_CELLS = 6, 4, 300
CELL = 'style="text-align:left;vertical-align:top;white-space:pre-wrap;max-width:28em"'


def in_notebook() -> bool:
    """Tell whether the process is the kernel of a notebook: Jupyter, Colab, Kaggle."""
    from rich.console import Console

    return Console().is_jupyter


class NotebookSink:
    """Sink that shows one updating output in place of lines: state, curves, the last samples."""

    def __init__(self, stage: str, kind: str, num_steps: int) -> None:
        self._stage, self._num_steps, self._layout = stage, num_steps, LAYOUTS[kind]
        self._trend = Trend(self._layout.headline, self._layout.rises, num_steps)
        self._series: dict[str, list[Point]] = {}
        self._step, self._shown_at = 0, -EVERY_S
        self._samples: Sequence[Sample] = ()
        self._handle: Any = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._layout.headline in metrics:
            self._step = step
            self._trend.add(step, metrics)
        for name, value in metrics.items():
            self._series.setdefault(name, []).append((step, value))
        if time.monotonic() - self._shown_at >= EVERY_S:
            self._show()

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """Ignored: tables are written to files only."""

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        self._samples = rows

    def close(self) -> None:
        self._show()

    def page(self) -> str:
        """HTML of the present state."""
        main, trend = self._layout.headline, self._trend
        facts = [f"step {self._step} of {self._num_steps}"]
        if found := self._series.get(main):
            facts += [f"{main} {number(found[-1][1])}", f"trend {trend.shown}", f"best {number(trend.best)}"]
        facts.append(f"{seconds(trend.left_s)} to go" if self._step < self._num_steps else "done")
        names = [name for name in (main, f"eval/{main}", *MORE) if name in self._series][:NUM_CURVES]
        done = 100 * self._step / self._num_steps
        bar = f'<progress max="100" value="{done:.1f}" style="width:12em"></progress>'
        head = f"<p><b>{escape(self._stage)}</b> {bar} {escape(', '.join(facts))}</p>"
        return head + Curves({name: self._series[name] for name in names})._repr_html_() + self._table()

    def _table(self) -> str:
        if not self._samples:
            return ""
        rows = [
            (row.prompt[-TEXT_CELLS:], cut(row.completion, TEXT_CELLS), shown_number(row.reward), row.stop)
            for row in self._samples[:NUM_SAMPLES]
        ]
        head = "".join(f"<th {CELL}>{name}</th>" for name in ("prompt", "completion", "reward", "stop"))
        body = "".join("<tr>" + "".join(f"<td {CELL}>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
        return f"<table><tr>{head}</tr>{body}</table>"

    def _show(self) -> None:
        from IPython.display import HTML, display

        self._shown_at = time.monotonic()
        if self._handle is None:
            self._handle = display(HTML(self.page()), display_id=True)
        else:
            self._handle.update(HTML(self.page()))
