"""Tool calls: Tool, ToolCall, ParsedTurn, ToolFormat."""

from __future__ import annotations

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
        `posttrain.tools.results.FailedCall`."""
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
