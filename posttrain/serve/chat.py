"""Chat completions and responses: the same turns in the two forms of the OpenAI API, whole and as streams of events."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from posttrain.serve.body import Body, ChatAsk, chat_ask, chosen_tools, read_messages, wrong
from posttrain.serve.completions import DONE, Streaming
from posttrain.serve.model import Backend, Delta, Turns
from posttrain.serve.writing import Json, event, written
from posttrain.tools.types import ToolCall


def usage_of(num_prompt_tokens: int, ends: Sequence[Delta]) -> dict[str, Any]:
    """Token counts of an answer, from the last parts of its choices."""
    sampled = sum(end.num_tokens for end in ends)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": num_prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": min((end.num_cached for end in ends), default=0)},
    }


def wire_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Tool calls as the API returns them."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for call in calls
    ]


class ChatRequest:
    """Chat completion: the turns of a backend in the form of the API."""

    def __init__(self, body: Body):
        self.streaming = Streaming(body)
        self._ask = chat_ask(body)

    async def begin(self, backend: Backend) -> ChatAnswer:
        """Begin the turns. Refused for what cannot be answered."""
        turns = await backend.chat(self._ask)
        model = self._ask.model or backend.names[0]
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        return ChatAnswer(self._ask, turns, head, usage=self.streaming.usage)


class ChatAnswer:
    """Turns under way, as an answer or as events."""

    def __init__(self, ask: ChatAsk, turns: Turns, head: Mapping[str, Any], *, usage: bool):
        self._ask, self._turns, self._head, self._usage = ask, turns, head, usage

    async def close(self) -> None:
        await self._turns.close()

    async def whole(self) -> dict[str, Any]:
        """Answer with all choices."""
        parts: list[list[Delta]] = [[] for _ in range(self._ask.n)]
        async for deltas in self._turns.deltas:
            for delta in deltas:
                parts[delta.index].append(delta)
        return await written(self._completion, parts)

    def _completion(self, parts: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        ends = [choice[-1] for choice in parts]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in parts],
            "usage": usage_of(self._turns.num_prompt_tokens, ends),
        }

    def _choice(self, parts: Sequence[Delta]) -> dict[str, Any]:
        content, calls = "".join(part.content for part in parts), [call for part in parts for call in part.calls]
        thought = "".join(part.thought for part in parts)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = wire_calls(calls)
        entries = Json(f"[{','.join(part.logprobs for part in parts if part.logprobs)}]")
        logprobs = {"content": entries, "refusal": None} if self._ask.logprobs else None
        end = parts[-1]
        return {"index": end.index, "message": message, "logprobs": logprobs, "finish_reason": end.finish}

    async def events(self) -> AsyncIterator[str]:
        """Answer as events: pieces of content as they come, each tool call in one piece."""
        ends: list[Delta] = []
        numbers = [0] * self._ask.n
        for index in range(self._ask.n):
            yield self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
        async for deltas in self._turns.deltas:
            ends += [delta for delta in deltas if delta.finish is not None]
            if deltas:
                yield await written(self._chunks, deltas, numbers)
        if self._usage:
            usage = usage_of(self._turns.num_prompt_tokens, ends)
            yield event({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        yield DONE

    def _chunks(self, deltas: Sequence[Delta], numbers: list[int]) -> str:
        """Events of deltas. `numbers`: calls of each choice before, which is updated."""
        chunks = []
        for delta in deltas:
            piece: dict[str, Any] = {"content": delta.content} if delta.content else {}
            if delta.thought:
                piece["reasoning_content"] = delta.thought
            if delta.calls:
                first = numbers[delta.index]
                numbers[delta.index] += len(delta.calls)
                piece["tool_calls"] = [{"index": at, **call} for at, call in enumerate(wire_calls(delta.calls), first)]
            if piece or delta.logprobs:
                chunks.append(self._chunk(delta.index, piece, delta.logprobs))
            if delta.finish is not None:
                chunks.append(self._chunk(delta.index, {}, finish=delta.finish))
        return "".join(chunks)

    def _chunk(self, index: int, piece: Mapping[str, Any], entries: str = "", finish: str | None = None) -> str:
        logprobs = {"content": Json(f"[{entries}]"), "refusal": None} if entries else None
        choice = {"index": index, "delta": piece, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._usage else {}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage})


TEXTS = ("input_text", "output_text", "text")
"""Types of the parts of a message that are text."""


class ResponseRequest:
    """Response: one turn of a backend, as items."""

    def __init__(self, body: Body):
        self.streaming = Streaming(body)
        self._instructions = body.text("instructions")
        self._tools, self._choice = body.take("tools"), body.take("tool_choice")
        self._tools = [] if self._tools is None else self._tools
        self._temperature, self._top_p = body.number("temperature", 0.0, 100.0), body.number("top_p", 0.0, 1.0)
        tools, forced, strict = chosen_tools(_chat_tools(self._tools), self._choice)
        text = body.take("text") or {}
        self._format = text.get("format") if isinstance(text, Mapping) else None
        self._ask = ChatAsk(
            model=body.text("model"),
            messages=_messages(body.take("input"), self._instructions),
            field="input",
            tools=tools,
            forced=forced,
            strict=strict,
            parallel=body.flag("parallel_tool_calls", True),
            n=1,
            max_tokens=body.whole("max_output_tokens", 1),
            stop=(),
            logprobs=False,
            top_logprobs=0,
            body=body.with_fields(
                {"temperature": self._temperature, "top_p": self._top_p, "response_format": _chat_format(text)}
            ),
        )

    async def begin(self, backend: Backend) -> ResponseAnswer:
        """Begin the turn. Refused for what cannot be answered."""
        turns = await backend.chat(self._ask)
        fields = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "instructions": self._instructions,
            "max_output_tokens": self._ask.max_tokens,
            "model": self._ask.model or backend.names[0],
            "parallel_tool_calls": self._ask.parallel,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if self._temperature is None else self._temperature,
            "text": {"format": self._format or {"type": "text"}},
            "tool_choice": self._choice or "auto",
            "tools": self._tools,
            "top_p": 1.0 if self._top_p is None else self._top_p,
            "truncation": "disabled",
            "metadata": {},
        }
        return ResponseAnswer(turns, fields)


class ResponseAnswer:
    """Turn under way, as a response or as events."""

    def __init__(self, turns: Turns, fields: Mapping[str, Any]):
        self._turns, self._fields = turns, fields

    async def close(self) -> None:
        await self._turns.close()

    async def whole(self) -> dict[str, Any]:
        """Response with all items."""
        items = _Items()
        async for deltas in self._turns.deltas:
            for delta in deltas:
                items.add(delta)
        return self._response(items)

    async def events(self) -> AsyncIterator[str]:
        """Response as events: pieces of text as they come, each tool call in one piece."""
        items, numbers = _Items(), itertools.count()
        begun = self._response(items)
        for kind in ("response.created", "response.in_progress"):
            yield _event({"type": kind, "response": begun}, next(numbers))

        def events_of(deltas: Sequence[Delta]) -> str:
            return "".join(_event(one, next(numbers)) for delta in deltas for one in items.add(delta))

        async for deltas in self._turns.deltas:
            if deltas:
                yield await written(events_of, deltas)
        done = self._response(items)
        kind = "response.completed" if done["status"] == "completed" else "response.incomplete"
        yield await written(_event, {"type": kind, "response": done}, next(numbers))

    def _response(self, items: _Items) -> dict[str, Any]:
        """Response with the items so far."""
        cut = items.end is not None and items.end.finish == "length"
        usage = None
        if items.end is not None:
            counts = usage_of(self._turns.num_prompt_tokens, [items.end])
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            }
        return {
            **self._fields,
            "status": "in_progress" if items.end is None else "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items.done,
            "usage": usage,
        }


class _Items:
    """Output items while a turn is sampled: a message for each stretch of text, and the calls."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self.end: Delta | None = None
        self._message: dict[str, Any] | None = None
        self._text = ""

    def add(self, delta: Delta) -> Sequence[dict[str, Any]]:
        """Add a part of the turn, and return its events."""
        events: list[dict[str, Any]] = []
        if delta.content:
            events += self._say(delta.content)
        for call in delta.calls:
            events += [*self._close(), *self._call(call)]
        if delta.finish is not None:
            self.end = delta
            if not self.done and self._message is None:
                events += self._say("")  # an empty answer is one
            status = "incomplete" if delta.finish == "length" else "completed"
            events += self._close(status)
        return events

    def _say(self, text: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if self._message is None:
            self._message = {"id": _name("msg"), "type": "message", "role": "assistant", "status": "in_progress"}
            self._text = ""
            opened = {**self._message, "content": []}
            events.append({"type": "response.output_item.added", "output_index": len(self.done), "item": opened})
            events.append({"type": "response.content_part.added", **self._place, "part": _part("")})
        self._text += text
        if text:
            events.append({"type": "response.output_text.delta", **self._place, "delta": text, "logprobs": []})
        return events

    @property
    def _place(self) -> dict[str, Any]:
        assert self._message is not None
        return {"item_id": self._message["id"], "output_index": len(self.done), "content_index": 0}

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the message under way, if there is one."""
        if self._message is None:
            return []
        item = {**self._message, "status": status, "content": [_part(self._text)]}
        events = [
            {"type": "response.output_text.done", **self._place, "text": self._text, "logprobs": []},
            {"type": "response.content_part.done", **self._place, "part": _part(self._text)},
            {"type": "response.output_item.done", "output_index": len(self.done), "item": item},
        ]
        self.done.append(item)
        self._message = None
        return events

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        function = wire_calls([call])[0]["function"]
        item = {"id": _name("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
        place, arguments = {"item_id": item["id"], "output_index": len(self.done)}, function["arguments"]
        opened, done = item | {"arguments": "", "status": "in_progress"}, item | {"status": "completed", **function}
        self.done.append(done)
        return [
            {"type": "response.output_item.added", "output_index": place["output_index"], "item": opened},
            {"type": "response.function_call_arguments.delta", **place, "delta": arguments},
            {"type": "response.function_call_arguments.done", **place, **function},
            {"type": "response.output_item.done", "output_index": place["output_index"], "item": done},
        ]


def _name(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _event(value: Mapping[str, Any], number: int) -> str:
    numbered = {**value, "sequence_number": number}
    return f"event: {value['type']}\n{event(numbered)}"


def _chat_tools(tools: Any) -> list[dict[str, Any]]:
    """Tools in the form of chats. Refused for those that the server itself would have to run."""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise wrong("tools", "must be a list of functions")
    for tool in tools:
        if tool.get("type") != "function":
            raise wrong("tools", f"type {tool.get('type')!r} is not supported here; use functions")
    return [{"type": "function", "function": {key: tool[key] for key in tool if key != "type"}} for tool in tools]


def _chat_format(text: Any) -> Any:
    """Format of a response's text as chats have it."""
    if not isinstance(text, Mapping) or set(text) - {"format"}:
        raise wrong("text", "must be an object with a format alone")
    given = text.get("format")
    if isinstance(given, Mapping) and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {key: given[key] for key in given if key != "type"}}
    return given


