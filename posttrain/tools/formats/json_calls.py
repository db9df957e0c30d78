"""Formats whose calls are JSON: Hermes (Qwen), Llama 3, Mistral, DeepSeek V3 and Phi."""

from __future__ import annotations

import re
from collections.abc import Iterator

from posttrain.tools.formats.pieces import Call, Malformed, Piece, Schemas, call_of, calls_of, read_json, skip_space
from posttrain.tools.formats.python_calls import python_calls

ARGUMENTS = ("arguments", "parameters")
PARAMETERS = ("parameters", "arguments")


def read_hermes(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Hermes, as of Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, several in a row."""
    yield from _tagged(text, "<tool_call>", "</tool_call>")


def read_phi(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Phi-4-mini: <|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>, or functools[...]."""
    if "functools[" in text and "<|tool_call|>" not in text:
        before, _, _ = text.partition("functools[")
        yield before
        yield from _list(text, len(before) + len("functools"))
    else:
        yield from _tagged(text, "<|tool_call|>", "<|/tool_call|>")


def read_mistral(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}], from Small 3.1 on
    [TOOL_CALLS]name[ARGS]{...} for each call, with [CALL_ID] before [ARGS] in some versions."""
    before, *parts = text.split("[TOOL_CALLS]")
    yield before
    if not parts:
        return
    rest = "[TOOL_CALLS]".join(parts)
    if rest.lstrip()[:1] in ("[", "{"):
        yield from _list(rest, 0)
    else:
        yield from _named(rest)


def read_llama3(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Llama 3: a turn {"name": ..., "parameters": {...}}, several separated by `;`, or after <|python_tag|>, where
    built-in tools are name.call(key="value")."""
    before, tag, body = text.partition("<|python_tag|>")
    if not tag:
        before, body = "", text
    body = body.removesuffix("<|eom_id|>").removesuffix("<|eot_id|>")
    if body.lstrip()[:1] == "{":
        if not tag and not LLAMA_CALL.match(body):
            yield text
            return
        yield before
        yield from _separated(body)
    elif tag:
        yield before
        yield from python_calls(body, schemas)
    else:
        yield text


def read_deepseek(text: str, schemas: Schemas) -> Iterator[Piece]:
    """DeepSeek: V3.1 writes name, separator and JSON between its marks; V3 and R1 a type, separator, name, and JSON in
    a fence."""
    first, *calls = text.replace("<｜tool▁calls▁begin｜>", "").split("<｜tool▁call▁begin｜>")
    yield first
    for written in calls:
        body, end, after = written.partition("<｜tool▁call▁end｜>")
        head, separator, tail = body.partition("<｜tool▁sep｜>")
        if not end or not separator:
            yield Malformed(f"a call must have <｜tool▁sep｜> and end with <｜tool▁call▁end｜>: {head[:60]!r}")
            continue
        fence = DEEPSEEK_FENCE.match(tail)
        name, source = (fence["name"], fence["json"]) if fence else (head, tail)
        yield from _call_with_name(name, source)
        yield after.partition("<｜tool▁calls▁end｜>")[2]


LLAMA_CALL = re.compile(r'\s*\{\s*"(type|name|parameters|arguments|function)"\s*:')
DEEPSEEK_FENCE = re.compile(r"(?P<name>[^\n]+)\n```json\n(?P<json>.*?)\n?```\s*$", re.DOTALL)


def _tagged(text: str, opening: str, closing: str) -> Iterator[Piece]:
    """Text with JSON calls between tags. A tag inside a string of the JSON does not end the call."""
    position = 0
    while (begin := text.find(opening, position)) >= 0:
        yield text[position:begin]
        start = begin + len(opening)
        found = read_json(text, start)
        if isinstance(found, Malformed):
            yield found
        else:
            end = skip_space(text, found[1])
            if text.startswith(closing, end):
                yield from calls_of(found[0], ARGUMENTS)
                position = end + len(closing)
                continue
            yield Malformed(f"a call must end with {closing}")
        close, again = text.find(closing, start), text.find(opening, start)
        if close >= 0 and (again < 0 or close < again):
            position = close + len(closing)
        else:
            position = again if again >= 0 else len(text)
    yield text[position:]


def _list(text: str, start: int) -> Iterator[Piece]:
    """List of calls, and the text after it."""
    found = read_json(text, start)
    if isinstance(found, Malformed):
        yield found
        return
    yield from calls_of(found[0], ARGUMENTS)
    yield text[found[1] :]


def _separated(text: str) -> Iterator[Piece]:
    """JSON calls one after another, separated by semicolons, commas or white space."""
    position = 0
    while position < len(text):
        found = read_json(text, position)
        if isinstance(found, Malformed):
            yield found
            return
        value, end = found
        function = value.get("function") if isinstance(value, dict) else None
        yield call_of(function if isinstance(function, dict) else value, PARAMETERS)
        position = end + len(text[end:]) - len(text[end:].lstrip(";, \t\r\n"))


def _named(text: str) -> Iterator[Piece]:
    """Calls of the form name[ARGS]{...}, with [TOOL_CALLS] between them."""
    for written in text.split("[TOOL_CALLS]"):
        head, separator, source = written.partition("[ARGS]")
        if not separator:
            yield Malformed(f"a call must have [ARGS] between name and arguments: {head[:60]!r}")
            continue
        name, _, identifier = head.partition("[CALL_ID]")
        for piece in _call_with_name(name, source):
            if isinstance(piece, Call) and identifier.strip():
                yield Call(piece.name, piece.arguments, identifier.strip())
            else:
                yield piece


def _call_with_name(name: str, source: str) -> Iterator[Piece]:
    """Call whose name stands outside of the JSON of its arguments."""
    found = read_json(source, 0)
    if isinstance(found, Malformed):
        yield found
        return
    yield call_of({"name": name.strip(), "arguments": found[0]}, ARGUMENTS)
    rest = source[found[1] :]
    if rest.strip():
        yield rest
