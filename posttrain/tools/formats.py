"""Formats of tool calls by name: readers of tags and channels, detection from a chat template, and writers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from posttrain.data.thoughts import GEMMA4_MARKS, HARMONY_MARKS, THINK_MARKS, ThoughtMarks
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError, did_you_mean
from posttrain.tools.readers import (
    GEMMA4_CALL,
    GEMMA4_END,
    GEMMA4_KEY,
    GEMMA4_QUOTE,
    Malformed,
    Piece,
    Schemas,
    WrittenCall,
    call_of,
    json_fault,
    one_line,
    read_deepseek,
    read_gemma,
    read_gemma4,
    read_hermes,
    read_json_value,
    read_llama3,
    read_mistral,
    read_phi,
    read_pythonic,
)
from posttrain.tools.types import ParsedTurn, ToolCall

FUNCTION = re.compile(r"<function=([^<>\n]*)>")
PARAMETER, PARAMETER_END = re.compile(r"\s*<parameter=([^<>\n]*)>\n?"), "</parameter>"
AFTER_PARAMETER = re.compile(r"\s*<(?:parameter=|/function>)")
FUNCTION_END, TOOL_CALL_END = re.compile(r"\s*</function>"), re.compile(r"\s*</tool_call>")
GLM_KEY, GLM_VALUE_END = re.compile(r"\s*<arg_key>([^<>\n]*)</arg_key>\s*<arg_value>"), "</arg_value>"
AFTER_GLM_VALUE = re.compile(r"\s*(?:<arg_key>|</tool_call>)")
GLM_NAME = re.compile(r"\s*([^<>\n]{1,256})")
WORDS = {"True": True, "False": False, "None": None}
RECIPIENT = re.compile(r"to=([^\s<]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
HARMONY_BODY, HARMONY_END = re.compile(r"<\|(message|start)\|>"), re.compile(r"<\|(?:end|call|return|start)\|>")


def read_qwen_coder(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Qwen3-Coder: <function=name> with a <parameter=key> for each argument, in <tool_call>, which it may leave out.

    Values are bare text, so the tool's schema tells texts from numbers, lists and objects. A value ends where the next
    parameter or the end of the function follows.
    """
    position = 0
    while (opening := FUNCTION.search(text, position)) is not None:
        yield text[position : opening.start()].rstrip().removesuffix("<tool_call>")
        parsed = _tagged_call(opening[1].strip(), text, opening.end(), schemas, CODER_TAGS)
        if isinstance(parsed, Malformed):
            yield parsed
            end = text.find("</function>", opening.end())
            position = len(text) if end < 0 else end + len("</function>")
        else:
            call, position = parsed
            yield call
        after = TOOL_CALL_END.match(text, position)
        position = position if after is None else after.end()
    before, tag, inside = text[position:].partition("<tool_call>")
    yield before
    if tag:
        yield Malformed(f"a call must begin with <function=name>: {one_line(inside)}")


def read_glm(text: str, schemas: Schemas) -> Iterator[Piece]:
    """GLM-4.5 and later: the name in <tool_call>, then <arg_key> and <arg_value> for each argument, with or without
    line breaks between them. Values are bare text, of which the tool's schema tells the type."""
    position = 0
    while (begin := text.find("<tool_call>", position)) >= 0:
        yield text[position:begin].rstrip() if position else text[position:begin]
        start = begin + len("<tool_call>")
        name = GLM_NAME.match(text, start)
        if name is None:
            parsed: tuple[WrittenCall, int] | Malformed = Malformed("a call must begin with the name of a function")
        else:
            parsed = _tagged_call(name[1].strip(), text, name.end(), schemas, GLM_TAGS)
        if isinstance(parsed, Malformed):
            yield parsed
            end = text.find("</tool_call>", start)
            position = len(text) if end < 0 else end + len("</tool_call>")
        else:
            call, position = parsed
            yield call
    yield text[position:]


