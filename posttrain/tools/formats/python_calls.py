"""Formats whose calls are Python: Gemma 3, by its documents, and lists of calls (pythonic)."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from typing import Any

from posttrain.tools.formats.pieces import Call, Malformed, Piece, Schemas, calls_of, json_fault, read_json, shown

FENCE = re.compile(r"```(?P<kind>tool_code|tool_call|json)[ \t]*\n(?P<body>.*?)(?P<end>\n[ \t]*```|\Z)", re.DOTALL)
LIST = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")
OBJECT = re.compile(r'\s*(?:\[\s*)?\{\s*"name"\s*:')
KEYS = ("parameters", "arguments")
NAMES = {"true": True, "false": False, "null": None}


def read_gemma(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Gemma 3: Python calls in a fence ```tool_code, a list [name(key=value), ...] or JSON {"name": ...,
    "parameters": {...}}, which may stand in a fence ```json."""
    position = 0
    for fence in FENCE.finditer(text):
        body = fence["body"]
        if fence["kind"] == "json" and not OBJECT.match(body):
            continue
        yield text[position : fence.start()]
        position = fence.end()
        closed = bool(fence["end"]) or body.rstrip().endswith("```")
        body = body if fence["end"] else body.rstrip().removesuffix("```")
        if not closed:
            yield Malformed(f"the fence of a call must end with ```: {shown(body)}")
        elif OBJECT.match(body):
            yield from _json(body)
        else:
            yield from python_calls(body, schemas)
    rest = text[position:]
    if position == 0 and LIST.match(text):
        yield from python_calls(text, schemas)
    elif position == 0 and OBJECT.match(text):
        yield from _json(text)
    else:
        yield rest


def read_pythonic(text: str, schemas: Schemas) -> Iterator[Piece]:
    """List of Python calls as a whole turn: [name(key=value), ...]."""
    if LIST.match(text):
        yield from python_calls(text, schemas)
    else:
        yield text


def python_calls(source: str, schemas: Schemas) -> Iterator[Piece]:
    """Calls with literal arguments in Python source: alone, in a list, assigned, or inside print()."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strings with \d and the like
            tree = ast.parse(source.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        yield Malformed(f"not Python{place}: {shown(source)}")
        return
    for statement in tree.body:
        if isinstance(statement, ast.Expr | ast.Assign):
            yield from _calls(statement.value, schemas)
        else:
            yield Malformed(f"only calls can be made, not a {type(statement).__name__} statement")


def _json(text: str) -> Iterator[Piece]:
    found = read_json(text, 0)
    if isinstance(found, Malformed):
        yield found
        return
    yield from calls_of(found[0], KEYS)
    yield text[found[1] :]


def _calls(node: ast.expr, schemas: Schemas) -> Iterator[Piece]:
    if isinstance(node, ast.List | ast.Tuple):
        for item in node.elts:
            yield from _calls(item, schemas)
    elif isinstance(node, ast.Call):
        name = _dotted(node.func)
        if name == "print" and name not in schemas and len(node.args) == 1:
            yield from _calls(node.args[0], schemas)
        else:
            yield _call(name, node, schemas)
    else:
        yield Malformed("only calls with literal arguments can be made")


def _call(name: str, node: ast.Call, schemas: Schemas) -> Call | Malformed:
    name = name.removesuffix(".call") if name not in schemas else name
    order = list(schemas.get(name, {}).get("properties", {}))
    if not name or len(node.args) > len(order) or any(key.arg is None for key in node.keywords):
        return Malformed(f"arguments of {name or 'a call'} must be given as name=value")
    try:
        arguments = {key: _literal(value) for key, value in zip(order, node.args, strict=False)}
        for keyword in node.keywords:
            assert keyword.arg is not None
            if keyword.arg in arguments:
                return Malformed(f"{name} has {keyword.arg} twice")
            arguments[keyword.arg] = _literal(keyword.value)
    except (ValueError, RecursionError):
        return Malformed(
            f"arguments of {name} must be literals: numbers, texts, lists, dictionaries, True, False, None"
        )
    fault = json_fault(arguments)
    return Call(name, arguments) if fault is None else Malformed(f"{name}: {fault}")


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr) -> Any:
    """Evaluate a literal, JSON's words for True, False and None included. ValueError for everything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in NAMES:
        return NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys must be texts")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    raise ValueError("not a literal")
