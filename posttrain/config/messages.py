"""Configuration errors as one line per mistake: place, rule, given value, nearest field name."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from posttrain.config import RLSection, RunConfig, Section
from posttrain.config.algorithm import ALGORITHMS, AlgorithmSection
from posttrain.config.base import SCALARS, Mistakes
from posttrain.config.other_names import ABSENT, find_other_name, find_trl_name
from posttrain.config.run import SECTIONS
from posttrain.errors import did_you_mean, nearest_name

Sections = tuple[type[Section], ...]
Key = tuple[str | int, ...]
"""Path of a value in a configuration: `("stages", 0, "num_steps")`."""

FIRST_STAGE: Key = ("stages", 0)
SHOWN_LENGTH = 60


@dataclass(frozen=True, kw_only=True)
class ConfigSource:
    """File position or override of each value of a configuration."""

    name: str
    short: bool = False
    python: bool = False
    """True of keywords of a Python class; fields are suggested as keywords."""
    raw: Any = None
    """Configuration before validation, with a list of stages."""
    lines: Mapping[Key, int] = field(default_factory=dict)
    overrides: dict[Key, str] = field(default_factory=dict)

    def place(self, key: Key) -> str:
        """Return `FILE:LINE`, or the override that set `key` or a section around it."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.overrides:
                return f"override {self.overrides[key[:end]]}"
            if key[:end] in self.lines:
                return f"{self.name}:{self.lines[key[:end]]}"
        return self.name

    def shown(self, key: Key) -> str:
        """Dotted path as the user writes it: in the short form without `stages.0`."""
        visible = key[len(FIRST_STAGE) :] if self.short and key[: len(FIRST_STAGE)] == FIRST_STAGE else key
        return ".".join(map(str, visible))

    def line(self, key: Key, message: str) -> str:
        shown = self.shown(key)
        return f"{self.place(key)}: {shown}: {message}" if shown else f"{self.place(key)}: {message}"


