"""Assistant message of a sampled turn."""

from __future__ import annotations

from posttrain.data.chat import Message
from posttrain.data.tokenizer import Tokenizer
from posttrain.rollout.types import Completion, SamplingParams, text_of
from posttrain.tools.types import ToolFormat


def message_of(
    completion: Completion, tokenizer: Tokenizer, params: SamplingParams, tool_format: ToolFormat | None
) -> tuple[Message, str]:
    """Message of a turn, with its tool calls where a format is given, and its text."""
    decode, ends, stops = tokenizer.decode, params.ends, params.stop
    text = text_of(decode, completion.tokens, ends, stops)
    if tool_format is None:
        return {"role": "assistant", "content": text}, text
    raw = text_of(lambda tokens: decode(tokens, skip_special_tokens=False), completion.tokens, ends, stops)
    turn = tool_format.parse(raw)
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in turn.calls
        ]
    if turn.malformed:
        message["malformed_calls"] = list(turn.malformed)
    return message, text
