"""Pages that are made from the code: the Python reference when the site is built, and the configuration reference by
`python docs/hooks.py`, so that it can be read in the repository too."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import posttrain
from posttrain.config import ALGORITHMS, AlgorithmSection, Locator, RunConfig, Section
from posttrain.config.messages import config_fields
from posttrain.config.other_names import TRL_NAMES, trl_names_of
from posttrain.config.run import SECTIONS

WORDS: dict[Any, str] = {
    str: "text",
    Locator: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    type(None): "nothing",
    Any: "anything",
}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def on_files(files: Any, config: Any) -> Any:
    """Add the Python reference to the pages that are written."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference/api.md", content=api_page()))
    return files


def on_post_build(config: Any) -> None:
    """Write the JSON schema beside the pages."""
    import json

    from posttrain.config.describe import json_schema

    Path(config.site_dir, "posttrain.schema.json").write_text(json.dumps(json_schema(), indent=1))


CONFIG_PAGE = Path(__file__).parent / "reference" / "config.md"


# --- the configuration ------------------------------------------------------------------------------------------------


def config_page() -> str:
    """Every field of every section: type, default, description, TRL's name."""
    places = section_places()
    parts = [
        "# Configuration\n",
        "Made from the schema, `posttrain/config/`. A file is the run's fields with a list `stages:`, or the run's "
        "fields and, with `kind:` among them, those of its one stage. Unknown fields are errors. Every value can be "
        "overridden on the command line: `posttrain run FILE stages.0.num_steps=50`, in a file of one stage "
        "`num_steps=50`. The last column is the name in TRL 1.16 (or transformers, PEFT) where there is one; "
        "[TRL's names](#trl-names) lists them the other way round.\n",
    ]
    for section in ordered_sections():
        parts.append(f'<a id="{anchor(section)}"></a>\n\n## {heading(section, places)}\n')
        parts += [text for text in (intro(section), inherited(section), places_text(section, places)) if text]
        rows = [row(name, section, places) for name in own_fields(section)]
        if rows:
            parts.append(
                "\n".join(["| field | type | default | meaning | TRL |", "|---|---|---|---|---|", *rows]) + "\n"
            )
    return "\n".join([*parts, trl_table(places)])


def section_places() -> dict[type[Section], list[str]]:
    """Dotted places of each section, without numbers and kinds of stages, in the order of the schema.

    A base of sections, other than of stages, stands where they stand.
    """
    places: dict[type[Section], dict[str, None]] = {RunConfig: {}}
    for key, info in config_fields():
        for section in sections_in(info.annotation):
            words = [word for word in key if isinstance(word, str)]
            dotted = ".".join(words[2:] if words[0] == "stages" and len(words) > 2 else words)
            for base in [section] if stage_of(section) else bases(section):
                places.setdefault(base, {})[dotted] = None
    return {section: list(found) for section, found in places.items()}


def section_kinds(section: type[Section]) -> list[str]:
    """Kinds of the stages that hold the section."""
    keys = [key for key, info in config_fields() if section in [*sections_in(info.annotation)] and key[0] == "stages"]
    return list(dict.fromkeys(str(key[1]) for key in keys if len(key) > 1))


def bases(section: type[Section]) -> list[type[Section]]:
    """The section and what it inherits from."""
    return [c for c in section.__mro__ if issubclass(c, Section) and c is not Section]


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and not get_args(annotation):
        if issubclass(annotation, Section):
            yield annotation
        return
    for inner in get_args(annotation):
        yield from sections_in(inner)


def ordered_sections() -> list[type[Section]]:
    """The run, its sections, what all stages have, and the kinds of stages; a base before what it is a base of."""
    found: dict[type[Section], None] = {}

    def add(section: type[Section]) -> None:
        for base in reversed(bases(section)):
            if base in found:
                continue
            found[base] = None
            for name in own_fields(base):
                for inner in sections_in(base.model_fields[name].annotation):
                    add(inner)

    add(RunConfig)
    return list(found)


def own_fields(section: type[Section]) -> list[str]:
    """Names of the fields that the class itself declares, in order, without `kind`."""
    return [name for name in inspect.get_annotations(section) if name in section.model_fields and name != "kind"]


