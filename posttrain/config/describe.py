"""Fields of sections for people and editors: rows with name, type, default and description, and a JSON schema."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from posttrain.config.base import Section
from posttrain.config.locator import Locator, UserObject
from posttrain.config.messages import Key, owned_fields
from posttrain.config.optimizer import KINDS
from posttrain.config.other_names import trl_names_of
from posttrain.config.run import SECTIONS, RunConfig
from posttrain.config.yaml_file import has_stages, load_config, stage_settings
from posttrain.errors import ConfigError, did_you_mean

WIDTH = 78
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
WORDS: dict[Any, str] = {
    str: "text",
    Locator: "text",
    UserObject: "text or map",
    bool: "true or false",
    type(None): "nothing",
    Any: "anything",
}
NUMBERS = {int: "integer", float: "number"}


@dataclass(frozen=True)
class FieldRow:
    """Field of a configuration as text."""

    name: str
    """Dotted name below the section."""
    type: str
    default: str
    """Default as in YAML; `required` if there is none."""
    description: str
    choices: tuple[str, ...] = ()
    """All values, of a literal or a truth value; empty for other types."""

    def __str__(self) -> str:
        head = f"{self.name}: {self.type} = {self.default}"
        return "\n".join(
            [head, *textwrap.wrap(self.description, WIDTH, initial_indent="    ", subsequent_indent="    ")]
        )


class FieldTable(list[FieldRow]):
    """Fields as text or, in a notebook, as a table."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self))

    def _repr_html_(self) -> str:
        cells = ([row.name, row.type, row.default, row.description] for row in self)
        body = "".join(
            "<tr>" + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in row) + "</tr>"
            for row in cells
        )
        return f"<table><tr><th>field</th><th>type</th><th>default</th><th>meaning</th></tr>{body}</table>"


def field_table(section: type[Section], word: str = "") -> FieldTable:
    """Rows of all fields below a section, without `kind`, of which `word` is part of the name or description."""
    found: dict[Key, list[tuple[FieldInfo, str]]] = {}
    kinds: dict[Key, dict[str, None]] = {}
    for key, info, owner in owned_fields(section):
        kind = str(owner.model_fields["kind"].default) if "kind" in owner.model_fields else ""
        kinds.setdefault(key[:-1], {})[kind] = None
        if key[-1] != "kind":
            found.setdefault(key, []).append((info, kind))
    rows = [_row(key, of_key, list(kinds[key[:-1]])) for key, of_key in found.items()]
    return FieldTable(row for row in rows if word.lower() in f"{row.name} {row.description}".lower())


def find_fields(kind: str | None, word: str = "") -> FieldTable:
    """Rows of a kind of stage, or of the run itself without one. `word`: those that have it in name or description,
    of the run as well; in place of a kind, a word of any of them.

    Raises ConfigError where there is neither such a kind nor a field with such a word.
    """
    of_run = [row for row in field_table(RunConfig, word) if not row.name.startswith("stages.")]
    if kind is None:
        return FieldTable(of_run)
    if kind in SECTIONS:
        rows = field_table(SECTIONS[kind], word)
        found = FieldTable([*rows, *of_run] if word else rows)
        if found:
            return found
        raise ConfigError(f"fields: neither {kind} nor the run has a field with {word!r} in its name or description")
    named = {"run": field_table(RunConfig, kind), **{name: field_table(SECTIONS[name], kind) for name in SECTIONS}}
    # A field that several kinds of stages have alike is listed once, with their names.
    kinds_of: dict[FieldRow, list[str]] = {}
    for name, rows in named.items():
        for row in rows:
            if not row.name.startswith("stages."):
                kinds_of.setdefault(row, []).append(name)
    if word or not kinds_of:
        neither = "" if word else " and no field has this word in its name or description"
        raise ConfigError(
            f"fields: {kind!r} is no kind of stage ({', '.join(SECTIONS)}){neither}{did_you_mean(kind, SECTIONS)}"
        )
    return FieldTable(
        replace(row, description=f"[{', '.join(kinds)}] {row.description}") for row, kinds in kinds_of.items()
    )