class Tags(NamedTuple):
    """Tags of a call with bare values."""

    parameter: re.Pattern[str]
    """Beginning of an argument, its key the first group."""
    value_end: str
    after_value: re.Pattern[str]
    """Text that must follow the end of a value, so that it is one."""
    end: re.Pattern[str]
    line: str
    """Line break before the end of a value that is not part of it."""
    form: str


CODER_TAGS = Tags(
    PARAMETER, PARAMETER_END, AFTER_PARAMETER, FUNCTION_END, "\n",
    "<parameter=name>, value, </parameter>, and at the end </function>",
)  # fmt: skip
GLM_TAGS = Tags(
    GLM_KEY, GLM_VALUE_END, AFTER_GLM_VALUE, TOOL_CALL_END, "",
    "<arg_key>name</arg_key>, <arg_value>value</arg_value>, and at the end </tool_call>",
)  # fmt: skip


def _tagged_call(name: str, text: str, start: int, schemas: Schemas, tags: Tags) -> tuple[WrittenCall, int] | Malformed:
    """Read the parameters of a function, and return the index after its end."""
    properties = schemas.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    position = start
    while (parameter := tags.parameter.match(text, position)) is not None:
        key, stop = parameter[1].strip(), text.find(tags.value_end, parameter.end())
        while stop >= 0 and tags.after_value.match(text, stop + len(tags.value_end)) is None:
            stop = text.find(tags.value_end, stop + 1)
        if stop < 0:
            break
        arguments[key] = _typed(text[parameter.end() : stop].removesuffix(tags.line), properties.get(key))
        position = stop + len(tags.value_end)
    end = tags.end.match(text, position)
    if end is None:
        return Malformed(f"after {name} must come {tags.form}, got {one_line(text[position:])!r}")
    fault = json_fault(arguments)
    call = call_of({"name": name, "arguments": arguments}, ("arguments",))
    if fault is not None or isinstance(call, Malformed):
        return call if isinstance(call, Malformed) else Malformed(f"{name}: {fault}")
    return call, end.end()


