"""Grammars of assistant turns with tool calls, for each format: calls that must be made, and arguments that fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.grammar import Grammar, GrammarError, json_rule
from posttrain.data.thoughts import HARMONY, Thought, ThoughtMarks, literal, mark_rule, without
from posttrain.data.tokenizer import Tokenizer
from posttrain.tools.formats import Format, value_types
from posttrain.tools.readers import GEMMA4_END, GEMMA4_KEY, GEMMA4_QUOTE

NOTES = {"type", "title", "description", "default", "examples", "deprecated", "nullable"}
"""Keywords of a schema that bare text obeys, whatever it is."""
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
FREE = r"/(?s:.+)/"
OTHERWISE = r"/\s*[^\s{\[](?s:.*)/"
"""Free text where calls are a turn that begins with a bracket."""


def tool_grammar(
    tool_format: Format,
    tokenizer: Tokenizer,
    *,
    name: str | None = None,
    required: bool = True,
    several: bool = True,
    in_thought: bool | None = None,
) -> Grammar:
    """Grammar of a turn that calls tools, which the format reads without a fault. Arguments fit the tools' schemas,
    with no others than are in them unless a schema has `additionalProperties`.

    `name`: the one tool that may be called; None: any. `required`: without calls the turn may be free text as well,
    which may also stand before them. `several`: more than one call. `in_thought`: the prompt ends within a thought;
    None: as a sample's prompt tells. A thought may come first; one that the prompt has opened ends before the calls.
    GrammarError for a tool that is not there and for a schema that cannot be written as a grammar in this format.
    """
    schemas = tool_format.schemas if name is None else {name: tool_format.schemas.get(name)}
    if not schemas or None in schemas.values():
        raise GrammarError(f"sampling.grammar: tools: there is no tool {name!r}; there are {[*tool_format.schemas]}")
    calls = {one: _closed(schema) for one, schema in schemas.items() if schema is not None}
    several = several and tool_format.name != "gpt_oss"
    turn = WRITERS[tool_format.name](_Rules(tokenizer, tool_format.name, several), calls)
    thought = Thought.of(tokenizer, tool_format.thought_marks, may_begin=True, head=False, is_open=in_thought)
    return turn.grammar(thought, required=required)


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of arguments: an object without others than it names, unless it says so."""
    return {"type": "object", "additionalProperties": False, **schema}


@dataclass(frozen=True)
class _Turn:
    """Rules of the calls of a turn."""

    rules: _Rules
    begin: str | None
    """Mark before the calls; None: they are the whole turn."""
    calls: str
    """All calls, behind the mark."""
    never: str
    """Regular expression of what the reader would take for the beginning of a call in free text."""
    text: str = FREE
    """Terminal of free text, beside `never`."""

    def grammar(self, thought: Thought, *, required: bool) -> Grammar:
        rules = self.rules
        first = "" if self.begin is None else rules.mark(self.begin)
        turn = f"{first} {self.calls}" + ("" if required else f" | {self._free_text(first, thought.marks)}")
        rules.lines.append(f"turn: {turn}")
        return Grammar("tools", "turn", "\n".join([*rules.lines, ""]), thought=thought).checked()

    def _free_text(self, first: str, marks: ThoughtMarks) -> str:
        """Alternatives of free text, alone and before calls."""
        rules = self.rules
        never = self.never if rules.format_name == "gpt_oss" else f"{literal(marks.begin[0])}|{self.never}"
        rules.lines.append(f"TEXT: {self.text} & {without(never)}")
        if rules.format_name == "gpt_oss":
            return f'{first} "final" {rules.mark("<|message|>")} TEXT? | TEXT?'
        if self.begin is None:
            return "TEXT?"
        if self.begin in rules.tokenizer.control_ids:
            return f"TEXT? | TEXT {first} {self.calls}"
        # One terminal: the lexer goes on while a text may be longer, and never back to where a mark began.
        rules.lines.append(f"TEXT_AND_MARK: TEXT {first}")
        return f"TEXT? | TEXT_AND_MARK {self.calls}"


