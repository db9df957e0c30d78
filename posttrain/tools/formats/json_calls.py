"""Formats whose calls are JSON: Hermes (Qwen), Llama 3, Mistral, DeepSeek V3 and Phi."""

from __future__ import annotations

import re
from collections.abc import Iterator

from posttrain.tools.formats.pieces import (
    SHOWN,
    Call,
    Malformed,
    Piece,
    Schemas,
    call_of,
    calls_of,
    read_json,
    shown,
    skip_space,
)
from posttrain.tools.formats.python_calls import python_calls

ARGUMENTS = ("arguments", "parameters")
PARAMETERS = ("parameters", "arguments")


def read_hermes(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Hermes, as of Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, several in a row."""
    yield from _tagged(text, "<tool_call>", "</tool_call>")


def read_phi(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Phi-4-mini: <|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>, or functools[...]."""
    before, listed, _ = text.partition("functools[")
    if listed and "<|tool_call|>" not in before:
        yield before
        yield from _list(text, len(before) + len("functools"))
    else:
        yield from _tagged(text, "<|tool_call|>", "<|/tool_call|>")


def read_mistral(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}], from Small 3.1 on
    [TOOL_CALLS]name[ARGS]{...} for each call, with [CALL_ID] before [ARGS] in some versions."""
    before, tag, rest = text.partition("[TOOL_CALLS]")
    yield before
    if rest.lstrip()[:1] in ("[", "{"):
        yield from _list(rest, 0)
    elif tag:
        yield from _named(rest)


def read_llama3(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Llama 3: a turn {"name": ..., "parameters": {...}}, several separated by `;`, or after <|python_tag|>, where
    built-in tools are name.call(key="value")."""
    before, tag, body = "", "", text
    if not LLAMA_CALL.match(text) and "<|python_tag|>" in text:
        before, tag, body = text.partition("<|python_tag|>")
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
    begin = text.find(DEEPSEEK_CALL)
    yield (text if begin < 0 else text[:begin]).replace("<｜tool▁calls▁begin｜>", "")
    while begin >= 0:
        start = begin + len(DEEPSEEK_CALL)
        call, stop = _headed(text, start, DEEPSEEK_HEAD, DEEPSEEK_FORM)
        end = DEEPSEEK_END.match(text, stop) if isinstance(call, Call) else None
        if end is not None:
            yield call
            stop = end.end()
        else:
            near = shown(text[stop : stop + SHOWN])
            yield call if isinstance(call, Malformed) else Malformed(f"{DEEPSEEK_FORM}: {near!r}")
            stop = _after(text, start, "<｜tool▁call▁end｜>", DEEPSEEK_CALL)
        begin = text.find(DEEPSEEK_CALL, stop)
        yield text[stop : begin if begin >= 0 else len(text)].partition("<｜tool▁calls▁end｜>")[2]


LLAMA_CALL = re.compile(r'\s*\{\s*"(type|name|parameters|arguments|function)"\s*:')
MISTRAL_HEAD = re.compile(r"(?P<name>[^\[]*)(?:\[CALL_ID\](?P<id>[^\[]*))?\[ARGS\]")
SEPARATORS = re.compile(r"[;, \t\r\n]*")
DEEPSEEK_FORM = "a call must have <｜tool▁sep｜> and JSON after its name, and end with <｜tool▁call▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
DEEPSEEK_HEAD = re.compile(r"(?P<name>[^<{\n]{0,256})<｜tool▁sep｜>(?:(?P<fenced>[^<{\n]{1,256})\n```json\n)?")
DEEPSEEK_END = re.compile(r"\s*(?:```\s*)?<｜tool▁call▁end｜>")


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
        position = _after(text, start, closing, opening)
    yield text[position:]


def _after(text: str, start: int, closing: str, opening: str) -> int:
    """Index after a malformed call: after its closing mark, unless another one begins before that."""
    close, again = text.find(closing, start), text.find(opening, start)
    if close >= 0 and (again < 0 or close < again):
        return close + len(closing)
    return again if again >= 0 else len(text)


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
        separators = SEPARATORS.match(text, end)
        position = end if separators is None else separators.end()


def _named(text: str) -> Iterator[Piece]:
    """Calls of the form name[ARGS]{...}, with [TOOL_CALLS] between them."""
    position = again = 0
    while again >= 0:
        call, position = _headed(text, position, MISTRAL_HEAD, "a call must have [ARGS] between name and arguments")
        yield call
        again = text.find("[TOOL_CALLS]", position)
        rest = text[position : again if again >= 0 else len(text)]
        if isinstance(call, Call) and rest.strip():
            yield rest
        position = again + len("[TOOL_CALLS]")


def _headed(text: str, start: int, pattern: re.Pattern[str], form: str) -> tuple[Call | Malformed, int]:
    """Read a call whose name stands before the JSON of its arguments, and return the index after it. `form`: that of a
    call, for one without such a head."""
    head = pattern.match(text, start)
    if head is None:
        return Malformed(f"{form}: {shown(text[start : start + SHOWN])!r}"), start
    found = read_json(text, head.end())
    if isinstance(found, Malformed):
        return found, head.end()
    groups = head.groupdict()
    name, identifier = groups.get("fenced") or groups["name"], (groups.get("id") or "").strip()
    call = call_of({"name": name.strip(), "arguments": found[0], "id": identifier or None}, ARGUMENTS)
    return call, found[1]
