"""HTML of a result in a notebook: state, curves, and held-out answers before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from posttrain.tracking.console import cut, shown_number
from posttrain.tracking.curves import Curves

NUM_ANSWERS = 6
TEXT_CELLS = 240
CELL = 'style="text-align:left;vertical-align:top;white-space:pre-wrap;max-width:24em"'


def result_page(output: str, state: str, curves: Curves, results: Sequence[Mapping[str, Any]]) -> str:
    """Format a run: one line, its curves, a table per stage with held-out answers."""
    tables = [_answers(result) for result in results if "samples" in result.get("after", {})]
    return "".join([f"<p><b>{escape(output)}</b>: {escape(state)}</p>", curves._repr_html_(), *tables])


def _answers(result: Mapping[str, Any]) -> str:
    before, after = result["before"], result["after"]
    measure = after["measure"]
    pairs = sorted(
        zip(before["samples"], after["samples"], strict=True), key=lambda pair: pair[0][measure] == pair[1][measure]
    )
    heads = ("prompt", "before", measure, "after", measure)
    rows = [
        (old["prompt"], old["completion"], shown_number(old[measure]), new["completion"], shown_number(new[measure]))
        for old, new in pairs[:NUM_ANSWERS]
    ]
    rows.append((f"mean {measure}, 95 % interval", _interval(before), "", _interval(after), ""))
    head = "".join(f"<th {CELL}>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td {CELL}>{escape(cut(str(text), TEXT_CELLS))}</td>" for text in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _interval(evaluation: Mapping[str, Any]) -> str:
    return f"{evaluation['mean']:.3f} ({evaluation['low']:.3f} to {evaluation['high']:.3f})"
