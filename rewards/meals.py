"""Rewards of the food assistant that sees: form, right lookups, sums of numbers that were read, right totals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rewards.tool_use import calls_of, final_text, readable

ANSWER = re.compile(r"kcal (\d{1,5}) protein (\d{1,4})")
NUMBER = re.compile(r"\d+")
MOST_CALLS = 6

Conversation = Sequence[Mapping[str, Any]]
Foods = Sequence[tuple[str, int]]


def formed(completions: Sequence[Conversation], **_: object) -> list[float]:
    """1 where every call could be read, there are at most six, and the end is an answer such as
    "kcal 262 protein 14"."""
    return [float(readable(one, MOST_CALLS) and _answer(one) is not None) for one in completions]


def looked_up(completions: Sequence[Conversation], foods: Sequence[Foods], **_: object) -> list[float]:
    """F1 of the foods with their counts that were looked up; a food that is looked up twice counts once as right.

    >>> made = {"role": "assistant", "tool_calls": [
    ...     {"function": {"name": "lookup_nutrition", "arguments": {"food": "egg", "count": 2}}}]}
    >>> looked_up([[made], [made, made], []], [[["egg", 2]]] * 3)
    [1.0, 0.6666666666666666, 0.0]
    """
    return [_f1(Counter(_lookups(one)), Counter((f, n) for f, n in drawn)) for one, drawn in _pairs(completions, foods)]


def sums(completions: Sequence[Conversation], foods: Sequence[Foods], **_: object) -> list[float]:
    """Share of the two totals that come from `add` of all numbers that the lookups gave, where several foods were
    drawn; for one food 1 without `add`."""
    return [_sums(one, len(drawn)) for one, drawn in _pairs(completions, foods)]


def right_totals(
    completions: Sequence[Conversation], kcal: Sequence[int], protein: Sequence[int], **_: object
) -> list[float]:
    """Mean of both numbers: 1 within 5 %, a half within 20 %, else 0; 0 for an answer without any lookup."""
    return [
        0.0 if (said := _answer(one)) is None or not _lookups(one) else (_near(said[0], k) + _near(said[1], p)) / 2
        for one, k, p in zip(completions, kcal, protein, strict=True)
    ]


def _pairs(completions: Sequence[Conversation], foods: Sequence[Foods]) -> Iterator[tuple[Conversation, Foods]]:
    return zip(completions, foods, strict=True)


def _lookups(completion: Conversation) -> list[tuple[Any, Any]]:
    arguments = [call["arguments"] for call in calls_of(completion) if call["name"] == "lookup_nutrition"]
    return [(_countable(one.get("food")), _countable(one.get("count"))) for one in arguments]


def _countable(value: Any) -> Any:
    """Value itself if it can be counted; else its text, which is no food."""
    return value if isinstance(value, str | int) else repr(value)


def _f1(made: Counter[Any], wanted: Counter[Any]) -> float:
    common = sum((made & wanted).values())
    return 2 * common / (made.total() + wanted.total()) if made or wanted else 1.0


def _sums(completion: Conversation, drawn: int) -> float:
    added = [call["arguments"].get("numbers") for call in calls_of(completion) if call["name"] == "add"]
    results = [m["content"] for m in completion if m["role"] == "tool" and str(m["content"]).startswith("kcal ")]
    if drawn == 1:
        return float(not added and len(results) == 1)
    columns = list(zip(*([int(n) for n in NUMBER.findall(str(text))[:2]] for text in results), strict=True))
    right = sum(added.count(list(column)) == 1 for column in columns) if len(added) <= 2 else 0
    return right / 2


def _answer(completion: Conversation) -> tuple[int, int] | None:
    found = ANSWER.fullmatch(final_text(completion).strip())
    return None if found is None else (int(found[1]), int(found[2]))


def _near(said: int, right: int) -> float:
    away = abs(said - right)
    return 1.0 if away <= max(0.05 * right, 0.5) else 0.5 if away <= 0.2 * right else 0.0
