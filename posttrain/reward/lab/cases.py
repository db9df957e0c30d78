"""Completions whose right order is known: golden answers, changed in ways that must and must not matter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from posttrain.data.messages import Message
from posttrain.errors import ConfigError
from posttrain.rollout.trajectory import Example, Trajectory

ANSWER_COLUMNS = ("answer", "ground_truth", "target", "solution", "completion", "response", "chosen", "label")
"""Columns that hold the right answer, in the order of preference."""
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
FILLER = "Let me think about this step by step and check it again. "
LONG, LONGER = 4, 40
"""Sentences put before an answer."""
HUGE = 20_000
"""Characters of the longest completion."""


class Kind(Enum):
    """Kind of a completion; the value is its name in reports."""

    GOLDEN = "the golden answer"
    OTHER = "another row's answer"
    NEXT = "the number one higher"
    PREFIXED = "the number with a digit before it"
    SUFFIXED = "the number with a digit after it"
    TOLD = "another row's answer, where the prompt tells the right one"
    ECHO = "a copy of the prompt"
    HEDGED = "a list of many answers"
    EMPTY = "an empty completion"
    ABSURD = "nonsense"
    SPACE = "the golden answer with spaces around it"
    NEWLINE = "the golden answer with a line break after it"
    CASE = "the golden answer in other case"
    PERIOD = "the golden answer with a full stop"
    BOLD = "the golden answer in bold"
    GOLDEN_LONG = "the golden answer after many words"
    OTHER_LONG = "another row's answer after some words"
    OTHER_LONGER = "another row's answer after many words"
    REPEATED = "another row's answer, repeated"
    CORRECTED = "another row's answer, then the golden one"


ABSURD = (
    "   \n\t ",
    "NaN inf 1e999 -0 ٣ ½ 0x1F",
    "9" * 5000,
    "\\boxed{ <answer> </think> ```json {[",
    "\x00\ufeff😀 ",
    "lorem ipsum " * (HUGE // 12),
)
"""Nonsense that policies write: white space, odd numbers, open brackets, control characters, a long text."""


@dataclass(frozen=True, kw_only=True)
class LabRow:
    """Row of the prompt dataset with its golden answer."""

    row: Mapping[str, Any]
    messages: Sequence[Message]
    plain: bool
    """True if the row's prompt is a string."""
    golden: str
    answer: str
    """Right answer alone, which the golden answer may contain."""

    @property
    def prompt(self) -> str:
        return str(self.messages[-1]["content"])


@dataclass(frozen=True, kw_only=True)
class Case:
    """Completion of a row."""

    row: int
    kind: Kind
    text: str


def answer_of(row: Mapping[str, Any], column: str | None) -> str:
    """Right answer of a row. ConfigError if no column holds one."""
    nested = row.get("reward_model")
    if column is None and isinstance(nested, Mapping) and "ground_truth" in nested:
        return str(nested["ground_truth"])
    names = ANSWER_COLUMNS if column is None else (column,)
    found = next((name for name in names if row.get(name) is not None), None)
    if found is None:
        wanted = f"no column {column!r}" if column else "no column with the answers"
        raise ConfigError(f"--data: {wanted} among {', '.join(row)}; name it with --answer COLUMN")
    value = row[found]
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content", "")
    return str(value)


def cases_of(rows: Sequence[LabRow]) -> list[Case]:
    """All cases of all rows. Rows whose answer no other row differs from have no wrong one."""
    hedge = [row.answer for row in rows]
    return [
        Case(row=number, kind=kind, text=text)
        for number, row in enumerate(rows)
        for kind, text in _texts(row, _other(rows, number), _around(hedge, number))
    ]