class _Rules:
    """Rules of one grammar."""

    def __init__(self, tokenizer: Tokenizer, format_name: str, several: bool):
        self.tokenizer, self.format_name, self.several = tokenizer, format_name, several
        self.lines: list[str] = []

    def add(self, body: str) -> str:
        """Add a rule, and return its name."""
        self.lines.append(f"rule_{len(self.lines)}: {body}")
        return f"rule_{len(self.lines) - 1}"

    def text_before(self, end: str) -> str:
        """Right side of any text that ends with a mark of the format, and that mark."""
        mark = self.mark(end)
        self.lines.append(f"VALUE: {without(literal(end))}")
        if end in self.tokenizer.control_ids:
            return f"VALUE? {mark}"
        # One terminal: the lexer goes on while a text may be longer, and never back to where a mark began.
        self.lines.append(f"VALUE_AND_MARK: VALUE {mark}")
        return "VALUE_AND_MARK"

    def mark(self, text: str) -> str:
        """Mark of the format: its control token, or its text where there is none."""
        return mark_rule(self.tokenizer, text)

    def any_of(self, calls: Mapping[str, dict[str, Any]], write: Callable[[str, dict[str, Any]], str]) -> str:
        """Rule of a call of any of the tools."""
        return self.add(" | ".join(self.add(write(name, schema)) for name, schema in calls.items()))

    def listed(self, call: str, separator: str) -> str:
        """One call, or several."""
        between = json.dumps(separator) if separator else ""
        return f"{call} ({between} {call})*" if self.several else call

    def marked(self, call: str) -> str:
        """Calls between <tool_call> and </tool_call>, behind the first of these marks."""
        begin, one = self.mark("<tool_call>"), self.add(f'"\\n" {call} "\\n" {self.mark("</tool_call>")}')
        return f'{one} ("\\n" {begin} {one})*' if self.several else one

    def json_call(self, key: str) -> Callable[[str, dict[str, Any]], str]:
        """Writer of {"name": ..., KEY: {...}}."""

        def write(name: str, schema: dict[str, Any]) -> str:
            head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
            return f'{json.dumps(head)} {json_rule(schema)} "}}"'

        return write

    def python_call(self, name: str, schema: dict[str, Any]) -> str:
        """name(key=value, ...): literals in JSON's form, which the reader takes."""
        self._check_names(name, schema)
        values = {key: self.add(f'"{key}=" {json_rule(one)}') for key, one in self.properties(schema).items()}
        return f'"{name}(" {self.in_order(values, schema.get("required", ()))} ")"'

    def in_order(self, items: Mapping[str, str], required: Sequence[str], comma: str = ", ") -> str:
        """Items in their order with commas between them, those that are not required also without them."""
        first = after = ""
        for key, item in reversed([*items.items()]):
            begun, going = f"{item} {after}".strip(), f'"{comma}" {item} {after}'.strip()
            if key in required:
                first, after = self.add(begun), self.add(going)
            else:
                first = self.add(f"{begun} | {first}" if first else f"({begun})?")
                after = self.add(f"{going} | {after}" if after else f"({going})?")
        return first

    def properties(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Schema of each argument, with the definitions that it may refer to."""
        shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        unknown = set(schema) - {"type", "properties", "required", "additionalProperties", "$schema", *NOTES, *shared}
        if unknown or schema.get("additionalProperties") not in (False, None):
            what = ", ".join(sorted(unknown)) or "additionalProperties"
            raise self.refuse(f"{what} of arguments cannot be told")
        given = schema.get("properties", {})
        return {key: {**shared, **({} if one is True else one)} for key, one in given.items()}

    def refuse(self, why: str) -> GrammarError:
        return GrammarError(
            f"sampling.grammar: tools: in the format {self.format_name} {why}; use another model or schema"
        )

    def _check_names(self, name: str, schema: Mapping[str, Any]) -> None:
        for one in (name, *schema.get("properties", ())):
            if not IDENTIFIER.fullmatch(one):
                raise self.refuse(f"{one!r} is no name")


def _hermes(rules: _Rules, calls: Mapping[str, dict[str, Any]]) -> _Turn:
    call = rules.any_of(calls, rules.json_call("arguments"))
    return _Turn(rules, "<tool_call>", rules.marked(call), "<tool_call>")


def _qwen_coder(rules: _Rules, calls: Mapping[str, dict[str, Any]]) -> _Turn:
    end = r"\n</parameter>\n"
    rules.lines += [f"VALUE: {without(literal('</parameter>'))}", f'VALUE_AND_MARK: VALUE "{end}"']

    def write(name: str, schema: dict[str, Any]) -> str:
        required, parts = schema.get("required", ()), []
        for key, one in rules.properties(schema).items():
            if not re.fullmatch(r"[^<>\n]+", key):
                raise rules.refuse(f"{key!r} is no name")
            value = _bare_value(rules, f"{name}.{key}", one, "</parameter>")
            value = "VALUE_AND_MARK" if value is None else f'{value} "{end}"'
            part = rules.add(f"{json.dumps(f'<parameter={key}>' + chr(10))} {value}")
            parts.append(part if key in required else f"{part}?")
        return " ".join([json.dumps(f"<function={name}>\n"), *parts, '"</function>"'])

    return _Turn(rules, "<tool_call>", rules.marked(rules.any_of(calls, write)), "<tool_call>|<function=")


def _bare_value(rules: _Rules, where: str, schema: Mapping[str, Any], end: str) -> str | None:
    """Right side of a value in bare text: one of some texts, of another type JSON; None for any text."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices and all(isinstance(one, str) and one and end not in one for one in choices):
        return f"({' | '.join(map(json.dumps, choices))})"
    if "string" not in value_types(schema) and not any(isinstance(one, str) for one in choices or ()):
        return json_rule(schema)
    if unknown := sorted({*schema} - NOTES - {"$defs", "definitions"}):
        raise rules.refuse(f"{', '.join(unknown)} of the text {where} cannot be told")
    return None


def _glm(rules: _Rules, calls: Mapping[str, dict[str, Any]]) -> _Turn:
    key_begin, key_end, begin, end = (
        rules.mark(f"<{one}>") for one in ("arg_key", "/arg_key", "arg_value", "/arg_value")
    )
    text = rules.text_before("</arg_value>")

    def write(name: str, schema: dict[str, Any]) -> str:
        required, parts = schema.get("required", ()), []
        for key, one in rules.properties(schema).items():
            if not re.fullmatch(r"[^<>\n]+", key):
                raise rules.refuse(f"{key!r} is no name")
            value = _bare_value(rules, f"{name}.{key}", one, "</arg_value>")
            value = text if value is None else f"{value} {end}"
            part = rules.add(f'{key_begin} {json.dumps(key)} {key_end} "\\n" {begin} {value} "\\n"')
            parts.append(part if key in required else f"{part}?")
        return " ".join([json.dumps(f"{name}\n"), *parts, rules.mark("</tool_call>")])

    call, begin_call = rules.any_of(calls, write), rules.mark("<tool_call>")
    several = f'{call} ("\\n" {begin_call} {call})*' if rules.several else call
    return _Turn(rules, "<tool_call>", several, "<tool_call>")


def _gemma4(rules: _Rules, calls: Mapping[str, dict[str, Any]]) -> _Turn:
    quote = rules.mark(GEMMA4_QUOTE)
    text = f"{quote} {rules.text_before(GEMMA4_QUOTE)}"

    def value(where: str, schema: Any) -> str:
        """Right side of a value: texts in their marks, lists and objects of such; others are JSON."""
        types = value_types(schema)
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices and all(isinstance(one, str) and one and GEMMA4_QUOTE not in one for one in choices):
            return f"{quote} ({' | '.join(map(json.dumps, choices))}) {quote}"
        if types and types <= {"integer", "number", "boolean", "null"}:
            return json_rule(schema)
        if types == {"string"} and not {*schema} - NOTES - {"$defs", "definitions"}:
            return text
        if types == {"array"} and isinstance(schema.get("items"), Mapping) and not {*schema} - NOTES - {
            "items", "maxItems", "$defs", "definitions",
        }:  # fmt: skip
            item, most = rules.add(value(f"{where}[]", schema["items"])), schema.get("maxItems")
            if most == 0:
                return '"[]"'
            return f'"[" ({item} ("," {item}){"*" if most is None else f"{{0,{most - 1}}}"})? "]"'
        if types == {"object"} and "properties" in schema:
            return members(where, _closed(schema))
        raise rules.refuse(f"the schema of {where} cannot be told")

    def members(where: str, schema: dict[str, Any]) -> str:
        items = {}
        for key, one in rules.properties(schema).items():
            if not GEMMA4_KEY.fullmatch(key):
                raise rules.refuse(f"{key!r} is no name")
            one = _resolved(one)
            items[key] = rules.add(f"{json.dumps(f'{key}:')} {value(f'{where}.{key}', one)}")
        return f'"{{" {rules.in_order(items, schema.get("required", ()), ",")} "}}"'

    call = rules.any_of(calls, lambda name, schema: f"{json.dumps(f'call:{name}')} {members(name, schema)}")
    begin, end = rules.mark("<|tool_call>"), rules.mark(GEMMA4_END)
    several = f"{call} {end} ({begin} {call} {end})*" if rules.several else f"{call} {end}"
    return _Turn(rules, "<|tool_call>", several, r"<\|tool_call>")


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Schema in place of a reference to a definition."""
    reference = str(schema.get("$ref", ""))
    kind, _, name = reference.removeprefix("#/").partition("/")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    target = shared.get(kind, {}).get(name) if reference else None
    return schema if target is None else {**shared, **target}


def _llama3(rules: _Rules, calls: Mapping[str, dict[str, Any]]) -> _Turn:
    call = rules.any_of(calls, rules.json_call("parameters"))
    return _Turn(rules, None, rules.listed(call, "; "), r"<\|python_tag\|>", OTHERWISE)


def _mistral(rules: _Rules, calls: Mapping[str, dict[str, Any]]) -> _Turn:
    """[TOOL_CALLS] with a list, or before each call where the tokenizer has [ARGS]."""
    begin, args = "[TOOL_CALLS]", "[ARGS]"
    if args in rules.tokenizer.control_ids:
        call = rules.any_of(calls, lambda name, schema: f"{json.dumps(name)} {rules.mark(args)} {json_rule(schema)}")
        several = f"{call} ({rules.mark(begin)} {call})*" if rules.several else call
    else:
        several = f'"[" {rules.listed(rules.any_of(calls, rules.json_call("arguments")), ", ")} "]"'
    return _Turn(rules, begin, several, literal(begin))


def _phi(rules: _Rules, calls: Mapping[str, dict[str, Any]]) -> _Turn:
    call = rules.any_of(calls, rules.json_call("arguments"))
    several = f'"[" {rules.listed(call, ", ")} "]" {rules.mark("<|/tool_call|>")}'
    return _Turn(rules, "<|tool_call|>", several, r"<\|tool_call\|>|functools\[")


def _deepseek(rules: _Rules, calls: Mapping[str, dict[str, Any]]) -> _Turn:
    """V3.1's form, or that of V3 and R1 where the template writes it."""
    begin, separator, end = (rules.mark(f"<｜tool▁{one}｜>") for one in ("call▁begin", "sep", "call▁end"))
    fenced = "```json" in str(rules.tokenizer.hf.chat_template)

    def write(name: str, schema: dict[str, Any]) -> str:
        if fenced:
            head = f'{begin} "function" {separator} {json.dumps(f"{name}" + chr(10) + "```json" + chr(10))}'
            return f'{head} {json_rule(schema)} "\\n```" {end}'
        return f"{begin} {json.dumps(name)} {separator} {json_rule(schema)} {end}"

    call = rules.any_of(calls, write)
    several = rules.listed(call, "\n" if fenced else "")
    return _Turn(rules, "<｜tool▁calls▁begin｜>", f"{several} {rules.mark('<｜tool▁calls▁end｜>')}", "<｜tool▁call")


def _gpt_oss(rules: _Rules, calls: Mapping[str, dict[str, Any]]) -> _Turn:
    def write(name: str, schema: dict[str, Any]) -> str:
        head = json.dumps(f"commentary to=functions.{name} ")
        return f'{head} {rules.mark("<|constrain|>")} "json" {rules.mark("<|message|>")} {json_rule(schema)}'

    return _Turn(rules, "<|channel|>", rules.any_of(calls, write), HARMONY)


def _gemma(rules: _Rules, calls: Mapping[str, dict[str, Any]]) -> _Turn:
    call = rules.any_of(calls, rules.python_call)
    several = f'"\\n" {rules.listed(call, chr(10))} "\\n```"'
    return _Turn(rules, "```tool_code", several, "```(tool_|json)", OTHERWISE)


def _pythonic(rules: _Rules, calls: Mapping[str, dict[str, Any]]) -> _Turn:
    call = rules.any_of(calls, rules.python_call)
    return _Turn(rules, None, f'"[" {rules.listed(call, ", ")} "]"', "<think>", OTHERWISE)


WRITERS: Mapping[str, Callable[[_Rules, Mapping[str, dict[str, Any]]], _Turn]] = {
    "hermes": _hermes,
    "qwen_coder": _qwen_coder,
    "llama3": _llama3,
    "mistral": _mistral,
    "gemma": _gemma,
    "gemma4": _gemma4,
    "glm": _glm,
    "deepseek": _deepseek,
    "gpt_oss": _gpt_oss,
    "phi": _phi,
    "pythonic": _pythonic,
}
