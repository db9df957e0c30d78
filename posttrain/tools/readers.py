"""Readers of tool calls in JSON (Hermes, Llama 3, Mistral, DeepSeek, Phi), Python (Gemma 3, pythonic) and Gemma 4's own
notation."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
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
class WrittenCall:
    """Tool call as written."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """Identifier that the model wrote, in formats that have one."""


@dataclass(frozen=True)
class Malformed:
    """Tool call that cannot be read, as one line for the model."""

    line: str


Piece = str | WrittenCall | Malformed
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters, by the name of the tool."""
JSON_SPACE = re.compile(r"[ \t\n\r]*")


def skip_space(text: str, start: int) -> int:
    """Return the index of the first character from `start` on that is no white space of JSON."""
    space = JSON_SPACE.match(text, start)
    return start if space is None else space.end()


def read_json_value(text: str, start: int) -> tuple[Any, int] | Malformed:
    """Read the JSON value that begins at `start`, after white space, and return the index after it."""
    begin = skip_space(text, start)
    try:
        value, end = DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        near = one_line(text[begin : begin + 4 * SHOWN])
        return Malformed(f"{error.msg} at character {error.pos - begin} of the call: {near}")
    except (ValueError, RecursionError):
        return Malformed(f"not JSON: {one_line(text[begin : begin + 4 * SHOWN])}")
    fault = json_fault(value)
    return (value, end) if fault is None else Malformed(f"{fault}: {one_line(text[begin:end])}")


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