def _typed(text: str, schema: Any) -> Any:
    """Read a bare value as the schema's type: text stays text, unless only another type fits; without a schema JSON
    where it is JSON."""
    types = value_types(schema)
    if "string" in types:
        return None if text in ("None", "null") and ("null" in types) else text
    if text in WORDS:
        return WORDS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def value_types(schema: Any) -> set[str]:
    """Types that a schema allows; empty if it does not tell."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    for key in ("anyOf", "oneOf"):
        types = types.union(*(value_types(option) for option in schema.get(key, ())))
    return types | ({"null"} if schema.get("nullable") else set())


def read_gpt_oss(text: str, schemas: Schemas) -> Iterator[Piece]:
    """GPT-OSS (Harmony): messages in channels. Calls are to=functions.name in the header, JSON in the body; the text
    is that of the channel final, and of commentary to the user."""
    if "<|message|>" not in text and "<|channel|>" not in text:
        yield text
        return
    position = 0
    while (mark := HARMONY_BODY.search(text, position)) is not None:
        header, start = text[position : mark.start()], mark.end()
        recipient, channel = RECIPIENT.search(header), CHANNEL.search(header)
        if mark[1] == "start":
            yield from () if recipient is None else (_no_arguments(recipient[1]),)
            position = start
            continue
        if recipient is not None:
            call, start = _harmony_call(recipient[1], text, start)
            yield call
        end = HARMONY_END.search(text, start)
        if recipient is None and (channel is None or channel[1] != "analysis"):
            yield text[start : len(text) if end is None else end.start()]
        following = -1 if end is None else text.find("<|start|>", end.start())
        if following < 0:
            return
        position = following + len("<|start|>")
    if (recipient := RECIPIENT.search(text, position)) is not None:
        yield _no_arguments(recipient[1])


def _no_arguments(recipient: str) -> Malformed:
    return Malformed(f"a call to {recipient} must have its arguments after <|message|>")


def _harmony_call(recipient: str, text: str, start: int) -> tuple[WrittenCall | Malformed, int]:
    """Read a call whose arguments begin at `start`, and return the index after them."""
    parsed = read_json_value(text, start)
    if isinstance(parsed, Malformed):
        return parsed, start
    end = HARMONY_END.search(text, parsed[1])
    if text[parsed[1] : len(text) if end is None else end.start()].strip():
        return Malformed(
            f"arguments of {recipient} must be one object, got {one_line(text[start : start + 320])}"
        ), start
    return call_of({"name": recipient.removeprefix("functions."), "arguments": parsed[0]}, ("arguments",)), parsed[1]


Reader = Callable[[str, Schemas], Iterator[Piece]]

FORMATS: Mapping[str, Reader] = {
    "hermes": read_hermes,
    "qwen_coder": read_qwen_coder,
    "llama3": read_llama3,
    "mistral": read_mistral,
    "gemma": read_gemma,
    "gemma4": read_gemma4,
    "glm": read_glm,
    "deepseek": read_deepseek,
    "gpt_oss": read_gpt_oss,
    "phi": read_phi,
    "pythonic": read_pythonic,
}

MARKS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("gpt_oss", ("<|channel|>", "<|message|>")),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen_coder", ("<tool_call>", "<function=")),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("gemma4", (f"{GEMMA4_CALL}call:",)),
    ("hermes", ("<tool_call>", '"arguments"')),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
    ("phi", ("<|tool|>",)),
    ("gemma", ("<start_of_turn>",)),
)
"""Texts in the chat templates of each format, the first one whose texts are all there."""
OPENINGS: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "qwen_coder": ("<tool_call>", "<function="),
    "llama3": ("{", "<|python_tag|>"),
    "mistral": ("[TOOL_CALLS]",),
    "gemma": ("```",),
    "gemma4": (GEMMA4_CALL,),
    "glm": ("<tool_call>",),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "phi": ("<|tool_call|>",),
    "pythonic": ("[",),
}
"""Texts with which calls may begin, by format; before the first of them a turn is text."""
ENDINGS: Mapping[str, str] = {
    "hermes": "</tool_call>",
    "qwen_coder": "</function>",
    "gemma4": GEMMA4_END,
    "glm": "</tool_call>",
    "deepseek": "<｜tool▁call▁end｜>",
}
"""End of a call in formats in which nothing that follows can change it."""
PRIVATE_USE = range(0xE000, 0xF900)
"""Characters of which one stands for the end of a thought while calls are read."""
MAX_MALFORMED = 32
"""Maximum number of malformed calls of a turn; after them nothing is read."""
ID_CHARACTERS = 9
"""Length of identifiers, which Mistral's templates prescribe."""