def _texts(row: LabRow, other: str | None, hedge: Sequence[str]) -> list[tuple[Kind, str]]:
    golden = row.golden
    found = [
        (Kind.GOLDEN, golden),
        (Kind.EMPTY, ""),
        (Kind.ECHO, row.prompt),
        (Kind.SPACE, f" {golden} "),
        (Kind.NEWLINE, f"{golden}\n"),
        (Kind.PERIOD, f"{golden}."),
        (Kind.GOLDEN_LONG, FILLER * LONGER + golden),
        *((Kind.ABSURD, text) for text in ABSURD),
        *_numbers(row),
    ]
    if row.answer and row.answer in golden:
        found.append((Kind.BOLD, _changed(golden, row.answer, f"**{row.answer}**")))
    if row.answer.replace(" ", "").isalpha() and row.answer.swapcase() != row.answer:
        found.append((Kind.CASE, _changed(golden, row.answer, row.answer.swapcase())))
    if other is not None:
        found += [
            (Kind.OTHER, other),
            (Kind.TOLD, other),
            (Kind.OTHER_LONG, FILLER * LONG + other),
            (Kind.OTHER_LONGER, FILLER * LONGER + other),
            (Kind.REPEATED, f"{other} " * LONGER),
            (Kind.CORRECTED, f"{other}? No, {golden}"),
        ]
    if len(set(hedge)) > 2:
        found.append((Kind.HEDGED, ", ".join(hedge)))
    return found


def _numbers(row: LabRow) -> list[tuple[Kind, str]]:
    """Golden answer with another final number; none unless the answer's final number is whole."""
    numbers = list(NUMBER.finditer(row.answer))
    if not numbers or "." in numbers[-1][0] or row.answer not in row.golden:
        return []
    last = numbers[-1]
    sign, digits = ("-", last[0][1:]) if last[0].startswith("-") else ("", last[0])
    value = int(digits.replace(",", "") or 0)
    changed = {
        Kind.NEXT: f"{sign}{value + 1}",
        Kind.PREFIXED: f"{sign}1{value}",
        Kind.SUFFIXED: f"{sign}{value}7",
    }
    answers = {kind: row.answer[: last.start()] + text + row.answer[last.end() :] for kind, text in changed.items()}
    return [(kind, _changed(row.golden, row.answer, answer)) for kind, answer in answers.items()]


def _changed(golden: str, answer: str, new: str) -> str:
    before, _, after = golden.rpartition(answer)
    return before + new + after


def _other(rows: Sequence[LabRow], number: int) -> str | None:
    """Golden answer of the next row with another answer."""
    following = [*rows[number + 1 :], *rows[:number]]
    own = rows[number].answer.strip().lower()
    return next((row.golden for row in following if row.answer.strip().lower() != own), None)


def _around(answers: Sequence[str], number: int, count: int = 4) -> list[str]:
    """The row's answer between those of others."""
    others = [answer for answer in dict.fromkeys(answers) if answer != answers[number]][: 2 * count]
    half = len(others) // 2
    return [*others[:half], answers[number], *others[half:]]


def sample_of(row: LabRow, case: Case, number: int, encode: Callable[[str], Sequence[int]]) -> Trajectory:
    """Trajectory of a case, as if it had been sampled."""
    if case.kind is Kind.TOLD:
        row = _telling(row)
    example = Example(index=case.row, row=row.row, messages=row.messages, prompt_tokens=(), plain=row.plain)
    prompt = list(encode(row.prompt))
    tokens = list(encode(case.text))
    return Trajectory(
        group=0,
        example=replace(example, prompt_tokens=prompt),
        sample=number,
        messages=[*row.messages, {"role": "assistant", "content": case.text}],
        text=case.text,
        tokens=[*prompt, *tokens],
        sampled=[False] * len(prompt) + [True] * len(tokens),
        logps=[0.0] * (len(prompt) + len(tokens)),
        kept_logps=[0.0] * (len(prompt) + len(tokens)),
        truncation_logps=[0.0] * (len(prompt) + len(tokens)),
        stop="stop",
        versions=[-1] * len(prompt) + [0] * len(tokens),
    )


def _telling(row: LabRow) -> LabRow:
    """Row whose prompt tells the answer."""
    told = f"{row.prompt}\nAnswer: {row.answer}"
    columns = {name: told if value == row.prompt else value for name, value in row.row.items()}
    return replace(row, row=columns, messages=[*row.messages[:-1], {**row.messages[-1], "content": told}])
