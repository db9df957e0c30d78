"""Rewards of conversations with tools: right calls, calls that can be read and that succeed, a right final number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")
ANSWER = re.compile(r"answer\s*:", re.IGNORECASE)

Conversation = Sequence[Mapping[str, Any]]


def right_calls(
    completions: Sequence[Conversation], calls: Sequence[Sequence[Mapping[str, Any]]], **_: object
) -> list[float]:
    """Share of right tool calls: those in column `calls` that are made, over the larger of the numbers of calls
    expected and made. Each item of the column is {"name": ..., "arguments": {...}}; their order does not matter, and
    texts are equal if their letters and digits are.

    >>> expected = [{"name": "add", "arguments": {"a": 1, "b": 2}}]
    >>> made = {"role": "assistant", "tool_calls": [{"function": expected[0]}]}
    >>> right_calls([[made], [made, made], []], [expected] * 3)
    [1.0, 0.5, 0.0]
    """
    return [_share(list(calls_of(one)), list(wanted)) for one, wanted in zip(completions, calls, strict=True)]


def well_formed(completions: Sequence[Conversation], **_: object) -> list[float]:
    """1 where every tool call could be read."""
    return [float(not any(message.get("malformed_calls") for message in one)) for one in completions]


def successful(completions: Sequence[Conversation], **_: object) -> list[float | None]:
    """Share of tool results that are no errors; None without any."""
    results = [[str(m["content"]) for m in one if m["role"] == "tool"] for one in completions]
    return [sum(not text.startswith("Error: ") for text in one) / len(one) if one else None for one in results]


def right_number(
    completions: Sequence[Conversation], answer: Sequence[str | float], *, tolerance: float = 0.01, **_: object
) -> list[float]:
    """1 where the conversation ends with a message whose number is that of column `answer`, within the relative
    tolerance. The number is the first after the last "Answer:", else the last one.

    >>> ends = [[{"role": "assistant", "content": text}] for text in ("2 x 3.5 = 7.01", "Answer: 7 g of 100", "8")]
    >>> right_number(ends, [7, "7.0", 7])
    [1.0, 1.0, 0.0]
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance} must be at least 0: with less no number is right")
    found = [final_number(final_text(one)) for one in completions]
    pairs = zip(found, map(float, answer), strict=True)
    return [float(made is not None and abs(made - right) <= tolerance * (abs(right) or 1.0)) for made, right in pairs]


def calls_of(completion: Conversation) -> Iterator[Mapping[str, Any]]:
    """Functions that a conversation called, with name and arguments."""
    for message in completion:
        yield from (call["function"] for call in message.get("tool_calls") or ())


def final_text(completion: Conversation) -> str:
    """Text of the last message; empty if that is no answer, but a tool call or its result."""
    last = completion[-1] if completion else {}
    return str(last.get("content") or "") if last.get("role") == "assistant" and not last.get("tool_calls") else ""


def readable(completion: Conversation, most_calls: int) -> bool:
    """True where every tool call could be read and there are at most `most_calls`."""
    malformed = any(message.get("malformed_calls") for message in completion)
    return not malformed and sum(1 for _ in calls_of(completion)) <= most_calls


def final_number(text: str) -> float | None:
    """Number after the last "Answer:", else the last number."""
    marks = list(ANSWER.finditer(text))
    found = NUMBER.findall(text[marks[-1].end() :] if marks else text)
    return float(found[0 if marks else -1].replace(",", "")) if found else None


def _share(made: list[Mapping[str, Any]], expected: list[Mapping[str, Any]]) -> float:
    missing, right = list(expected), 0
    for call in made:
        match = next((i for i, wanted in enumerate(missing) if _same_call(call, wanted)), None)
        if match is not None:
            del missing[match]
            right += 1
    most = max(len(made), len(expected))
    return right / most if most else 1.0


def _same_call(call: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    # Columns of a table hold every key in every row.
    arguments = {key: value for key, value in wanted["arguments"].items() if value is not None}
    return bool(call["name"] == wanted["name"]) and _same(call["arguments"], arguments)


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(value, Mapping) and isinstance(wanted, Mapping):
        return value.keys() == wanted.keys() and all(_same(value[key], wanted[key]) for key in wanted)
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    if isinstance(value, str) and isinstance(wanted, str):
        return value == wanted or (bool(_key(value)) and _key(value) == _key(wanted))
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def _key(text: str) -> str:
    return "".join(character for character in text.casefold() if character.isalnum())
