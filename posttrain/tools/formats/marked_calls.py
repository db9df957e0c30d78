"""Formats with marks of their own: Qwen3-Coder's tags and the channels of GPT-OSS (Harmony)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.tools.formats.pieces import Call, Malformed, Piece, Schemas, call_of, json_fault, read_json, shown

FUNCTION = re.compile(r"<function=([^>\n]*)>")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
FUNCTION_END, TOOL_CALL_END = re.compile(r"\s*</function>"), re.compile(r"\s*</tool_call>")
WORDS = {"True": True, "False": False, "None": None}
RECIPIENT = re.compile(r"to=([^\s<]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
HARMONY_ENDS = re.compile(r"<\|(?:end|call|return)\|>")


def read_qwen_coder(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Qwen3-Coder: <function=name> with a <parameter=key> for each argument, in <tool_call>, which it may leave out.

    Values are bare text, so the tool's schema tells texts from numbers, lists and objects.
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
        key = parameter[1].strip()
        arguments[key] = _typed(parameter[2], properties.get(key))
        position = parameter.end()
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
    for message in text.split("<|start|>"):
        header, separator, body = message.partition("<|message|>")
        body = HARMONY_ENDS.split(body, maxsplit=1)[0]
        recipient, channel = RECIPIENT.search(header), CHANNEL.search(header)
        if recipient is not None:
            yield from _harmony_call(recipient[1], body if separator else None)
        elif separator and (channel is None or channel[1] != "analysis"):
            yield body


def _harmony_call(recipient: str, body: str | None) -> Iterator[Piece]:
    if body is None:
        yield Malformed(f"a call to {recipient} must have its arguments after <|message|>")
        return
    found = read_json(body, 0)
    if isinstance(found, Malformed):
        yield found
    elif body[found[1] :].strip():
        yield Malformed(f"arguments of {recipient} must be one object, got {shown(body)}")
    else:
        yield call_of({"name": recipient.removeprefix("functions."), "arguments": found[0]}, ("arguments",))
