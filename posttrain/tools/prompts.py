"""Tools in conversations of chat templates that do not know them: descriptions in the prompt, calls and results as
text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from posttrain.data.chat import Renderer
from posttrain.data.messages import Message
from posttrain.data.tokenizer import Tokenizer
from posttrain.tools.formats import format_name, write_calls
from posttrain.tools.readers import WrittenCall

PROBE = "posttrain_probe_of_tools"
RESULTS = {"gemma": "```tool_output\n{}\n```"}
"""Form of a result, by format; in others it stands in <tool_response>."""
Tools = Sequence[dict[str, Any]]


class ToolText:
    """Conversion of conversations with tools for a chat template without them.

    The first message begins, after a system message ends, with the tools and the form of calls; calls are text of the
    assistant message, and results, those of a turn together, a user message. Where the template writes tools itself,
    conversations are unchanged.
    """

    def __init__(self, tokenizer: Tokenizer, tool_format: str):
        self._tokenizer, self._given = tokenizer, tool_format

    def __call__(self, messages: Sequence[Message], tools: Tools) -> tuple[Sequence[Message], Tools | None]:
        """Convert messages; also returns the tools that the template is given."""
        if self._template_writes_tools:
            return messages, tools
        converted = self._joined(messages)
        return [self._described(converted[0], tools), *converted[1:]] if converted else [], None

    @cached_property
    def _template_writes_tools(self) -> bool:
        parameters = {"type": "object", "properties": {}, "required": []}
        function = {"name": PROBE, "description": PROBE, "parameters": parameters}
        asked: Message = {"role": "user", "content": "?"}
        plain = Renderer(self._tokenizer, chat=True)
        return PROBE in plain.rendered([asked], [{"type": "function", "function": function}], reply=True)

    @cached_property
    def _format(self) -> str:
        return format_name(self._given, self._tokenizer)

    def _described(self, message: Message, tools: Tools) -> Message:
        schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        form = write_calls(self._format, [WrittenCall("NAME", {"ARGUMENT": "VALUE"})])
        text = f"You can call these functions:\n{schemas}\nTo call functions, write only calls, in this form:\n{form}"
        content = message.get("content", "")
        return {**message, "content": f"{content}\n\n{text}" if message["role"] == "system" else f"{text}\n\n{content}"}

    def _joined(self, messages: Sequence[Message]) -> list[Message]:
        joined: list[Message] = []
        in_results = False
        for message in messages:
            if message["role"] != "tool":
                joined.append(self._with_calls(message))
            else:
                result = RESULTS.get(self._format, "<tool_response>\n{}\n</tool_response>")
                text = result.replace("{}", str(message.get("content", "")))
                if in_results:
                    text = f"{joined.pop()['content']}\n{text}"
                joined.append({"role": "user", "content": text})
            in_results = message["role"] == "tool"
        return joined

    def _with_calls(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if not calls:
            return message
        functions: list[Mapping[str, Any]] = [call["function"] for call in calls]
        written = write_calls(self._format, [WrittenCall(one["name"], dict(one["arguments"])) for one in functions])
        content = message.get("content", "")
        return {"role": message["role"], "content": f"{content}\n{written}" if content else written}