def kind_of(section: type[Section]) -> str | None:
    info = section.model_fields.get("kind")
    return info.default if info is not None and isinstance(info.default, str) else None


def stage_of(section: type[Section]) -> str | None:
    """Kind of a stage; None for other sections."""
    return kind_of(section) if section in SECTIONS.values() else None


def heading(section: type[Section], places: dict[type[Section], list[str]]) -> str:
    if section is RunConfig:
        return "The run"
    if kind := stage_of(section):
        return f"`kind: {kind}`"
    if section in places and (kind := kind_of(section)):
        return f"`{places[section][0]}: {kind}`"
    if issubclass(section, AlgorithmSection):
        kinds = [kind for kind, one in ALGORITHMS.items() if issubclass(one, section)]
        return "All algorithms" if len(kinds) == len(ALGORITHMS) else f"`algorithm`: {section.__name__}"
    if section in places:
        kinds = ", ".join(f"`{kind}`" for kind in section_kinds(section)) if len(bases(section)) > 1 else ""
        return f"`{places[section][0]}`" + (f" of {kinds}" if kinds else "")
    kinds = [stage_of(c) for c in places if issubclass(c, section) and stage_of(c)]
    every = [c for c in places if stage_of(c)]
    return "All stages" if len(kinds) == len(every) else "Stages " + ", ".join(f"`{kind}`" for kind in kinds)


def anchor(section: type[Section]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "-", section.__name__).lower()


def intro(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split()) + "\n" if section.__doc__ else ""


def inherited(section: type[Section]) -> str:
    names = ", ".join(f"[{c.__name__}](#{anchor(c)})" for c in bases(section)[1:])
    return f"Also all fields of {names}.\n" if names else ""


def places_text(section: type[Section], places: dict[type[Section], list[str]]) -> str:
    found = places.get(section, [])
    return (
        f"Stands under {', '.join(f'`{place}`' for place in found)}.\n"
        if len(found) > 1 and not stage_of(section)
        else ""
    )