@dataclass(frozen=True)
class Format:
    """Format in which a family of models writes tool calls, for a set of tools."""

    name: str
    schemas: Schemas

    @property
    def thought_marks(self) -> ThoughtMarks:
        """Marks of a thought before the calls."""
        return {"gemma4": GEMMA4_MARKS, "gpt_oss": HARMONY_MARKS}.get(self.name, THINK_MARKS)

    def parse(self, text: str) -> ParsedTurn:
        """Parse an assistant turn, decoded with its special tokens but without its stop token. Never raises.

        Calls that are considered inside <think>...</think>, whose beginning may be in the prompt, are not made. Time is
        linear in the text. Identifiers are those of the model, or
        digests of the turn.
        """
        thought = self._thought(text)
        pieces = self._pieces(text[len(thought) :])
        calls = [piece for piece in pieces if isinstance(piece, WrittenCall)]
        malformed = [piece.line for piece in pieces if isinstance(piece, Malformed)]
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        if calls or malformed:
            content = content.strip()
        of_turn = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        return ParsedTurn(
            content=f"{thought}{content}",
            calls=[
                ToolCall(id=_identifier(call, i, of_turn), name=call.name, arguments=call.arguments)
                for i, call in enumerate(calls)
            ],
            malformed=malformed,
        )

    def _pieces(self, text: str) -> list[Piece]:
        """Pieces of a text. Each malformed call may search all of it for its end, so that only so many are read."""
        pieces: list[Piece] = []
        left = MAX_MALFORMED
        for piece in FORMATS[self.name](text, self.schemas):
            pieces.append(piece)
            left -= isinstance(piece, Malformed)
            if not left:
                return [*pieces, Malformed(f"nothing is read after {MAX_MALFORMED} calls that cannot be read")]
        return pieces

    def _thought(self, text: str) -> str:
        """Beginning of a turn up to the first end of a thought that is not in an argument; all of a thought without an
        end."""
        begin, end = self.thought_marks.begin[0], self.thought_marks.end[0]
        parts = [] if self.name == "gpt_oss" else text.split(end)
        if len(parts) > 1:
            mark = next(character for character in map(chr, PRIVATE_USE) if character not in text)
            marked = "".join(f"{part}{mark}{number}{mark}" for number, part in enumerate(parts[:-1])) + parts[-1]
            calls = [
                json.dumps(one.arguments, ensure_ascii=False)
                for one in self._pieces(marked)
                if type(one) is WrittenCall
            ]
            inside = set(map(int, re.findall(f"{mark}([0-9]+){mark}", "".join(calls))))
            for number in range(len(parts) - 1):
                if number not in inside:
                    return end.join([*parts[: number + 1], ""])
        return text if parts and text.lstrip().startswith(begin) else ""


def make_format(name: str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> Format:
    """Make the format of that name, `auto` for the one of the tokenizer's chat template. `tools`: schemas of the tools.

    ConfigError for an unknown name, for a template whose format is not known, and for parameters that are no schema.
    """
    functions = [tool["function"] for tool in tools]
    schemas = {f["name"]: _checked_schema(f.get("parameters"), f"tools: parameters of {f['name']}") for f in functions}
    return Format(format_name(name, tokenizer), schemas)


def _checked_schema(schema: Any, at: str) -> Any:
    """Schema, `{}` for none. ConfigError where what readers and grammars look into is of another type."""
    if schema is None:
        return {}
    if not isinstance(schema, Mapping):
        raise ConfigError(f"{at} is {str(schema)[:60]!r}; it must be a JSON schema, an object")

    def check(key: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{at}.{key} is {str(schema[key])[:60]!r}; it must be {rule}")

    def of_texts(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)

    check("type", isinstance(schema.get("type", ""), str) or of_texts(schema["type"]), "a text or a list of texts")
    check("required", of_texts(schema.get("required", [])), "a list of texts")
    for key in ("enum", "anyOf", "oneOf", "allOf"):
        check(key, isinstance(schema.get(key, []), list), "a list")
    for key in ("properties", "$defs", "definitions"):
        check(key, isinstance(schema.get(key, {}), Mapping), "an object")
    # A schema may be true or false as well, which allow all and nothing.
    inner = [(key, one) for name in ("properties", "$defs", "definitions") for key, one in schema.get(name, {}).items()]
    inner += [(key, one) for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, [])]
    inner += [("items", schema["items"])] if isinstance(schema.get("items"), Mapping) else []
    for key, one in inner:
        if not isinstance(one, bool):
            _checked_schema(one, f"{at}.{key}")
    return schema


def format_name(name: str, tokenizer: Tokenizer) -> str:
    """Resolve `auto` to the format of the tokenizer's chat template. ConfigError as `make_format`."""
    if name != "auto" and name not in FORMATS:
        raise ConfigError(f"tool_format={name}: no such format{did_you_mean(name, FORMATS)}; use {_names()}")
    if name != "auto":
        return name
    template = tokenizer.hf.chat_template
    texts = list(template.values()) if isinstance(template, dict) else [template or ""]
    for detected, marks in MARKS:
        if any(all(mark in _unescaped(text) for mark in marks) for text in texts):
            return detected
    raise ConfigError(
        f"tool_format=auto: the chat template of {tokenizer.name} has no known form of tool calls; set tool_format to "
        f"{_names()}"
    )


def _names() -> str:
    return f"{', '.join(list(FORMATS)[:-1])} or {list(FORMATS)[-1]}"


def _unescaped(template: str) -> str:
    return template.replace('\\"', '"')


def _identifier(call: WrittenCall, index: int, of_turn: str) -> str:
    if call.id is not None and len(call.id) == ID_CHARACTERS and call.id.isalnum():
        return call.id
    return hashlib.sha256(f"{index} {of_turn}".encode()).hexdigest()[:ID_CHARACTERS]


Writer = Callable[[Sequence[WrittenCall]], str]


def write_calls(name: str, calls: Sequence[WrittenCall]) -> str:
    """Write calls in the format of that name, so that its reader finds them again. Formats with one call in a turn
    (gpt_oss) take one."""
    return WRITERS[name](calls)


def _hermes(calls: Sequence[WrittenCall]) -> str:
    return "\n".join(f"<tool_call>\n{_named(call, 'arguments')}\n</tool_call>" for call in calls)


def _qwen_coder(calls: Sequence[WrittenCall]) -> str:
    return "\n".join(f"<tool_call>\n<function={call.name}>\n{_tags(call)}</function>\n</tool_call>" for call in calls)


def _tags(call: WrittenCall) -> str:
    texts = {key: value if isinstance(value, str) else _json(value) for key, value in call.arguments.items()}
    return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())


