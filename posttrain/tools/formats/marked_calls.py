"""Formats with marks of their own: Qwen3-Coder's tags and the channels of GPT-OSS (Harmony)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.tools.formats.pieces import Call, Malformed, Piece, Schemas, call_of, json_fault, read_json, shown

FUNCTION = re.compile(r"<function=([^<>\n]*)>")
PARAMETER, PARAMETER_END = re.compile(r"\s*<parameter=([^<>\n]*)>\n?"), "</parameter>"
AFTER_PARAMETER = re.compile(r"\s*<(?:parameter=|/function>)")
FUNCTION_END, TOOL_CALL_END = re.compile(r"\s*</function>"), re.compile(r"\s*</tool_call>")
WORDS = {"True": True, "False": False, "None": None}
RECIPIENT = re.compile(r"to=([^\s<]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
HARMONY_BODY, HARMONY_END = re.compile(r"<\|(message|start)\|>"), re.compile(r"<\|(?:end|call|return|start)\|>")


def read_qwen_coder(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Qwen3-Coder: <function=name> with a <parameter=key> for each argument, in <tool_call>, which it may leave out.

    Values are bare text, so the tool's schema tells texts from numbers, lists and objects. A value ends where the next
    parameter or the end of the function follows.
    """
    position = 0
    while (opening := FUNCTION.search(text, position)) is not None:
        yield text[position : opening.start()].rstrip().removesuffix("<tool_call>")
        found = _tagged_call(opening[1].strip(), text, opening.end(), schemas)
        if isinstance(found, Malformed):
            yield found
            end = text.find("</function>", opening.end())
            position = len(text) if end < 0 else end + len("</function>")
        else:
            call, position = found
            yield call
        after = TOOL_CALL_END.match(text, position)
        position = position if after is None else after.end()
    before, tag, inside = text[position:].partition("<tool_call>")
    yield before
    if tag:
        yield Malformed(f"a call must begin with <function=name>: {shown(inside)}")


def _tagged_call(name: str, text: str, start: int, schemas: Schemas) -> tuple[Call, int] | Malformed:
    """Read the parameters of a function, and return the index after its end."""
    properties = schemas.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    position = start
    while (parameter := PARAMETER.match(text, position)) is not None:
        key, stop = parameter[1].strip(), text.find(PARAMETER_END, parameter.end())
        while stop >= 0 and AFTER_PARAMETER.match(text, stop + len(PARAMETER_END)) is None:
            stop = text.find(PARAMETER_END, stop + 1)
        if stop < 0:
            break
        arguments[key] = _typed(text[parameter.end() : stop].removesuffix("\n"), properties.get(key))
        position = stop + len(PARAMETER_END)
    end = FUNCTION_END.match(text, position)
    if end is None:
        expected = "<parameter=name>, value, </parameter>, and at the end </function>"
        return Malformed(f"after {name} must come {expected}, got {shown(text[position:])!r}")
    fault = json_fault(arguments)
    call = call_of({"name": name, "arguments": arguments}, ("arguments",))
    if fault is not None or isinstance(call, Malformed):
        return call if isinstance(call, Malformed) else Malformed(f"{name}: {fault}")
    return call, end.end()


def _typed(text: str, schema: Any) -> Any:
    """Read a bare value as the schema's type: text stays text, unless only another type fits; without a schema JSON
    where it is JSON."""
    types = _types(schema)
    if "string" in types:
        return None if text in ("None", "null") and ("null" in types) else text
    if text in WORDS:
        return WORDS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _types(schema: Any) -> set[str]:
    """Types that a schema allows; empty if it does not tell."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    for key in ("anyOf", "oneOf"):
        types = types.union(*(_types(option) for option in schema.get(key, ())))
    return types | ({"null"} if schema.get("nullable") else set())


def read_gpt_oss(text: str, schemas: Schemas) -> Iterator[Piece]:
    """GPT-OSS (Harmony): messages in channels. Calls are to=functions.name in the header, JSON in the body; the text
    is that of the channel final, and of commentary to the user."""
    if "<|message|>" not in text and "<|channel|>" not in text:
        yield text
        return
    position = 0
    while (mark := HARMONY_BODY.search(text, position)) is not None:
        header, start = text[position : mark.start()], mark.end()
        recipient, channel = RECIPIENT.search(header), CHANNEL.search(header)
        if mark[1] == "start":
            yield from () if recipient is None else (_no_arguments(recipient[1]),)
            position = start
            continue
        if recipient is not None:
            call, start = _harmony_call(recipient[1], text, start)
            yield call
        end = HARMONY_END.search(text, start)
        if recipient is None and (channel is None or channel[1] != "analysis"):
            yield text[start : len(text) if end is None else end.start()]
        following = -1 if end is None else text.find("<|start|>", end.start())
        if following < 0:
            return
        position = following + len("<|start|>")
    if (recipient := RECIPIENT.search(text, position)) is not None:
        yield _no_arguments(recipient[1])


def _no_arguments(recipient: str) -> Malformed:
    return Malformed(f"a call to {recipient} must have its arguments after <|message|>")


def _harmony_call(recipient: str, text: str, start: int) -> tuple[Call | Malformed, int]:
    """Read a call whose arguments begin at `start`, and return the index after them."""
    found = read_json(text, start)
    if isinstance(found, Malformed):
        return found, start
    end = HARMONY_END.search(text, found[1])
    if text[found[1] : len(text) if end is None else end.start()].strip():
        return Malformed(f"arguments of {recipient} must be one object, got {shown(text[start : start + 320])}"), start
    return call_of({"name": recipient.removeprefix("functions."), "arguments": found[0]}, ("arguments",)), found[1]