def row(name: str, section: type[Section], places: dict[type[Section], list[str]]) -> str:
    info = section.model_fields[name]
    bounds = bounds_text(info.metadata)
    shown = type_text(info.annotation) + (f" {bounds}" if bounds else "")
    required = "of the kind" if section is AlgorithmSection else "required"
    default = required if info.is_required() else default_text(info.default)
    kinds = [stage_of(c) for c in places if stage_of(c) and issubclass(c, section)]
    prefixes = [f"stages.{kind}." for kind in kinds] or [f"{place}." for place in places.get(section, [])] or [""]
    names = dict.fromkeys(e.trl for prefix in prefixes for e in trl_names_of(prefix + name))
    trl = ", ".join(f"`{name}`" for name in names)
    text = " ".join((info.description or "").split())
    cells = [f"`{name}`", shown, default, text, trl]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def type_text(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in WORDS:
        return WORDS[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"[{kind_of(annotation) or 'section'}](#{anchor(annotation)})"
    if origin is Annotated:
        bounds = bounds_text(args[1:])
        return type_text(args[0]) + (f" {bounds}" if bounds else "")
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (Union, UnionType):
        shown = [type_text(arg) for arg in args if arg is not type(None)]
        return " or ".join(dict.fromkeys(shown))
    if origin is tuple:
        return f"list of {type_text(args[0])}"
    if origin is dict:
        return f"map of {type_text(args[0])} to {type_text(args[1])}"
    return f"`{annotation}`"


def bounds_text(metadata: Any) -> str:
    parts = []
    for item in metadata:
        for inner in getattr(item, "metadata", [item]):
            parts += [f"{sign} {getattr(inner, name)}" for name, sign in BOUNDS.items() if hasattr(inner, name)]
    return ", ".join(parts)


def default_text(value: Any) -> str:
    if isinstance(value, Section):
        return "its defaults"
    if value is None or value == () or value == {}:
        return "none"
    words = {True: "true", False: "false"}
    if isinstance(value, bool):
        return f"`{words[value]}`"
    return ", ".join(f"`{item}`" for item in value) if isinstance(value, tuple) else f"`{value}`"


def trl_table(places: dict[type[Section], list[str]]) -> str:
    """TRL's names in the order of the alphabet, with our fields."""
    lines = ['<a id="trl-names"></a>\n\n## TRL\'s names\n', "| TRL | here | in | note |", "|---|---|---|---|"]
    for entry in sorted(TRL_NAMES, key=lambda entry: (entry.trl, entry.field)):
        kinds = ", ".join(f"`kind: {kind}`" for kind in entry.kinds)
        lines.append(f"| `{entry.trl}` | `{entry.field}` | {kinds} | {entry.note} |".replace("||", "\\|\\|"))
    return "\n".join(lines) + "\n"


# --- Python -----------------------------------------------------------------------------------------------------------


def api_page() -> str:
    """The public names of `posttrain` with their signatures and docstrings."""
    parts = [
        "# Python\n",
        "`import posttrain as pt`; every name below is one of `pt`. Made from the docstrings. Each loads on first use, "
        "so that `import posttrain` is quick.\n",
    ]
    for name in sorted(posttrain.__all__, key=str.lower):
        if not name.startswith("__"):
            parts.append(entry(name, getattr(posttrain, name)))
    return "\n".join(parts)


def entry(name: str, value: Any) -> str:
    source = f"{value.__module__.replace('.', '/')}.py"
    lines = [f"## pt.{name}\n", f"```text\n{signature(name, value)}\n```\n", docstring(value), f"Source: `{source}`\n"]
    if inspect.isclass(value):
        fields = field_docstrings(value)
        lines += [f"* `{field}`: {text}" for field, text in fields.items()] + ([""] if fields else [])
        lines += [member(name, value, attribute) for attribute in public_members(value)]
    return "\n".join(lines)


def signature(name: str, value: Any) -> str:
    try:
        found = shown_parameters(inspect.signature(value))
    except (TypeError, ValueError):
        return name
    texts = [parameter_text(p) for p in found]
    first = next((i for i, p in enumerate(found) if p.kind is p.KEYWORD_ONLY), None)
    if first is not None and not dataclasses.is_dataclass(value):
        texts.insert(first, "*")
    line = f"{name}({', '.join(texts)})"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(texts) + ",\n)"


def shown_parameters(found: inspect.Signature) -> list[inspect.Parameter]:
    return [p for p in found.parameters.values() if p.name not in ("self", "args")]


def parameter_text(p: inspect.Parameter) -> str:
    stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
    kind = "" if p.annotation is p.empty else f": {annotation_text(p.annotation)}"
    return stars + p.name + kind + ("" if p.default is p.empty else f" = {default_of(p.default)}")


def annotation_text(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)


def default_of(value: Any) -> str:
    text = repr(value)
    return "..." if " at 0x" in text or len(text) > 40 or isinstance(value, dataclasses.Field) else text


def docstring(value: Any) -> str:
    own = value.__doc__ if not inspect.isclass(value) or "__doc__" in vars(value) else None
    # The fields of a stage are in the configuration's reference.
    text = inspect.cleandoc(own or "").partition("\n\nFields, with their defaults:")[0]
    if re.match(rf"{getattr(value, '__name__', '')}\(", text):
        return ""  # a dataclass without one
    return re.sub(r"(?m)^(>>> (?:.*\n?)(?:(?!\n).+\n?)*)", r"\n```text\n\1\n```\n", text) + "\n"


def field_docstrings(value: type) -> dict[str, str]:
    """Attributes of the class that a docstring follows."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for before, after in itertools.pairwise(tree.body):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(text, str):
            found[before.target.id] = " ".join(text.split())
    return found


def public_members(value: type) -> list[str]:
    """Methods that the class itself or a base in posttrain defines."""
    found: dict[str, None] = {}
    for base in value.__mro__:
        if not base.__module__.startswith("posttrain"):
            continue
        found |= {n: None for n, m in vars(base).items() if not n.startswith("_") and inspect.isfunction(m)}
    return list(found)


def member(owner: str, value: type, name: str) -> str:
    function = getattr(value, name)
    text = docstring(function).strip()
    return (
        f"**`{signature(name, function)}`**\n\n{text}\n"
        if "\n" not in signature(name, function)
        else (f"**`{owner}.{name}`**\n\n```text\n{signature(name, function)}\n```\n\n{text}\n")
    )


if __name__ == "__main__":
    CONFIG_PAGE.write_text(config_page(), encoding="utf-8")