def _glm(calls: Sequence[WrittenCall]) -> str:
    return "\n".join(f"<tool_call>{call.name}\n{_glm_tags(call)}</tool_call>" for call in calls)


def _glm_tags(call: WrittenCall) -> str:
    texts = {key: value if isinstance(value, str) else _json(value) for key, value in call.arguments.items()}
    return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())


def _gemma4(calls: Sequence[WrittenCall]) -> str:
    return "".join(f"{GEMMA4_CALL}call:{call.name}{_gemma4_value(call.arguments)}{GEMMA4_END}" for call in calls)


def _gemma4_value(value: Any) -> str:
    if isinstance(value, str):
        return f"{GEMMA4_QUOTE}{value}{GEMMA4_QUOTE}"
    if isinstance(value, Mapping):
        keys = [key if GEMMA4_KEY.fullmatch(key) else _gemma4_value(key) for key in value]
        return f"{{{','.join(f'{key}:{_gemma4_value(one)}' for key, one in zip(keys, value.values(), strict=True))}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_gemma4_value, value))}]"
    return _json(value)


def _llama3(calls: Sequence[WrittenCall]) -> str:
    return "; ".join(_named(call, "parameters") for call in calls)


def _mistral(calls: Sequence[WrittenCall]) -> str:
    return f"[TOOL_CALLS]{_list(calls)}"


def _phi(calls: Sequence[WrittenCall]) -> str:
    return f"<|tool_call|>{_list(calls)}<|/tool_call|>"


def _deepseek(calls: Sequence[WrittenCall]) -> str:
    written = [f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{_json(c.arguments)}<｜tool▁call▁end｜>" for c in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"


def _gpt_oss(calls: Sequence[WrittenCall]) -> str:
    (call,) = calls
    return f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{_json(call.arguments)}"


def _gemma(calls: Sequence[WrittenCall]) -> str:
    return "```tool_code\n" + "\n".join(map(_python, calls)) + "\n```"


def _pythonic(calls: Sequence[WrittenCall]) -> str:
    return f"[{', '.join(map(_python, calls))}]"


def _python(call: WrittenCall) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def _list(calls: Sequence[WrittenCall]) -> str:
    return f"[{', '.join(_named(call, 'arguments') for call in calls)}]"


def _named(call: WrittenCall, key: str) -> str:
    return _json({"name": call.name, key: call.arguments})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


WRITERS: Mapping[str, Writer] = {
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
