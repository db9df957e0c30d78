"""Rewards of tool use, on conversations whose score is plain."""

from __future__ import annotations

from typing import Any

import pytest

from rewards import tool_use

LOOKUP = {"name": "lookup", "arguments": {"food": "KALE,RAW", "nutrient": "fat"}}
OTHER = {"name": "lookup", "arguments": {"food": "KALE,RAW", "nutrient": "iron"}}


def turn(*functions: dict[str, Any], text: str = "", malformed: tuple[str, ...] = ()) -> dict[str, Any]:
    calls = [{"type": "function", "id": "a", "function": function} for function in functions]
    return {"role": "assistant", "content": text, "tool_calls": calls, "malformed_calls": list(malformed)}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": "lookup", "tool_call_id": "a"}


@pytest.mark.parametrize(
    ("made", "expected", "score"),
    [
        ([turn(LOOKUP)], [LOOKUP], 1.0),
        ([turn(), turn(LOOKUP)], [LOOKUP], 1.0),
        ([turn({"name": "lookup", "arguments": {"food": "kale, raw", "nutrient": "fat"}})], [LOOKUP], 1.0),
        ([turn(LOOKUP, OTHER)], [OTHER, LOOKUP], 1.0),
        ([turn(LOOKUP, LOOKUP)], [LOOKUP], 0.5),
        ([turn(LOOKUP)], [LOOKUP, LOOKUP], 0.5),
        ([turn(OTHER)], [LOOKUP], 0.0),
        ([turn({**LOOKUP, "name": "look"})], [LOOKUP], 0.0),
        ([turn()], [LOOKUP], 0.0),
        ([turn()], [], 1.0),
        (
            [turn({"name": "f", "arguments": {"a": 1.0, "b": True}})],
            [{"name": "f", "arguments": {"a": 1, "b": 1}}],
            0.0,
        ),
        ([turn({"name": "f", "arguments": {"a": [1, "x"]}})], [{"name": "f", "arguments": {"a": [1.0, "X"]}}], 1.0),
        ([turn(LOOKUP)], [{"name": "lookup", "arguments": {**LOOKUP["arguments"], "unit": None}}], 1.0),
        ([turn({"name": "f", "arguments": {"a": "-"}})], [{"name": "f", "arguments": {"a": "+"}}], 0.0),
    ],
)
def test_right_calls(made: list[dict[str, Any]], expected: list[dict[str, Any]], score: float) -> None:
    """Calls repeated for luck lower the score: red if only expected calls are counted."""
    assert tool_use.right_calls([made], [expected]) == [score]


def test_calls_that_can_be_read_and_succeed() -> None:
    conversations = [
        [turn(LOOKUP), result("1 g"), result("Error: no food")],
        [turn(malformed=("{",))],
        [turn(text="2")],
    ]
    assert tool_use.well_formed(conversations) == [1.0, 0.0, 1.0]
    assert tool_use.successful(conversations) == [0.5, None, None]


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("0.93", "0.93", 1.0),
        ("It has 0.9299 g in 100 g.\nAnswer: 0.9299 g", 0.93, 1.0),
        ("0.93 g in 100 g", "0.93", 0.0),
        ("Answer: 1,200 kcal", 1200, 1.0),
        ("answer : -3e2", -300, 1.0),
        ("Answer: 5\nAnswer: 6", "6", 1.0),
        ("0.005", 0, 1.0),
        ("none", 1, 0.0),
        ("", 0, 0.0),
    ],
)
def test_right_number(text: str, answer: str | float, score: float) -> None:
    assert tool_use.right_number([[turn(LOOKUP), result("7 g"), {"role": "assistant", "content": text}]], [answer]) == [
        score
    ]


def test_a_conversation_that_ends_with_a_call_has_no_number() -> None:
    unfinished = [[turn(LOOKUP, text="7")], [turn(LOOKUP), result("7")], []]
    assert tool_use.right_number(unfinished, [7, 7, 7]) == [0.0, 0.0, 0.0]
