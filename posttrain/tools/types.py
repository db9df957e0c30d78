"""Tool calls: Tool, ToolCall, ParsedTurn, ToolFormat, and the results of calls as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """Call of a tool, as a model wrote it."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """Assistant turn split into its text and its tool calls."""

    content: str
    """Text without the calls."""
    calls: Sequence[ToolCall] = ()
    malformed: Sequence[str] = ()
    """One line for each call that cannot be read, for the model to learn from."""


@runtime_checkable
class Tool(Protocol):
    """Function that the policy can call."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema as chat templates take it: {"type": "function", "function": {...}}."""
        ...

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Text of the result, within deadline and size limit; errors of the function are text as well, a
        `posttrain.tools.types.FailedCall`."""
        ...

    def close(self) -> None:
        """Release what the tool holds; a later call opens it again."""
        ...


@runtime_checkable
class ToolFormat(Protocol):
    """Format in which a family of models writes tool calls."""

    def parse(self, text: str) -> ParsedTurn:
        """Parse an assistant turn, decoded with its special tokens but without its stop token."""
        ...


FormatMaker = Callable[[Sequence[Mapping[str, Any]]], ToolFormat]
"""Maker of the format for tools of these schemas."""


class FailedCall(str):
    """Text of a call that failed: the model reads it as any other result, and environments count it."""

    __slots__ = ()


def failed(reason: str, max_chars: int) -> FailedCall:
    """Make the text of a failed call, one line of at most `max_chars` characters."""
    return FailedCall(cut(f"Error: {' '.join(reason.split())}", max_chars))


def result_text(value: Any, max_chars: int) -> str:
    """Convert the result of a tool: a string as it is, everything else to JSON, cut to `max_chars` characters.

    TypeError or ValueError for a value that has no form in JSON.
    """
    if isinstance(value, str):
        return cut(value, max_chars)
    return cut(json.dumps(value, ensure_ascii=False, allow_nan=False), max_chars)


def cut(text: str, max_chars: int) -> str:
    """Cut a text to `max_chars` characters, followed by a line that says so. Text that is no Unicode is replaced."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: {max_chars} of {len(text)} characters]"
