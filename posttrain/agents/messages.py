"""Messages of the OpenAI chat API, to and from the messages that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.chat import Message
from posttrain.data.format import checked_messages
from posttrain.errors import ConfigError


def from_wire(messages: Any) -> list[Message]:
    """Messages as templates take them: text parts are joined, arguments of tool calls are mappings. ConfigError for
    what is no conversation that ends before an assistant turn."""
    if not isinstance(messages, list):
        raise ConfigError("messages must be a list")
    checked = checked_messages([_plain(message, at) for at, message in enumerate(messages)], "messages")
    if checked[-1]["role"] == "assistant":
        raise ConfigError("messages must end before the assistant turn to sample")
    return checked


def to_wire(message: Message) -> dict[str, Any]:
    """Assistant message as the API returns it."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    content = message.get("content") or (None if calls else "")
    return {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}


def same_history(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Tell whether two histories say the same."""
    return len(one) == len(other) and all(_said(a) == _said(b) for a, b in zip(one, other, strict=True))


def _plain(message: Any, at: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConfigError(f"messages[{at}] must be a mapping with role and content")
    fields = {name: value for name, value in message.items() if value is not None}
    content = fields.get("content", "")
    if isinstance(content, list):
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise ConfigError(f"messages[{at}].content: parts must be of type text")
        content = "".join(str(part.get("text", "")) for part in content)
    fields["content"] = content
    if "tool_calls" in fields:
        fields["tool_calls"] = [_call(call, at) for call in fields["tool_calls"]]
    return fields


def _call(call: Any, at: int) -> dict[str, Any]:
    try:
        function = dict(call["function"])
        arguments = function.get("arguments", {})
        function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"messages[{at}].tool_calls: {call!r} is no call with JSON arguments") from error
    return {**call, "function": function}


def _said(message: Message) -> tuple[Any, ...]:
    calls = [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return message["role"], message.get("content") or "", calls, message.get("tool_call_id")
