"""Test files for reward functions: the values of a few completions, as pytest checks that a project keeps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from posttrain.reward.lab.cases import ABSURD, Case, Kind
from posttrain.reward.lab.measure import Measured

KEPT_ROWS = 2
"""Rows whose completions are written."""
LONGEST = 120
"""Characters of the longest completion that is written, beside those of about the golden answer's length."""

HEAD = '''"""Values of {name}, as `posttrain reward` found them; correct those that are wrong."""

from pathlib import Path

import pytest

from posttrain.reward.lab.score import score_text

REWARD = {spec}
ARGS = {args}
ROWS = {rows}
"""Rows of the dataset: the prompt, and what the function reads."""

VALUES = [
'''
TAIL = ''']
"""Row, completion, value. None: not applicable."""


@pytest.mark.parametrize(("row", "completion", "value"), VALUES)
def test_value(row: int, completion: str, value: float | None) -> None:
    assert score_text(REWARD, ROWS[row], completion, ARGS) == pytest.approx(value)
'''


def write_tests(path: Path, spec: str, args: dict[str, object], measured: Measured) -> int:
    """Write a test file; return its number of checks. `spec`: `/absolute/file.py:name` or `module:name`."""
    kept = [number for number, case in enumerate(measured.cases) if _keep(case, measured)]
    failed = {error.sample for error in measured.failures}
    lines = [
        f"    ({case.row}, {case.text!r}, {_value(float(measured.values[number]))}),  # {case.kind.value}"
        for number in kept
        if number not in failed
        for case in (measured.cases[number],)
    ]
    rows = [{**row.row} for row in measured.rows[:KEPT_ROWS]]
    head = HEAD.format(name=measured.name, spec=_located(spec, path), args=repr(args), rows=_rows(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + "\n".join(lines) + "\n" + TAIL, encoding="utf-8")
    return len(lines)


def _keep(case: Case, measured: Measured) -> bool:
    longest = max(LONGEST, 2 * len(measured.rows[case.row].golden))
    return (
        case.row < KEPT_ROWS
        and len(case.text) <= longest
        and case.text not in ABSURD[4:]
        and case.kind is not Kind.TOLD
    )


def _value(value: float) -> str:
    return "None" if np.isnan(value) else repr(round(value, 6))


def _rows(rows: Sequence[dict[str, object]]) -> str:
    return "[\n" + "".join(f"    {row!r},\n" for row in rows) + "]"


def _located(spec: str, test: Path) -> str:
    """Expression for the function's name, relative to the test file where it is a file."""
    source, _, name = spec.rpartition(":")
    if not source.endswith(".py"):
        return repr(spec)
    relative = Path(os.path.relpath(source, test.resolve().parent)).as_posix()
    return f'f"{{(Path(__file__).parent / {relative!r}).resolve()}}:{name}"'
