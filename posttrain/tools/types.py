"""Tools and their calls: types, validation of arguments against a JSON schema, and results as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from posttrain.errors import did_you_mean


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """Call of a tool, as a model wrote it."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """Assistant turn split into its text and its tool calls."""

    content: str
    """Text without the calls."""
    calls: Sequence[ToolCall] = ()
    malformed: Sequence[str] = ()
    """One line for each call that cannot be read, for the model to learn from."""


@runtime_checkable
class Tool(Protocol):
    """Function that the policy can call."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema as chat templates take it: {"type": "function", "function": {...}}."""
        ...

    async def __call__(self, arguments: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Result, within deadline and size limit: its text, or its parts if it has pictures. Errors of the function are
        text as well, a `posttrain.tools.types.FailedCall`."""
        ...

    def close(self) -> None:
        """Release what the tool holds; a later call opens it again."""
        ...


@runtime_checkable
class ToolFormat(Protocol):
    """Format in which a family of models writes tool calls."""

    def parse(self, text: str) -> ParsedTurn:
        """Parse an assistant turn, decoded with its special tokens but without its stop token."""
        ...


FormatMaker = Callable[[Sequence[Mapping[str, Any]]], ToolFormat]
"""Maker of the format for tools of these schemas."""


class FailedCall(str):
    """Text of a call that failed: the model reads it as any other result, and environments count it."""

    __slots__ = ()


def failed(reason: str, max_chars: int) -> FailedCall:
    """Make the text of a failed call, one line of at most `max_chars` characters."""
    return FailedCall(truncate(f"Error: {' '.join(reason.split())}", max_chars))


def result_text(value: Any, max_chars: int) -> str:
    """Convert the result of a tool: a string as it is, everything else to JSON, cut to `max_chars` characters.

    TypeError or ValueError for a value that has no form in JSON.
    """
    if isinstance(value, str):
        return truncate(value, max_chars)
    return truncate(json.dumps(value, ensure_ascii=False, allow_nan=False), max_chars)


def has_pictures(value: Any) -> bool:
    """Tell whether a result is a list of parts with `{type: image, ...}` among them."""
    parts = value if isinstance(value, list) else []
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    return {"image", "image_url"} & {*kinds} != set() and {*kinds} <= {"text", "image", "image_url"}


def truncate(text: str, max_chars: int) -> str:
    """Cut a text to `max_chars` characters, followed by a line that says so. Text that is no Unicode is replaced."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: {max_chars} of {len(text)} characters]"


TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
    "null": (type(None),),
}
SHOWN = 60
"""Maximum characters of a value in a message."""


def argument_error(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str | None:
    """Explain in one line why arguments do not fit a JSON schema of type object: missing, unknown or of a wrong type.

    None if they fit. Keywords: type, nullable, enum, const, items, prefixItems, properties, required,
    additionalProperties, anyOf, oneOf; others, such as bounds, are left to the tool itself.
    """
    properties = parameters.get("properties", {})
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    if missing:
        return f"missing argument{'s' * (len(missing) > 1)} {', '.join(missing)}; {_signature(parameters)}"
    if parameters.get("additionalProperties") in (None, False):
        for name in arguments:
            if name not in properties:
                return f"unknown argument {name!r}{did_you_mean(name, properties)}; {_signature(parameters)}"
    faults = (_fault(value, properties.get(name, {}), name) for name, value in arguments.items())
    return next((fault for fault in faults if fault is not None), None)


def _signature(parameters: Mapping[str, Any]) -> str:
    required = parameters.get("required", ())
    names = [name if name in required else f"{name} (optional)" for name in parameters.get("properties", {})]
    return f"arguments are {', '.join(names)}" if names else "there are no arguments"


def _fault(value: Any, schema: Any, where: str) -> str | None:
    """First violation of a schema, as `where must be ..., got ...`."""
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):
        return None
    for key in ("anyOf", "oneOf"):
        faults = [_fault(value, option, where) for option in schema.get(key, ())]
        if faults and all(faults):
            return f"{where} must be one of {_shown(schema[key])}, got {_shown(value)}"
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None and not any(_same(value, choice) for choice in choices):
        return f"{where} must be one of {_shown(choices)}, got {_shown(value)}"
    named = schema.get("type")
    types = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if types and not any(_is(value, name) for name in types):
        return f"{where} must be of type {' or '.join(map(str, types))}, got {_shown(value)}"
    return _fault_inside(value, schema, where)


def _fault_inside(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    """First violation in the items of an array or the members of an object."""
    if isinstance(value, list | tuple):
        first = schema.get("prefixItems", ())
        items = [*first[: len(value)], *[schema.get("items", {})] * (len(value) - len(first))]
        faults = (_fault(item, s, f"{where}[{i}]") for i, (item, s) in enumerate(zip(value, items, strict=True)))
        return next((fault for fault in faults if fault is not None), None)
    if isinstance(value, Mapping):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        for name in schema.get("required", ()):
            if name not in value:
                return f"{where} must have {name!r}, got {_shown(value)}"
        for name, item in value.items():
            if name not in properties and rest is False:
                return f"{where} must not have {name!r}; it has {', '.join(properties)}"
            if (fault := _fault(item, properties.get(name, rest), f"{where}.{name}")) is not None:
                return fault
    return None


def _is(value: Any, name: str) -> bool:
    """Tell whether a value is of a JSON type; unknown types hold anything. True is no number, and 2.0 no integer."""
    if name in ("integer", "number") and isinstance(value, bool):
        return False
    return isinstance(value, TYPES.get(name, (object,)))


def _same(value: Any, choice: Any) -> bool:
    return bool(value == choice) and isinstance(value, bool) == isinstance(choice, bool)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
