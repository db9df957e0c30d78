"""Validation of a tool's arguments against its JSON schema, with lines that a model can learn from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from posttrain.errors import did_you_mean

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
    given = schema.get("type")
    types = [given] if isinstance(given, str) else given if isinstance(given, list) else []
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
