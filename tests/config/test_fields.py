"""The frozen list of configuration fields, and that each has an effect.

`python tests/config/test_fields.py` writes the list anew.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from posttrain.config import ALGORITHMS, Section
from posttrain.config.messages import config_fields, owned_fields

ROOT = Path(__file__).resolve().parents[2]
FROZEN = ROOT / "tests" / "config" / "fields.txt"
READERS = [
    path
    for path in sorted((ROOT / "posttrain").rglob("*.py"))
    if path.relative_to(ROOT / "posttrain").parts[0] != "config"
]


def type_text(annotation: Any) -> str:
    """A type as one writes it: `tuple[str, ...]`, `float (gt=0) | None`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "None"
    if origin is Annotated:
        bounds = [text for item in args[1:] for text in bounds_text(item)]
        return type_text(args[0]) + (f" ({', '.join(bounds)})" if bounds else "")
    if origin in (Union, UnionType):
        return " | ".join(type_text(arg) for arg in args)
    if origin is dict:
        return f"dict[{', '.join(map(type_text, args))}]"
    if origin is tuple:
        return f"tuple[{type_text(args[0])}, ...]"
    return annotation.__name__ if isinstance(annotation, type) and not args else str(annotation).replace("typing.", "")


def bounds_text(item: Any) -> list[str]:
    if isinstance(item, FieldInfo):
        return [text for inner in item.metadata for text in bounds_text(inner)]
    return [repr(item).partition("(")[2].rstrip(")")] if type(item).__module__ == "annotated_types" else []


def field_line(key: tuple[str | int, ...], info: FieldInfo) -> str:
    bounds = [text for item in info.metadata for text in bounds_text(item)]
    shown = f" ({', '.join(bounds)})" if bounds else ""
    default = "required" if info.is_required() else default_text(info.default)
    return f"{'.'.join(map(str, key))}: {type_text(info.annotation)}{shown} = {default}"


def default_text(value: Any) -> str:
    return "defaults" if isinstance(value, Section) else repr(value)


def field_lines() -> list[str]:
    """A line of each field, with the kinds of algorithm that have it so, unless all have."""
    kinds = {section: kind for kind, section in ALGORITHMS.items()}
    found: dict[str, list[str]] = {}
    for key, info, owner in owned_fields():
        found.setdefault(field_line(key, info), []).extend([kinds[owner]] if owner in kinds else [])

    def of_kinds(having: list[str]) -> str:
        lacking = [kind for kind in ALGORITHMS if kind not in having]
        few = f"not {', '.join(lacking)}" if len(lacking) < len(having) else ", ".join(having)
        return f" ({few})" if having and lacking else ""

    return [line + of_kinds(having) for line, having in found.items()]


def test_the_list_of_fields_is_frozen() -> None:
    frozen, lines = FROZEN.read_text().splitlines(), field_lines()
    change = [f"- {line}" for line in frozen if line not in lines]
    change += [f"+ {line}" for line in lines if line not in frozen]
    assert change == [], "the fields of posttrain/config/ changed; if that is meant, python tests/config/test_fields.py"
    assert frozen == lines


def read_names(tree: ast.AST) -> set[str]:
    """Attributes that a module or function reads; not methods that text has too, such as `line.split()`."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and not (id(node) in called and hasattr(str, node.attr))
        and not (isinstance(node.value, ast.Name) and node.value.id == "os")
    }


def test_every_field_is_read() -> None:
    """Outside of the configuration, itself or a property or method that is made of it."""
    read = set().union(*(read_names(ast.parse(path.read_text())) for path in READERS))
    sections = [ast.parse(path.read_text()) for path in (ROOT / "posttrain" / "config").glob("*.py")]
    functions = [node for tree in sections for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for _ in range(2):  # a property may read another
        read = read.union(*(read_names(function) for function in functions if function.name in read))
    assert sorted({str(key[-1]) for key, _ in config_fields()} - read) == [], "a field that nothing reads has no effect"


def test_every_field_that_must_be_given_says_what_it_is() -> None:
    silent = [".".join(map(str, key)) for key, info in config_fields() if info.is_required() and not info.description]
    assert silent == []


if __name__ == "__main__":
    FROZEN.write_text("\n".join(field_lines()) + "\n")
