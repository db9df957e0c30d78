"""Curves of metrics as SVG and text, and the live display of a stage in a notebook: one output with curves, samples and
the time to go."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.metrics import Sample
from posttrain.tracking.console import cut
from posttrain.tracking.records import Point
from posttrain.tracking.steps import LAYOUTS, Trend, number, seconds, shown_number

WIDTH, HEIGHT = 320, 150
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 22, 20
MAX_POINTS = 400
"""Points drawn of a curve; more are averaged."""
CELLS = 48
"""Width of a curve as text."""
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Curves:
    """Curves by metric name: SVG in a notebook, one line each in a terminal; `save` writes the SVG or HTML."""

    series: Mapping[str, Sequence[Point]]

    def save(self, path: str | Path) -> Path:
        """Write the curves to a file, and return its path."""
        path = Path(path)
        path.write_text(self._repr_html_(), encoding="utf-8")
        return path

    def __repr__(self) -> str:
        width = max((len(name) for name in self.series), default=0)
        return "\n".join(f"{name:<{width}}  {text_curve(found)}" for name, found in self.series.items())

    def _repr_html_(self) -> str:
        drawn = "".join(svg_curve(name, found) for name, found in self.series.items())
        return f'<div style="display:flex;flex-wrap:wrap;gap:8px">{drawn}</div>'


def text_curve(found: Sequence[Point]) -> str:
    """One line: bars of the averaged curve, its first and last value."""
    values = [value for _, value in thin(found, CELLS)]
    if not values:
        return "no values"
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(BARS[round((value - low) * scale)] for value in values)
    return f"{bars}  {values[0]:.3g} -> {values[-1]:.3g}"


def thin(found: Sequence[Point], limit: int) -> list[Point]:
    """Average neighbouring finite points, to at most `limit`.

    >>> thin([(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)], 2)
    [(2, 0.5), (4, 2.5)]
    """
    finite = [point for point in found if math.isfinite(point[1])]
    size = max(1, math.ceil(len(finite) / limit))
    groups = [finite[start : start + size] for start in range(0, len(finite), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def svg_curve(name: str, found: Sequence[Point]) -> str:
    """SVG of one curve with the range of its axes, in the text colour of the page."""
    shown = thin(found, MAX_POINTS)
    frame = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" font-family="sans-serif" font-size="11" fill="currentColor">'
        f'<text x="{LEFT}" y="14" font-weight="bold">{escape(name)}</text>'
    )
    if not shown:
        return f'{frame}<text x="{LEFT}" y="{HEIGHT // 2}">no values yet</text></svg>'
    (first, last), values = (shown[0][0], shown[-1][0]), [value for _, value in shown]
    low, high = min(values), max(values)
    if low == high:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)

    def place(step: int, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / max(last - first, 1)
        y = TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)
        return f"{x:.1f},{y:.1f}"

    line, bottom = " ".join(place(*point) for point in shown), HEIGHT - BOTTOM
    return (
        f'{frame}<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}" fill="none" stroke="currentColor" opacity="0.3"/>'
        f'<text x="{LEFT - 4}" y="{TOP + 8}" text-anchor="end">{high:.3g}</text>'
        f'<text x="{LEFT - 4}" y="{bottom}" text-anchor="end">{low:.3g}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 5}">{first}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end">step {last}</text>'
        f'<text x="{WIDTH - RIGHT}" y="14" text-anchor="end">{values[-1]:.3g}</text>'
        f'<polyline points="{line}" fill="none" stroke="#3b7dd8" stroke-width="1.6"/>'
        f'<circle cx="{place(*shown[-1]).replace(",", chr(34) + " cy=" + chr(34))}" r="2.4" fill="#3b7dd8"/></svg>'
    )


EVERY_S = 1.0
"""Least time between two updates."""
MORE = ("completions/mean_length", "completions/clipped_ratio", "entropy", "rewards/accuracies", "grad_norm")
"""Metrics drawn after the main one, where the stage has them."""
NUM_CURVES, NUM_SAMPLES, TEXT_CELLS = 6, 4, 300
CELL = 'style="text-align:left;vertical-align:top;white-space:pre-wrap;max-width:28em"'


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
        if self._step >= self._num_steps:
            facts.append("done")
        elif not math.isnan(trend.left_s):
            facts.append(f"{seconds(trend.left_s)} to go")
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
