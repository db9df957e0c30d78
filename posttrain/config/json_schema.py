"""JSON schema of a configuration file, for completion and validation in editors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from posttrain.config import RunConfig
from posttrain.config.messages import owned_fields
from posttrain.config.trl_names import trl_names_of

JsonObject = dict[str, Any]


def json_schema() -> JsonObject:
    """Make the schema of both forms of a file: with `stages:`, or with `kind:` and the fields of one stage.

    Rules about several fields are not included; `posttrain check` validates them.
    """
    schema = RunConfig.model_json_schema()
    definitions: JsonObject = schema["$defs"]
    kinds = [reference.rpartition("/")[2] for reference in _stage_references(schema)]
    names = _trl_names()
    for name, section in definitions.items():
        _describe(name, section, names)
        if name in kinds:
            section["required"] = ["kind", *section.get("required", [])]
    _describe(RunConfig.__name__, schema, names)
    long = {key: schema[key] for key in ("type", "additionalProperties", "properties", "required")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "posttrain configuration",
        "anyOf": [long, *(_short(long, definitions[name]) for name in kinds)],
        "$defs": definitions,
    }


def _stage_references(schema: JsonObject) -> Iterator[str]:
    yield from schema["properties"]["stages"]["items"]["discriminator"]["mapping"].values()


def _short(run: JsonObject, stage: JsonObject) -> JsonObject:
    """Schema of a run with a single stage, whose fields are at the top level."""
    own = {name: value for name, value in run["properties"].items() if name != "stages"}
    required = [*(name for name in run["required"] if name != "stages"), *stage["required"]]
    return {**run, "properties": {**own, **stage["properties"]}, "required": required}


def _trl_names() -> dict[tuple[str, str], str]:
    """TRL names by section and field."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for key, _, owner in owned_fields():
        names = found.setdefault((owner.__name__, str(key[-1])), {})
        names |= {entry.trl: None for entry in trl_names_of(".".join(map(str, key)))}
    return {place: ", ".join(names) for place, names in found.items()}


def _describe(name: str, section: JsonObject, names: dict[tuple[str, str], str]) -> None:
    """Drop pydantic's titles, which repeat names; add TRL names to descriptions."""
    for field, value in section.get("properties", {}).items():
        value.pop("title", None)
        trl = names.get((name, field))
        parts = [" ".join(value.get("description", "").split()), f"TRL: {trl}." if trl else ""]
        if text := " ".join(filter(None, parts)):
            value["description"] = text
