"""Lines of `metrics.jsonl` and `samples.jsonl` in the folder of a live or finished run, read without JAX."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

NUM_SHOWN = 8
"""Records of a table in its text and HTML forms."""
Point = tuple[int, float]
"""Step and value."""


class Records(list[dict[str, Any]]):
    """List of dicts with a table as its text and HTML forms; `to_pandas()` is a DataFrame."""

    def to_pandas(self) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(list(self))

    def column(self, name: str) -> list[Any]:
        """Values of the rows that have this key and a value there."""
        return [row[name] for row in self if row.get(name) is not None]

    def __repr__(self) -> str:
        keys = list(dict.fromkeys(key for row in self for key in row))
        return f"{len(self)} rows of {', '.join(keys[:NUM_SHOWN])}{', ...' if len(keys) > NUM_SHOWN else ''}"

    def _repr_html_(self) -> str:
        return str(self.to_pandas().to_html(max_rows=NUM_SHOWN, max_cols=NUM_SHOWN, notebook=True))


def read_metrics(output: Path) -> Records:
    """Metrics of a run: one row per stage and step, with the evaluation of that step in it."""
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for line in read_lines(output / "metrics.jsonl"):
        numbers = {name: float(value) if value in ("inf", "-inf") else value for name, value in line.items()}
        merged.setdefault((line["stage"], line["step"]), {}).update(numbers)
    return Records(merged.values())


def read_samples(output: Path) -> Records:
    """Samples of a run, in the order in which they were written."""
    return Records(read_lines(output / "samples.jsonl"))


def points(rows: Sequence[dict[str, Any]], name: str) -> list[Point]:
    """Steps and values of a metric, where it has a value."""
    return [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Complete lines of a JSONL file that may still be growing; none if there is no file."""
    if not file.exists():
        return
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)
