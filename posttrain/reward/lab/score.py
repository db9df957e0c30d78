"""Test files for reward functions, as pytest checks that a project keeps: the values of a few completions, and
`score_text`, which computes them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.data.messages import Message
from posttrain.errors import RunError
from posttrain.reward.function import Reward
from posttrain.reward.lab.cases import ABSURD, Case, Kind, LabRow, sample_of
from posttrain.reward.lab.measure import Measured
from posttrain.reward.rubric import Rubric
from posttrain.runtime.event_loop import run_async
from posttrain.user_code import import_object

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


def score_text(spec: str, row: Mapping[str, Any], completion: str, args: Mapping[str, Any] | None = None) -> Any:
    """Value of a completion; None: not applicable. RunError if the function fails.

    `spec`: `file.py:function` or `module:function`. `row`: columns of the dataset with a `prompt`, a string or a list
    of messages. `args`: further keywords of the function.
    """
    function: Any = import_object(spec, Path.cwd())
    prompt = row.get("prompt", "")
    plain = isinstance(prompt, str)
    messages: list[Message] = [{"role": "user", "content": prompt}] if plain else list(prompt)
    given = LabRow(row=row, messages=messages, plain=plain, golden="", answer="")
    case = Case(row=0, kind=Kind.GOLDEN, text=completion)
    reward = Reward(function=function, weight=1.0, args=args or {}, timeout_s=60.0)
    found = run_async(Rubric([reward]).score([[sample_of(given, case, 0, lambda text: list(text.encode()))]]))
    if found.errors:
        raise RunError(f"reward {reward.name}: {found.errors[0].error}")
    value = float(found.total_PG[0, 0])
    return None if math.isnan(value) else value


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