def call_of(value: Any, keys: Sequence[str]) -> WrittenCall | Malformed:
    """Read a call of the form {"name": ..., KEY: {...}}, KEY one of `keys`, the first of them that is there.

    Without any of them the call has no arguments.
    """
    if not isinstance(value, dict):
        return Malformed(f"a call must be an object with a name, got {one_line(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return Malformed(f'a call must have a text as "name", got {one_line(value)}')
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if not isinstance(arguments, dict):
        return Malformed(f'"{keys[0]}" of {name} must be an object, got {one_line(arguments)}')
    identifier = value.get("id")
    return WrittenCall(name, arguments, identifier if isinstance(identifier, str) else None)


def calls_of(value: Any, keys: Sequence[str]) -> Iterator[WrittenCall | Malformed]:
    """Read a call or a list of calls."""
    if isinstance(value, list):
        yield from (call_of(item, keys) for item in value)
    else:
        yield call_of(value, keys)


def one_line(value: Any) -> str:
    """Text in one line of limited length."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text[: 4 * SHOWN].split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _refuse(name: str) -> Any:
    raise ValueError(name)


DECODER = json.JSONDecoder(parse_constant=_refuse)


ARGUMENTS = ("arguments", "parameters")
PARAMETERS = ("parameters", "arguments")


def read_hermes(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Hermes, as of Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, several in a row."""
    yield from _tagged(text, "<tool_call>", "</tool_call>")


def read_phi(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Phi-4-mini: <|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>, or functools[...]."""
    before, listed, _ = text.partition("functools[")
    if listed and "<|tool_call|>" not in before:
        yield before
        yield from _list(text, len(before) + len("functools"))
    else:
        yield from _tagged(text, "<|tool_call|>", "<|/tool_call|>")


def read_mistral(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}], from Small 3.1 on
    [TOOL_CALLS]name[ARGS]{...} for each call, with [CALL_ID] before [ARGS] in some versions."""
    before, tag, rest = text.partition("[TOOL_CALLS]")
    yield before
    if rest.lstrip()[:1] in ("[", "{"):
        yield from _list(rest, 0)
    elif tag:
        yield from _named(rest)


def read_llama3(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Llama 3: a turn {"name": ..., "parameters": {...}}, several separated by `;`, or after <|python_tag|>, where
    built-in tools are name.call(key="value")."""
    before, tag, body = "", "", text
    if not LLAMA_CALL.match(text) and "<|python_tag|>" in text:
        before, tag, body = text.partition("<|python_tag|>")
    body = body.removesuffix("<|eom_id|>").removesuffix("<|eot_id|>")
    if body.lstrip()[:1] == "{":
        if not tag and not LLAMA_CALL.match(body):
            yield text
            return
        yield before
        yield from _separated(body)
    elif tag:
        yield before
        yield from python_calls(body, schemas)
    else:
        yield text


def read_deepseek(text: str, schemas: Schemas) -> Iterator[Piece]:
    """DeepSeek: V3.1 writes name, separator and JSON between its marks; V3 and R1 a type, separator, name, and JSON in
    a fence."""
    begin = text.find(DEEPSEEK_CALL)
    yield (text if begin < 0 else text[:begin]).replace("<｜tool▁calls▁begin｜>", "")
    while begin >= 0:
        start = begin + len(DEEPSEEK_CALL)
        call, stop = _headed(text, start, DEEPSEEK_HEAD, DEEPSEEK_FORM)
        end = DEEPSEEK_END.match(text, stop) if isinstance(call, WrittenCall) else None
        if end is not None:
            yield call
            stop = end.end()
        else:
            near = one_line(text[stop : stop + SHOWN])
            yield call if isinstance(call, Malformed) else Malformed(f"{DEEPSEEK_FORM}: {near!r}")
            stop = _after(text, start, "<｜tool▁call▁end｜>", DEEPSEEK_CALL)
        begin = text.find(DEEPSEEK_CALL, stop)
        yield text[stop : begin if begin >= 0 else len(text)].partition("<｜tool▁calls▁end｜>")[2]


LLAMA_CALL = re.compile(r'\s*\{\s*"(type|name|parameters|arguments|function)"\s*:')
MISTRAL_HEAD = re.compile(r"(?P<name>[^\[]*)(?:\[CALL_ID\](?P<id>[^\[]*))?\[ARGS\]")
SEPARATORS = re.compile(r"[;, \t\r\n]*")
DEEPSEEK_FORM = "a call must have <｜tool▁sep｜> and JSON after its name, and end with <｜tool▁call▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
DEEPSEEK_HEAD = re.compile(r"(?P<name>[^<{\n]{0,256})<｜tool▁sep｜>(?:(?P<fenced>[^<{\n]{1,256})\n```json\n)?")
DEEPSEEK_END = re.compile(r"\s*(?:```\s*)?<｜tool▁call▁end｜>")


def _tagged(text: str, opening: str, closing: str) -> Iterator[Piece]:
    """Text with JSON calls between tags. A tag inside a string of the JSON does not end the call."""
    position = 0
    while (begin := text.find(opening, position)) >= 0:
        yield text[position:begin]
        start = begin + len(opening)
        parsed = read_json_value(text, start)
        if isinstance(parsed, Malformed):
            yield parsed
        else:
            end = skip_space(text, parsed[1])
            if text.startswith(closing, end):
                yield from calls_of(parsed[0], ARGUMENTS)
                position = end + len(closing)
                continue
            yield Malformed(f"a call must end with {closing}")
        position = _after(text, start, closing, opening)
    yield text[position:]


def _after(text: str, start: int, closing: str, opening: str) -> int:
    """Index after a malformed call: after its closing mark, unless another one begins before that."""
    close, again = text.find(closing, start), text.find(opening, start)
    if close >= 0 and (again < 0 or close < again):
        return close + len(closing)
    return again if again >= 0 else len(text)


def _list(text: str, start: int) -> Iterator[Piece]:
    """List of calls, and the text after it."""
    parsed = read_json_value(text, start)
    if isinstance(parsed, Malformed):
        yield parsed
        return
    yield from calls_of(parsed[0], ARGUMENTS)
    yield text[parsed[1] :]


def _separated(text: str) -> Iterator[Piece]:
    """JSON calls one after another, separated by semicolons, commas or white space."""
    position = 0
    while position < len(text):
        parsed = read_json_value(text, position)
        if isinstance(parsed, Malformed):
            yield parsed
            return
        value, end = parsed
        function = value.get("function") if isinstance(value, dict) else None
        yield call_of(function if isinstance(function, dict) else value, PARAMETERS)
        separators = SEPARATORS.match(text, end)
        position = end if separators is None else separators.end()


def _named(text: str) -> Iterator[Piece]:
    """Calls of the form name[ARGS]{...}, with [TOOL_CALLS] between them."""
    position = again = 0
    while again >= 0:
        call, position = _headed(text, position, MISTRAL_HEAD, "a call must have [ARGS] between name and arguments")
        yield call
        again = text.find("[TOOL_CALLS]", position)
        rest = text[position : again if again >= 0 else len(text)]
        if isinstance(call, WrittenCall) and rest.strip():
            yield rest
        position = again + len("[TOOL_CALLS]")


def _headed(text: str, start: int, pattern: re.Pattern[str], form: str) -> tuple[WrittenCall | Malformed, int]:
    """Read a call whose name stands before the JSON of its arguments, and return the index after it. `form`: that of a
    call, for one without such a head."""
    head = pattern.match(text, start)
    if head is None:
        return Malformed(f"{form}: {one_line(text[start : start + SHOWN])!r}"), start
    parsed = read_json_value(text, head.end())
    if isinstance(parsed, Malformed):
        return parsed, head.end()
    groups = head.groupdict()
    name, identifier = groups.get("fenced") or groups["name"], (groups.get("id") or "").strip()
    call = call_of({"name": name.strip(), "arguments": parsed[0], "id": identifier or None}, ARGUMENTS)
    return call, parsed[1]


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
            yield Malformed(f"the fence of a call must end with ```: {one_line(body)}")
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
        yield Malformed(f"not Python{place}: {one_line(source)}")
        return
    for statement in tree.body:
        if isinstance(statement, ast.Expr | ast.Assign):
            yield from _calls(statement.value, schemas)
        else:
            yield Malformed(f"only calls can be made, not a {type(statement).__name__} statement")


def _json(text: str) -> Iterator[Piece]:
    parsed = read_json_value(text, 0)
    if isinstance(parsed, Malformed):
        yield parsed
        return
    yield from calls_of(parsed[0], KEYS)
    yield text[parsed[1] :]


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


def _call(name: str, node: ast.Call, schemas: Schemas) -> WrittenCall | Malformed:
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
    return WrittenCall(name, arguments) if fault is None else Malformed(f"{name}: {fault}")


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


GEMMA4_CALL, GEMMA4_END = "<|tool_call>", "<tool_call|>"
GEMMA4_QUOTE = '<|"|>'
"""Mark around texts, which nothing escapes within them."""
GEMMA4_HEAD = re.compile(r"\s*call:(?P<name>[^\s{}<>]{1,256})\s*(?=\{)")
GEMMA4_KEY = re.compile(r"[^\s:,{}\[\]<>\"]{1,256}")
GEMMA4_BARE = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null|None")


def read_gemma4(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Gemma 4: <|tool_call>call:name{key:value,...}<tool_call|>, several in a row. Texts stand in <|"|>, everything
    else is as in JSON; keys may be bare."""
    position = 0
    while (begin := text.find(GEMMA4_CALL, position)) >= 0:
        yield text[position:begin]
        start = begin + len(GEMMA4_CALL)
        call, stop = _gemma4_call(text, start)
        if isinstance(call, WrittenCall) and text.startswith(GEMMA4_END, stop):
            yield call
            position = stop + len(GEMMA4_END)
        else:
            yield call if isinstance(call, Malformed) else Malformed(f"a call must end with {GEMMA4_END}")
            position = _after(text, start, GEMMA4_END, GEMMA4_CALL)
    yield text[position:]


def _gemma4_call(text: str, start: int) -> tuple[WrittenCall | Malformed, int]:
    """Read a call behind its mark, and return the index after its arguments."""
    head = GEMMA4_HEAD.match(text, start)
    if head is None:
        return Malformed(f"a call must begin with call:name{{: {one_line(text[start : start + SHOWN])}"), start
    name = head["name"]
    try:
        arguments, stop = _gemma4_value(text, head.end(), MAX_DEPTH)
    except ValueError as error:
        return Malformed(f"{name}: {error}"), start
    fault = json_fault(arguments)
    if fault is not None:
        return Malformed(f"{name}: {fault}"), start
    return WrittenCall(name, arguments), skip_space(text, stop)


def _gemma4_value(text: str, start: int, depth: int) -> tuple[Any, int]:
    """Read the value that begins at `start`, and return the index after it. ValueError for anything else."""
    begin = skip_space(text, start)
    if depth == 0:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if text.startswith((GEMMA4_QUOTE, '"'), begin):
        return _gemma4_text(text, begin)
    if text[begin : begin + 1] in ("{", "["):
        return _gemma4_items(text, begin, depth)
    bare = GEMMA4_BARE.match(text, begin)
    if bare is None:
        raise ValueError(f"a text must stand in {GEMMA4_QUOTE}: {one_line(text[begin : begin + SHOWN])}")
    return None if bare.group() == "None" else json.loads(bare.group()), bare.end()


def _gemma4_text(text: str, begin: int) -> tuple[str, int]:
    """Read a text in its marks, or in JSON's, and return the index after it."""
    if text.startswith('"', begin):
        value, end = DECODER.raw_decode(text, begin)
        return str(value), end
    first = begin + len(GEMMA4_QUOTE)
    end = text.find(GEMMA4_QUOTE, first)
    if end < 0:
        raise ValueError(f"a text must end with {GEMMA4_QUOTE}: {one_line(text[begin : begin + 4 * SHOWN])}")
    return text[first:end], end + len(GEMMA4_QUOTE)


def _gemma4_items(text: str, begin: int, depth: int) -> tuple[Any, int]:
    """Read an object or a list, and return the index after it."""
    closing = "}" if text[begin] == "{" else "]"
    items: list[Any] = []
    keys: list[str] = []
    position = skip_space(text, begin + 1)
    while not text.startswith(closing, position):
        if items:
            if not text.startswith(",", position):
                raise ValueError(f"a comma or {closing} must follow: {one_line(text[position : position + SHOWN])}")
            position = skip_space(text, position + 1)
        if closing == "}":
            key, position = _gemma4_key(text, position)
            keys.append(key)
        item, position = _gemma4_value(text, position, depth - 1)
        items.append(item)
        position = skip_space(text, position)
    return (dict(zip(keys, items, strict=True)) if closing == "}" else items), position + 1


def _gemma4_key(text: str, position: int) -> tuple[str, int]:
    """Read a key and its colon, and return the index after them."""
    if text.startswith((GEMMA4_QUOTE, '"'), position):
        key, after = _gemma4_text(text, position)
    elif bare := GEMMA4_KEY.match(text, position):
        key, after = bare.group(), bare.end()
    else:
        raise ValueError(f"a name and a colon must come first: {one_line(text[position : position + SHOWN])}")
    after = skip_space(text, after)
    if not text.startswith(":", after):
        raise ValueError(f"a colon must follow {key!r}: {one_line(text[after : after + SHOWN])}")
    return key, after + 1
