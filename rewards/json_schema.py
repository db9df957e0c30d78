"""JSON answers: completions that parse, and that a JSON schema accepts. Needs `pip install posttrain[rewards]`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema

FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
NOTHING = object()


def valid(
    completions: Sequence[str], schema: str | Mapping[str, Any] | Sequence[Any], *, parsed: float = 0.0
) -> list[float]:
    """1 where the completion is JSON that the schema accepts, `parsed` where it is other JSON, else 0.

    The completion is JSON as a whole, or in its only fenced block. `schema`: one schema (`args`) or a column, as JSON
    text or as a mapping. Raises ValueError for a schema that is none.
    """
    count = len(completions)
    schemas = [schema] * count if isinstance(schema, str | Mapping) else list(schema)
    validators: dict[str, Any] = {}
    rewards = []
    for text, one in zip(completions, schemas, strict=True):
        written = one if isinstance(one, str) else json.dumps(one)
        if written not in validators:
            validators[written] = _validator(written)
        value = json_of(text)
        accepted = value is not NOTHING and validators[written].is_valid(value)
        rewards.append(1.0 if accepted else 0.0 if value is NOTHING else parsed)
    return rewards


def json_of(text: str) -> Any:
    """Value of a completion's JSON; NOTHING if it has none. NaN and infinities are no JSON."""
    blocks = FENCE.findall(text)
    try:
        return json.loads(blocks[0] if len(blocks) == 1 else text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return NOTHING


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _validator(written: str) -> Any:
    schema = json.loads(written)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"schema: {error.message}") from error
    return kind(schema)
