"""Environment of tools: answers the tool calls of a turn, until a turn has none."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from posttrain.data.messages import Message
from posttrain.environments.types import Reply
from posttrain.errors import ConfigError, did_you_mean
from posttrain.tools.types import FailedCall, Tool

MAX_CALLS = 32
"""Maximum number of calls of a turn that are made."""


class ToolEnv:
    """Environment that makes the tool calls of each turn, concurrently, and answers each with a message.

    Malformed calls are answered with their error. A turn without calls ends the conversation. Metrics: `tool_calls`,
    `tool_failures` (unknown tools, invalid arguments, exceptions, deadlines) and `malformed_calls`.
    """

    def __init__(self, tools: Sequence[Tool]):
        self.tools = tools
        self._by_name = by_name(tools)

    async def reply(self, message: Message) -> Reply:
        calls, malformed = message.get("tool_calls") or [], message.get("malformed_calls") or []
        answered = calls[:MAX_CALLS]
        results = await asyncio.gather(*(self._call(call["function"]) for call in answered))
        left_out = len(calls) - len(answered)
        results += [FailedCall(f"Error: not called; a turn has at most {MAX_CALLS} calls")] * left_out
        messages = [
            tool_message(call["id"], call["function"]["name"], text) for call, text in zip(calls, results, strict=True)
        ]
        messages += [malformed_message(index, line) for index, line in enumerate(malformed)]
        return Reply(
            messages=messages,
            done=not messages,
            metrics={
                "tool_calls": float(len(calls)),
                "tool_failures": float(sum(isinstance(text, FailedCall) for text in results)),
                "malformed_calls": float(len(malformed)),
            },
        )

    async def _call(self, function: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        name = function["name"]
        if name not in self._by_name:
            near = did_you_mean(name, self._by_name)
            return FailedCall(f"Error: no tool {name!r}{near}; tools are {', '.join(self._by_name)}")
        return await self._by_name[name](function["arguments"])


def by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Index tools by name. ConfigError if two have the same."""
    index: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in index:
            raise ConfigError(f"tools: two tools are named {tool.name}; rename one of them")
        index[tool.name] = tool
    return index


def tool_message(call_id: str, name: str, result: str | list[dict[str, Any]]) -> Message:
    """Message with the result of a call: its text, or its parts."""
    message = {"role": "tool", "tool_call_id": call_id, "name": name, "content": result}
    return cast(Message, message)


def malformed_message(index: int, line: str) -> Message:
    """Message about a call that cannot be read, with an identifier as templates that check them want it."""
    call_id = hashlib.sha256(f"{index} {line}".encode("utf-8", "replace")).hexdigest()[:9]
    return {"role": "tool", "tool_call_id": call_id, "name": "malformed_call", "content": f"Error: {line}"}