def _messages(given: Any, instructions: str | None) -> list[Any]:
    """Messages of a request's input: text, or items, of which those of one assistant turn become one message."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise wrong("input", "must be text, or a list of items that is not empty")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for number, item in enumerate(items):
        _add_item(messages, item, f"input[{number}]")
    return read_messages(messages, "input")


def _add_item(messages: list[dict[str, Any]], item: Any, at: str) -> None:
    if not isinstance(item, Mapping):
        raise wrong("input", f"{at} must be an item with a type, or a message with role and content")
    kind = item.get("type", "message")
    if kind == "message":
        message = {"role": item.get("role"), "content": _content(item.get("content"), at)}
        messages.append(message)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item.get("output"), at)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    else:
        raise wrong("input", f"{at}: type {kind!r} is not supported here; use messages, calls and their outputs")


def _content(content: Any, at: str) -> Any:
    """Content as chats have it."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "input_image":
            held = {"url": part.get("image_url")} | {key: part[key] for key in part if key not in ("type", "image_url")}
            parts.append({"type": "image_url", "image_url": held})
            continue
        if kind not in TEXTS:
            raise wrong("input", f"{at}: a part of type {kind!r} is not supported here; use text and input_image")
        parts.append({"type": "text", "text": part.get("text")})
    return parts
