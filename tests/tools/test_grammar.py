"""Grammars of tool calls: what a format writes is in them, and what they allow its reader reads."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from posttrain.data.grammar import Constraint, Grammar, GrammarCompiler
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.tools.formats import FORMATS, Format, write_calls
from posttrain.tools.grammar import tool_grammar
from posttrain.tools.readers import WrittenCall
from posttrain.tools.types import argument_error

END = 258
MARKS = ("<|tool_call|>", "<|/tool_call|>", "[TOOL_CALLS]", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
MARKS += ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call|>", '<|"|>', "<channel|>")
MARKS += ("<|start|>", *(f"<｜tool▁{one}｜>" for one in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")))
SCHEMAS: Mapping[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "D"},
            "unit": {"enum": ["C", "F"]},
            "days": {"$ref": "#/$defs/few"},
            "near": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 14}},
    },
    "now": {"type": "object", "properties": {}},
}
CALLS = [
    WrittenCall("weather", {"city": 'São "Paulo", `}', "days": 3}),
    WrittenCall("weather", {"city": "x", "unit": "F", "days": 12, "near": [True, False]}),
    WrittenCall("now", {}),
]
WRONG = [
    WrittenCall("wether", {"city": "x", "days": 3}),
    WrittenCall("weather", {"city": "x", "days": 15}),
    WrittenCall("weather", {"city": "x"}),
    WrittenCall("weather", {"city": "x", "days": 3, "nearby": 1}),
    WrittenCall("weather", {"city": "x", "unit": "K", "days": 3}),
]


@cache
def tokenizer_of(*marks: str) -> Tokenizer:
    tokenizer = load_tokenizer("bytes")
    tokenizer.hf.add_special_tokens({"additional_special_tokens": [*marks]}, replace_extra_special_tokens=False)
    return tokenizer


@cache
def compiler_of(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.num_ids)


def started(grammar: Grammar, tokenizer: Tokenizer) -> Constraint:
    return compiler_of(tokenizer).start(grammar, [65], (END,))


def allowed_in(constraint: Constraint) -> list[int]:
    return np.flatnonzero(np.unpackbits(constraint.allowed.view(np.uint8), bitorder="little")).tolist()


def written(form: str, calls: Sequence[WrittenCall]) -> str:
    """Calls as the format writes them, in Python with texts and words of JSON."""
    if form not in ("gemma", "pythonic"):
        return write_calls(form, calls)
    texts = [
        f"{c.name}({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in c.arguments.items())})"
        for c in calls
    ]
    return f"[{', '.join(texts)}]" if form == "pythonic" else "\n".join(["```tool_code", *texts, "```"])


def fits(grammar: Grammar, text: str, tokenizer: Tokenizer) -> bool:
    constraint = started(grammar, tokenizer)
    for token in [*tokenizer.encode(text), END]:
        if token not in allowed_in(constraint):
            return False
        constraint.advance([token])
    return True


def grammar_of(form: str, tokenizer: Tokenizer, **changes: Any) -> Grammar:
    return tool_grammar(Format(form, SCHEMAS), tokenizer, **changes)


@pytest.mark.parametrize("marks", [MARKS, ()], ids=["control tokens", "text"])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_as_a_format_writes_them(name: str, marks: Sequence[str]) -> None:
    tokenizer = tokenizer_of(*marks)
    grammar, single = grammar_of(name, tokenizer), grammar_of(name, tokenizer, several=False)
    for call in CALLS:
        assert fits(grammar, written(name, [call]), tokenizer), call
        assert fits(single, written(name, [call]), tokenizer)
    if name != "gpt_oss":
        assert fits(grammar, written(name, CALLS), tokenizer)
        assert not fits(single, written(name, CALLS[:2]), tokenizer)
    assert [call for call in WRONG if fits(grammar, written(name, [call]), tokenizer)] == []
    assert not fits(grammar, "", tokenizer) and not fits(grammar, "Hello", tokenizer)


@pytest.mark.parametrize("name", FORMATS)
def test_one_tool_and_free_text(name: str) -> None:
    tokenizer = tokenizer_of(*MARKS)
    now, weather = written(name, [CALLS[2]]), written(name, [CALLS[0]])
    named, free = grammar_of(name, tokenizer, name="now"), grammar_of(name, tokenizer, required=False)
    assert fits(named, now, tokenizer) and not fits(named, weather, tokenizer)
    assert fits(free, now, tokenizer) and fits(free, "Well: 3 < 4, `x`", tokenizer) and fits(free, "", tokenizer)
    assert not fits(free, written(name, [WRONG[1]]), tokenizer), "strict: free text holds no call"
    with pytest.raises(
        ValueError, match=r"^sampling.grammar: tools: there is no tool 'then'; there are \['weather', 'now'\]"
    ):
        grammar_of(name, tokenizer, name="then")


@pytest.mark.parametrize("name", FORMATS)
def test_thoughts_come_first(name: str) -> None:
    tokenizer = tokenizer_of(*MARKS)
    grammar, call = grammar_of(name, tokenizer), written(name, [CALLS[2]])
    if name == "gpt_oss":
        thought = "<|channel|>analysis<|message|>It asks.<|end|><|start|>assistant"
        assert fits(grammar, thought + call, tokenizer) and not fits(grammar, thought, tokenizer)
        return
    begin, end = ("<|channel>", "<channel|>") if name == "gemma4" else ("<think>", "</think>")
    assert fits(grammar, f"{begin}\nIt asks.\n{end}\n\n{call}", tokenizer)
    assert not fits(grammar, f"It asks.\n{end}\n\n{call}", tokenizer)
    assert fits(grammar_of(name, tokenizer, in_thought=True), f"It asks.\n{end}\n\n{call}", tokenizer)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_allowed_is_read(name: str) -> None:
    """Random tokens: every turn that ends has calls alone, whose arguments fit."""
    tokenizer, rng = tokenizer_of(*MARKS), random.Random(0)
    grammar, read = grammar_of(name, tokenizer), Format(name, SCHEMAS)
    num_ended = 0
    begin = tokenizer.encode(written(name, [CALLS[0]]))[:30]
    for _ in range(8):
        constraint, tokens = started(grammar, tokenizer), [*begin[: rng.choice([4, 30])]]
        constraint.advance(tokens)
        while len(tokens) < 300 and END not in tokens:
            allowed = allowed_in(constraint)
            # Tokens that end a value, so that turns do.
            likely = [t for t in allowed if t >= 256 or chr(t) in '",})]\n</parameter>']
            tokens.append(END if END in allowed else rng.choice(likely if likely and rng.random() < 0.8 else allowed))
            constraint.advance(tokens[-1:])
        if tokens[-1] == END:
            num_ended += 1
            text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
            turn = read.parse(text)
            assert turn.calls and not turn.malformed, text
            assert [argument_error(c.arguments, SCHEMAS[c.name]) for c in turn.calls] == [None] * len(turn.calls), text
    assert num_ended >= 1


def test_marks_of_versions() -> None:
    """Mistral's newer form by its token; DeepSeek's older one by its template."""
    newer = tokenizer_of("[TOOL_CALLS]", "[ARGS]")
    assert fits(grammar_of("mistral", newer), "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}", newer)
    older = load_tokenizer("bytes")
    older.hf.chat_template = "```json"
    text = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
    text = f"<｜tool▁calls▁begin｜>{text}<｜tool▁calls▁end｜>"
    assert fits(grammar_of("deepseek", older), text, older)
    assert [call.name for call in Format("deepseek", SCHEMAS).parse(text).calls] == ["now"]


def test_escapes_that_python_reads_otherwise_are_not_written() -> None:
    grammar, tokenizer = grammar_of("pythonic", tokenizer_of()), tokenizer_of()
    assert fits(grammar, r'[weather(city="a\n", days=3)]', tokenizer)
    assert not fits(grammar, r'[weather(city="\ud83d\ude00", days=3)]', tokenizer)
    assert not fits(grammar, r'[weather(city="a\/b", days=3)]', tokenizer)


@pytest.mark.parametrize(
    ("name", "schema", "message"),
    [
        ("hermes", {"properties": {"a": {"not": {}}}}, r'keywords that are not supported: \["not"\]'),
        ("qwen_coder", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "qwen_coder pattern of the text f.a"),
        ("glm", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "glm pattern of the text f.a"),
        (
            "gemma4",
            {"properties": {"a": {"type": "string", "pattern": "x"}}},
            "gemma4 the schema of f.a cannot be told",
        ),
        ("gemma4", {"properties": {"a": {}}}, "gemma4 the schema of f.a cannot be told"),
        ("pythonic", {"properties": {"a-b": {}}}, "in the format pythonic 'a-b' is no name"),
        ("gemma", {"properties": {}, "additionalProperties": True}, "additionalProperties of arguments cannot be told"),
        ("pythonic", {"properties": {}, "anyOf": []}, "anyOf of arguments cannot be told"),
    ],
)
def test_what_a_format_cannot_tell_is_refused(name: str, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^sampling.grammar: tools: .*{message}"):
        tool_grammar(Format(name, {"f": {"type": "object", **schema}}), tokenizer_of())
