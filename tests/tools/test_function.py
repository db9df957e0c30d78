"""Tools of Python functions: schemas, validated arguments, results as text, deadlines, errors as messages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest

from posttrain.errors import ConfigError
from posttrain.tools.function import FunctionTool, function_schema
from posttrain.tools.types import FailedCall, Tool, argument_error


def lookup(food: str, nutrient: Literal["fat", "water"], grams: float = 100.0, tags: list[str] | None = None) -> Any:
    """Look a food up.

    Args:
        food: Name of the food.
        nutrient: Nutrient to look up.
        grams: Weight in grams.
        tags: Labels.
    """
    if food == "error":
        raise KeyError("no such\nfood")
    if food == "exit":
        raise SystemExit(2)
    if food == "text":
        return "0.93 g of é"
    if food == "long":
        return "a" * 300
    if food == "object":
        return object()
    return {"food": food, nutrient: grams}


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: Time.
    """
    await asyncio.sleep(seconds)
    return "done"


def make(function: Callable[..., Any], timeout_s: float = 20.0, max_chars: int = 200) -> FunctionTool:
    return FunctionTool(function, timeout_s=timeout_s, max_chars=max_chars)


def call(tool: Tool, arguments: Mapping[str, Any]) -> str:
    return asyncio.run(tool(arguments))  # type: ignore[arg-type]


def test_the_schema_is_that_of_the_signature_and_docstring() -> None:
    tool = make(lookup)
    assert isinstance(tool, Tool)
    function = tool.schema["function"]
    assert (tool.name, function["description"], tool.schema["type"]) == ("lookup", "Look a food up.", "function")
    assert function["parameters"]["required"] == ["food", "nutrient"]
    nutrient = {"type": "string", "enum": ["fat", "water"], "description": "Nutrient to look up."}
    assert function["parameters"]["properties"]["nutrient"] == nutrient


def untyped(x):  # type: ignore[no-untyped-def]
    """Take x."""


def undescribed(x: int) -> None:
    """Take x."""


def starred(*x: int) -> None:
    """Take x."""


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (untyped, "tools: untyped has no schema: Argument x is missing a type hint"),
        (undescribed, "tools: undescribed has no schema: .*give every parameter a type, and a line under `Args:`"),
        (starred, r"tools: starred takes \*x, which has no schema"),
    ],
)
def test_functions_without_a_schema_are_refused(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        function_schema(function)


SIGNATURE = "arguments are food, nutrient, grams (optional), tags (optional)"
UNKNOWN = {"food": "k", "nutrient": "fat", "gram": 1}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"food": "kale", "nutrient": "fat"}, '{"food": "kale", "fat": 100.0}'),
        ({"food": "text", "nutrient": "fat", "grams": 3, "tags": None}, "0.93 g of é"),
        ({"food": "long", "nutrient": "fat"}, "a" * 200 + "\n[cut: 200 of 300 characters]"),
        ({"food": "error", "nutrient": "fat"}, "Error: KeyError: 'no such\\nfood'"),
        ({"food": "exit", "nutrient": "fat"}, "Error: RuntimeError: SystemExit: 2"),
        ({"food": "object", "nutrient": "fat"}, "Error: TypeError: Object of type object is not JSON serializable"),
        ({"food": "kale"}, f"Error: missing argument nutrient; {SIGNATURE}"),
        (UNKNOWN, f"Error: unknown argument 'gram'; did you mean 'grams'?; {SIGNATURE}"),
        ({"food": 3, "nutrient": "fat"}, "Error: food must be of type string, got 3"),
        ({"food": "k", "nutrient": "salt"}, 'Error: nutrient must be one of ["fat", "water"], got "salt"'),
        ({"food": "k", "nutrient": "fat", "grams": True}, "Error: grams must be of type number, got true"),
        ({"food": "k", "nutrient": "fat", "tags": ["a", 1]}, "Error: tags[1] must be of type string, got 1"),
    ],
)
def test_calls(arguments: dict[str, Any], text: str) -> None:
    """Errors are text that names what to change. Red if an exception leaves the tool."""
    made = call(make(lookup), arguments)
    assert made == text
    assert isinstance(made, FailedCall) == text.startswith("Error: ")


def test_a_call_past_its_deadline_is_answered() -> None:
    """Of a function, which is left behind, and of coroutines: one that waits is cancelled, one that blocks its event
    loop does not keep later calls from their answers."""
    release = threading.Event()

    def block(seconds: int) -> None:
        """Block.

        Args:
            seconds: Time.
        """
        release.wait()

    before = threading.active_count()
    tool = make(block, timeout_s=0.05)
    assert call(tool, {"seconds": 1}) == "Error: block took longer than 0.05 seconds"
    release.set()
    waiting = make(wait, timeout_s=0.7)
    assert call(waiting, {"seconds": 60.0}) == "Error: wait took longer than 0.7 seconds"
    assert call(waiting, {"seconds": 0.0}) == "done", "of another event loop"
    waiting.close()

    release.clear()

    async def stall(seconds: int) -> str:
        """Block where it should wait.

        Args:
            seconds: 0: answer.
        """
        return "blocked" if seconds and release.wait() else "answered"

    stalling = make(stall, timeout_s=0.7)

    async def several() -> list[str]:
        return list(await asyncio.gather(*(stalling({"seconds": int(i == 1)}) for i in range(3))))

    late = "Error: stall took longer than 0.7 seconds"
    for _ in range(2):
        assert asyncio.run(several()) == ["answered", late, "answered"]
    release.set()
    stalling.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_calls_run_at_the_same_time() -> None:
    """Red with calls one after the other: the second is never reached."""
    both = threading.Barrier(2, timeout=10)

    def meet(number: int) -> int:
        """Meet the other.

        Args:
            number: One's own.
        """
        both.wait()
        return number

    tool = make(meet)

    async def pair() -> list[str]:
        return list(await asyncio.gather(tool({"number": 1}), tool({"number": 2})))

    assert asyncio.run(pair()) == ["1", "2"]


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        ({"type": "integer"}, 2, True),
        ({"type": "integer"}, 2.0, False),
        ({"type": ["integer", "string"]}, "a", True),
        ({"type": "string", "nullable": True}, None, True),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, [1, 2], True),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, [1, "a"], False),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], True),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, ["a"], False),
        ({"type": "object", "additionalProperties": {"type": "number"}}, {"a": 1.5}, True),
        ({"type": "object", "additionalProperties": {"type": "number"}}, {"a": "b"}, False),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, {}, False),
        ({"$ref": "#/$defs/Food"}, {"anything": 1}, True),
        ({"const": 3}, 3, True),
        ({"enum": [1]}, True, False),
    ],
)
def test_values_are_checked_as_json_schema_does(schema: dict[str, Any], value: Any, fits: bool) -> None:
    fault = argument_error({"x": value}, {"type": "object", "properties": {"x": schema}})
    assert (fault is None) == fits
