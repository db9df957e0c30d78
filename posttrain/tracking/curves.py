"""Curves of metrics as inline SVG, and as one line of text per metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from posttrain.tracking.history import Point

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
        low, high = low - max(abs(low), 1.0) * 0.05, high + max(abs(high), 1.0) * 0.05

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