def _row(key: Key, found: Sequence[tuple[FieldInfo, str]], kinds: Sequence[str]) -> FieldRow:
    """Row of a field; where a section has one of several kinds, with the default of each and their names."""
    info = found[0][0]
    defaults: dict[str, list[str]] = {}
    for one, kind in found:
        text = "required" if one.is_required() else default_text(one.default)
        defaults.setdefault(text, []).append(kind)
    texts = sorted(defaults, key=lambda text: len(defaults[text]))
    default = ", ".join([*(f"{text} ({', '.join(defaults[text])})" for text in texts[:-1]), texts[-1]])
    description = " ".join((info.description or "").split())
    having = [kind for kind in kinds if any(kind in names for names in defaults.values())]
    if lacking := [kind for kind in kinds if kind not in having]:
        words = having if len(having) <= len(lacking) else ["all but", *lacking]
        description = f"{description} Kinds: {', '.join(words).replace('all but,', 'all but')}.".strip()
    return FieldRow(
        ".".join(map(str, key)),
        type_text(info.annotation) + _bounds(info.metadata),
        default,
        description,
        _choices(info.annotation),
    )


def _choices(annotation: Any) -> tuple[str, ...]:
    """Values of a type with few; of a union, if all its members but None and lists have few."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is bool:
        return ("true", "false")
    if _is_section(annotation):
        kind = annotation.model_fields.get("kind")
        return () if kind is None else (kind.default,)
    if origin is Literal:
        return tuple(map(str, args))
    if origin is Annotated:
        return _choices(args[0])
    if origin in (Union, UnionType):
        members = [_choices(arg) for arg in args if arg is not type(None) and not type_text(arg).startswith("list of")]
        return sum(members, ()) if all(members) else ()
    return ()


def default_text(value: Any) -> str:
    """Default as one writes it in YAML; a section has `its defaults`."""
    if isinstance(value, Section):
        return "its defaults"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def type_text(annotation: Any) -> str:
    """Type in words, with the alternatives of a literal and the bounds of a number."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in WORDS:
        return WORDS[annotation]
    if annotation in NUMBERS:
        return NUMBERS[annotation]
    if origin is Annotated:
        return type_text(args[0]) + _bounds(args[1:])
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin in (Union, UnionType):
        texts = [word for arg in args if arg is not type(None) for word in type_text(arg).split(" or ")]
        return " or ".join(dict.fromkeys(texts))
    if origin is tuple:
        return f"list of {type_text(args[0])}"
    return "map" if origin is dict else "section" if _is_section(annotation) else str(annotation)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _bounds(metadata: Any) -> str:
    return "".join(f" {text}" for item in metadata for text in _bound_texts(item))


def _bound_texts(item: Any) -> Iterator[str]:
    if isinstance(item, FieldInfo):
        for inner in item.metadata:
            yield from _bound_texts(inner)
    elif type(item).__module__ == "annotated_types":
        yield from (f"{BOUNDS[name]} {value}" for name, value in dataclasses.asdict(item).items() if name in BOUNDS)


JsonObject = dict[str, Any]


def json_schema() -> JsonObject:
    """Make the schema of both forms of a file: with `stages:`, or with `kind:` and the fields of one stage.

    Rules about several fields are not included; `posttrain check` validates them.
    """
    schema = RunConfig.model_json_schema()
    definitions: JsonObject = schema["$defs"]
    kinds = [reference.rpartition("/")[2] for reference in _stage_references(schema)]
    # A section of an optimiser without a kind is AdamW's, or with `fn` the user's.
    named = [*kinds, *(section.__name__ for kind, section in KINDS.items() if kind != "adamw")]
    names = _trl_names()
    for name, section in definitions.items():
        _describe(name, section, names)
        if name in named:
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


Candidates: TypeAlias = Iterator[tuple[str, str]]
"""Completed words, each with its help."""


def assignments(config: str, start: str) -> Candidates:
    """`key=value` that begin so, of a configuration: each value that a key can have, else its present one."""
    loaded = load_config(config)

    def of_row(row: FieldRow, prefix: str, values: dict[str, object]) -> Candidates:
        name = f"{prefix}{row.name}"
        written = row.choices or not row.type.endswith("section")
        if not written or not (name.startswith(start) or start.startswith(f"{name}=")):
            return
        if not start.startswith(name[: name.find(".0.") + 1]):  # fields of a list's items, once the list is typed
            return
        present = values.get(row.name)
        shown = str(present).lower() if isinstance(present, bool) else "" if present is None else str(present)
        for value in row.choices or (shown,):
            yield f"{name}={value}", row.description

    settings = [stage_settings(loaded, index) for index in range(len(loaded.stages))]
    for row in field_table(RunConfig):
        if not row.name.startswith("stages."):
            yield from of_row(row, "", settings[0])
    listed, kinds = has_stages(config), [stage.kind for stage in loaded.stages]
    for index, stage in enumerate(loaded.stages):
        name = stage.name or (stage.kind if kinds.count(stage.kind) == 1 else str(index))
        for row in field_table(SECTIONS[stage.kind]):
            yield from of_row(row, f"stages.{name}." if listed else "", settings[index])
