"""Rewards of the food assistant for photographs: form, the right dish looked up, and what the tool says of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.food101 import DISHES, values_of
from rewards.tool_use import calls_of, final_text, readable

ANSWER = re.compile(r"(?P<dish>[a-z ]+): (?P<values>unknown|kcal \d{1,4} protein \d{1,3})")
MOST_CALLS = 3

Conversation = Sequence[Mapping[str, Any]]


def formed(completions: Sequence[Conversation], **_: object) -> list[float]:
    """1 where every call could be read, there are at most three, and the end is a line such as
    "hot dog: kcal 247 protein 11" or "baklava: unknown"."""
    return [float(readable(one, MOST_CALLS) and _answer(one) is not None) for one in completions]


def looked_up(completions: Sequence[Conversation], label: Sequence[int], **_: object) -> list[float]:
    """1 where the dish of the photograph was looked up, over the number of lookups.

    >>> made = {"role": "assistant", "tool_calls": [
    ...     {"function": {"name": "lookup_dish", "arguments": {"dish": "waffles"}}}]}
    >>> looked_up([[made], [made, made], [made], []], [100, 100, 0, 100])
    [1.0, 0.5, 0.0, 0.0]
    """
    found = []
    for one, number in zip(completions, label, strict=True):
        names = [call["arguments"].get("dish") for call in calls_of(one) if call["name"] == "lookup_dish"]
        found.append(float(DISHES[number] in names) / max(1, len(names)))
    return found


def answered(completions: Sequence[Conversation], label: Sequence[int], **_: object) -> list[float]:
    """1 for the right dish with what the tool says of it, a half for the right dish; 0 without a lookup."""
    found = []
    for one, number in zip(completions, label, strict=True):
        dish, said = DISHES[number], _answer(one)
        right = said is not None and said[0] == dish and any(calls_of(one))
        found.append(0.0 if not right else 1.0 if said == (dish, values_of(dish)) else 0.5)
    return found


def _answer(completion: Conversation) -> tuple[str, str] | None:
    lines = final_text(completion).strip().lower().splitlines()
    found = ANSWER.fullmatch(lines[-1].strip()) if lines else None
    return None if found is None else (found["dish"], found["values"])
