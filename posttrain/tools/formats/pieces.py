"""Pieces of an assistant turn: text, calls and malformed calls; and the reading of JSON, which never raises."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 64
"""Maximum nesting of arguments."""
MAX_BITS = 4096
"""Maximum size of a whole number, which can then be written in decimal digits."""
SHOWN = 80
"""Maximum characters of a malformed call in its message."""


@dataclass(frozen=True)
class Call:
    """Tool call as written."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """Identifier that the model wrote, in formats that have one."""


@dataclass(frozen=True)
class Malformed:
    """Tool call that cannot be read, as one line for the model."""

    line: str


Piece = str | Call | Malformed
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters, by the name of the tool."""
JSON_SPACE = re.compile(r"[ \t\n\r]*")


def skip_space(text: str, start: int) -> int:
    """Return the index of the first character from `start` on that is no white space of JSON."""
    found = JSON_SPACE.match(text, start)
    return start if found is None else found.end()


def read_json(text: str, start: int) -> tuple[Any, int] | Malformed:
    """Read the JSON value that begins at `start`, after white space, and return the index after it."""
    begin = skip_space(text, start)
    try:
        value, end = DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        near = shown(text[begin : begin + 4 * SHOWN])
        return Malformed(f"{error.msg} at character {error.pos - begin} of the call: {near}")
    except (ValueError, RecursionError):
        return Malformed(f"not JSON: {shown(text[begin : begin + 4 * SHOWN])}")
    fault = json_fault(value)
    return (value, end) if fault is None else Malformed(f"{fault}: {shown(text[begin:end])}")


def json_fault(value: Any) -> str | None:
    """Explain why a value cannot be arguments: too deep, a number that is not finite, text that is no Unicode, a type
    that JSON does not have. None if it can."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, float) and not math.isfinite(item):
                return "a number is not finite"
            if isinstance(item, int) and item.bit_length() > MAX_BITS:
                return "a number has too many digits"
            if isinstance(item, str) and not is_unicode(item):
                return "a text is no Unicode"
            if isinstance(item, dict):
                inner += [*item.keys(), *item.values()]
                if not all(isinstance(key, str) for key in item):
                    return "a name in an object is no text"
            elif isinstance(item, list):
                inner += item
            elif not isinstance(item, str | int | float | None):
                return f"a value is a {type(item).__name__}"
        if not inner:
            return None
        level = inner
    return f"nested deeper than {MAX_DEPTH}"


def is_unicode(text: str) -> bool:
    """Tell whether a text can be encoded: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def call_of(value: Any, keys: Sequence[str]) -> Call | Malformed:
    """Read a call of the form {"name": ..., KEY: {...}}, KEY one of `keys`, the first of them that is there.

    Without any of them the call has no arguments.
    """
    if not isinstance(value, dict):
        return Malformed(f"a call must be an object with a name, got {shown(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return Malformed(f'a call must have a text as "name", got {shown(value)}')
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if not isinstance(arguments, dict):
        return Malformed(f'"{keys[0]}" of {name} must be an object, got {shown(arguments)}')
    given = value.get("id")
    return Call(name, arguments, given if isinstance(given, str) else None)


def calls_of(value: Any, keys: Sequence[str]) -> Iterator[Call | Malformed]:
    """Read a call or a list of calls."""
    if isinstance(value, list):
        yield from (call_of(item, keys) for item in value)
    else:
        yield call_of(value, keys)


def shown(value: Any) -> str:
    """Text in one line of limited length."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text[: 4 * SHOWN].split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _refuse(name: str) -> Any:
    raise ValueError(name)


DECODER = json.JSONDecoder(parse_constant=_refuse)