def config_fields(section: type[Section] = RunConfig, prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Yield every field below `section` with its key, as `owned_fields`."""
    return ((key, info) for key, info, _ in owned_fields(section, prefix))


def owned_fields(
    section: type[Section] = RunConfig, prefix: Key = ()
) -> Iterator[tuple[Key, FieldInfo, type[Section]]]:
    """Yield every field below `section` with its key and its section; a stage is under its kind, an item of another
    list under 0. Where a section has one of several kinds, a key comes once for each kind that has it."""
    for name, info in section.model_fields.items():
        yield (*prefix, name), info, section
        inner, is_list = _sections(info.annotation)
        for item in inner:
            step: Key = () if not is_list else (item.model_fields["kind"].default if len(inner) > 1 else 0,)
            yield from owned_fields(item, (*prefix, name, *step))


_RULES = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list",
    "dict_type": "must be a section of keys and values",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "too_short": "must have at least {min_length} item",
    "union_tag_invalid": "must be {expected}",
}
"""Rule in the message of each pydantic error type."""


def messages(error: ValidationError, source: ConfigSource) -> list[str]:
    """One line per mistake; a missing field together with its misspelling is one mistake."""
    found: list[tuple[Key, str, str]] = []
    misspelt: set[Key] = set()
    for item in error.errors(include_url=False):
        key, parents, inside = _resolve(item["loc"])
        if item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"]:
            continue  # pydantic counts valid items only; invalid ones have lines of their own
        if item["type"] == "extra_forbidden":
            top = source.short and key[:-1] == FIRST_STAGE
            fields = _below((*parents, RunConfig) if top else parents)
            if top:
                fields = {name: last for name, last in fields.items() if name.partition(".")[0] != "stages"}
            stage = str(item["loc"][2]) if len(item["loc"]) > 3 and item["loc"][0] == "stages" else None
            near, hint = (
                (None, moved)
                if (moved := _moved(key, parents, source))
                else _hint(str(key[-1]), fields, parents, stage, source)
            )
            if near is not None:
                words = near.split(".")
                of_the_run = words[0] in RunConfig.model_fields and (top or near not in fields)
                misspelt.add((*(() if of_the_run else key[:-1]), *words))
            text = hint if moved else f"unknown field; {hint}"
        else:
            key = (*key, "kind") if item["type"].startswith("union_tag") else key
            if isinstance(error_of := item.get("ctx", {}).get("error"), Mistakes):
                found += [(key, item["type"], text) for text in error_of.texts]
                continue
            text = _explain(item, key, parents, inside)
            if item["type"] == "string_type" and key in source.overrides:
                text += f" inside the shell's: '{source.shown(key)}=\"{show(item['input'])}\"'"
        found.append((key, item["type"], text))
    return [source.line(key, text) for key, kind, text in found if kind != "missing" or key not in misspelt]


def _explain(item: Any, key: Key, parents: Sections, inside: Sections) -> str:
    kind, context, given = item["type"], item.get("ctx", {}), item["input"]
    if kind == "missing":
        purpose = next((p.model_fields[str(key[-1])].description for p in parents if key[-1] in p.model_fields), None)
        return f"required, but missing: {' '.join(purpose.split())}" if purpose else "required, but missing"
    if kind == "union_tag_not_found":
        return f"required, but missing: {_kinds(inside)}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "model_attributes_type" and len(inside) > 1:
        return f"must be a section with kind: {_kinds(inside)}; got {show(given)}"
    if kind in ("model_type", "model_attributes_type"):
        fields = _below(inside)
        meant = next((name for name in ("fn", "path", "kind") if name in fields), None)
        hint = f"; did you mean {{{meant}: {given}}}?" if isinstance(given, str) and meant else ""
        return f"must be a section of fields ({_names(fields)}); got {show(given)}{hint}"
    if kind == "union_tag_invalid":
        given, context = context["tag"], {"expected": _kinds(inside)}
    numbers = {word: f"{value:g}" if isinstance(value, float) else value for word, value in context.items()}
    rule = _RULES[kind].format(**numbers) if kind in _RULES else item["msg"]
    hint = "; write it in quotes" if kind == "string_type" else did_you_mean(str(given), re.findall(r"'([^']*)'", rule))
    return f"{rule}; got {show(given)}{hint}"


def show(value: Any) -> str:
    """Value as one line of YAML, truncated if long."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    text = _written(value) if isinstance(value, Mapping | list | tuple) else repr(value)
    return text if len(text) <= SHOWN_LENGTH else text[: SHOWN_LENGTH - 4] + " ..."


def _written(value: Any) -> str:
    """Mapping or list in one line; a lone key, such as the template {question} without quotes, has no value."""
    if isinstance(value, Mapping):
        pairs = (str(key) if item is None else f"{key}: {_written(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_written, value)) + "]"
    return show(value)


def _sections(annotation: Any) -> tuple[Sections, bool]:
    """Section classes in a field's type (several are distinguished by `kind`), and whether they are in a list."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _sections(args[0])
    if origin is tuple:
        return _sections(args[0])[0], True
    if origin in (Union, UnionType):
        found = [_sections(arg) for arg in args]
        return tuple(c for classes, _ in found for c in classes), any(is_list for _, is_list in found)
    return ((annotation,), False) if isinstance(annotation, type) and issubclass(annotation, Section) else ((), False)


def _resolve(loc: tuple[str | int, ...]) -> tuple[Key, Sections, Sections]:
    """Resolve a pydantic location: the key (without union tags), the sections that contain it, and the sections inside
    it."""
    key: Key = ()
    here: Sections = (RunConfig,)
    parents = here
    for word in loc:
        if isinstance(word, int):
            key = (*key, word)
        elif len(here) > 1:
            here = tuple(c for c in here if c.model_fields["kind"].default == word)
        else:
            key, parents = (*key, word), here
            info = here[0].model_fields.get(word) if here else None
            here = _sections(info.annotation)[0] if info else ()
    return key, parents, here


@functools.cache
def _below(parents: Sections) -> dict[str, str]:
    """Dotted names below the sections with their last words, nearest first."""
    keys = [key for parent in parents for key, _ in config_fields(parent)]
    return {".".join(map(str, key)): str(key[-1]) for key in sorted(keys, key=len)}


def _kinds(sections: Sections) -> str:
    return " or ".join(repr(section.model_fields["kind"].default) for section in sections)


def _names(fields: Mapping[str, str]) -> str:
    return ", ".join(name for name in fields if "." not in name)


def _moved(key: Key, parents: Sections, source: ConfigSource) -> str | None:
    """Sentence about a field of the algorithm that stands in its stage; None for any other."""
    word = key[-1]
    having = [kind for kind, section in ALGORITHMS.items() if word in section.model_fields]
    if parents != (RLSection,) or not having:
        return None
    kind, fields = _algorithm(source, key[:-1])
    if kind not in having:
        verb = "has" if len(having) == 1 else "have"
        return f"is a field of the algorithm, but {kind} has none; {_listed(having)} {verb} it"
    if key in source.overrides:
        return (
            f"is now algorithm.{word}: write {source.shown((*key[:-1], 'algorithm', word))}={show(fields[str(word)])}"
        )
    written = f"algorithm: {{kind: {kind}, {_written(fields)[1:]}"
    if source.python:
        plain = {name: repr(value) if type(value) in SCALARS else "..." for name, value in fields.items()}
        keywords = ", ".join(f"{name}={text}" for name, text in plain.items())
        written = f"algorithm=pt.{ALGORITHMS[kind].__name__}({keywords})"
    return f"is now algorithm.{word}: write {written}"


def _algorithm(source: ConfigSource, stage: Key) -> tuple[str, dict[str, Any]]:
    """Kind of the algorithm of a stage, and the fields that it has or that should stand in it."""
    raw = source.raw
    for word in stage:
        raw = raw[word]
    given = raw.get("algorithm", RLSection.model_fields["algorithm"].default.kind)
    own = dict(given) if isinstance(given, Mapping) else {"kind": str(given)}
    kind = str(own.pop("kind", "grpo"))
    known = ALGORITHMS.get(kind, AlgorithmSection).model_fields
    return kind, own | {name: value for name, value in raw.items() if name in known and name != "kind"}


def _hint(
    word: str, fields: Mapping[str, str], parents: Sections, kind: str | None, source: ConfigSource
) -> tuple[str | None, str]:
    """Field meant by an unknown one, and a sentence about it: other frameworks' names first, then misspellings.

    `kind`: kind of the stage.
    """
    of_run = {name: last for name, last in _below((RunConfig,)).items() if name.partition(".")[0] != "stages"}
    for known in (fields, of_run):
        found = find_trl_name(word, known, kind) or find_other_name(word, known, kind)
        if found is not None:
            name, entry = found
            return name, _question(name, source.python) + (f" ({entry.note})" if entry.note else "")
    if word in ABSENT:
        return None, f"there is none: {ABSENT[word]}"
    siblings = _siblings(parents)
    having = [repr(other) for other, section in siblings.items() if word in section.model_fields]
    own_kind = parents[0].model_fields["kind"].default if siblings else None
    near = _nearest_field(word, fields)
    if having and (near is None or siblings is not SECTIONS):
        return None, f"a field of {_listed(having)}, not of {own_kind!r}"
    return near, _question(near, source.python) if near is not None else _known(fields, siblings, own_kind, source)


def _question(name: str, python: bool) -> str:
    return f"did you mean {_keyword(name) if python else repr(name)}?"


def _keyword(name: str) -> str:
    """Dotted field as a keyword of a Python class, where fields of the model are keywords too.

    >>> _keyword("model.lora.rank"), _keyword("dataset.path"), _keyword("num_steps")
    ("lora={'rank': ...}", "'dataset'", "'num_steps'")
    """
    words = name.split(".")
    if words[0] == "algorithm" and len(words) > 1:
        return f"algorithm=pt.GRPO({words[1]}=...), or of another kind"
    words = words[1:] if words[0] == "model" and words[1:] not in ([], ["path"]) else words
    words = words[:-1] if words[-1] == "path" and words[:-1] in (["model"], ["dataset"], ["eval_dataset"]) else words
    if len(words) == 1:
        return repr(words[0])
    inner = "..."
    for word in reversed(words[1:]):
        inner = f"{{{word!r}: {inner}}}"
    return f"{words[0]}={inner}"


def _siblings(parents: Sections) -> Mapping[str, type[Section]]:
    """Sections of all kinds where a section has one of several."""
    return next((table for table in (SECTIONS, *_unions()) if parents and parents[0] in table.values()), {})


@functools.cache
def _unions() -> list[Mapping[str, type[Section]]]:
    """Sections by kind, of every field that has one of several."""
    inner = [_sections(info.annotation)[0] for _, info in config_fields()]
    return [{one.model_fields["kind"].default: one for one in sections} for sections in inner if len(sections) > 1]


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _known(
    fields: Mapping[str, str], siblings: Mapping[str, type[Section]], kind: str | None, source: ConfigSource
) -> str:
    """Known fields; of a stage, whose fields are many, what lists them."""
    if siblings is not SECTIONS:
        return f"known here: {_names(fields)}"
    return f"{f'{source.name}.fields()' if source.python else f'posttrain fields {kind}'} lists the fields"


def _nearest_field(word: str, fields: Mapping[str, str]) -> str | None:
    """Field of the section with a similar name, else one further down with the same name."""
    own = [name for name in fields if "." not in name]
    similar = nearest_name(word.lower().replace("-", "_"), own)
    return similar or next((name for name, last in fields.items() if last == word), None)
