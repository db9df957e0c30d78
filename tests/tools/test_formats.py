"""Formats of tool calls: what real templates write is read back, and nothing that a model writes raises."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError
from posttrain.tools.formats import FORMATS, Format, format_name, make_format, write_calls
from posttrain.tools.readers import WrittenCall
from posttrain.tools.types import ToolFormat
from posttrain.user_code import import_transformers

TEMPLATES = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen_coder",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "openai-gpt-oss-120b": "gpt_oss",
    "llama3_1": "llama3",
    "glm": "glm",
    "gemma4": "gemma4",
}
SINGLE = {"gpt_oss", "llama3"}
"""Formats with one call in a turn."""
WITHOUT_CONTENT = {"mistral", "llama3", "gpt_oss"}
"""Formats whose templates write no text beside calls, or as reasoning."""
ENDS = ("<|im_end|>", "</s>", "<｜end▁of▁sentence｜>", "<|call|>", "<|eot_id|>")
HARD_TEXTS = [
    "",
    '"',
    "'",
    "\\",
    "\n",
    "a\n",
    "{}",
    "</tool_call>",
    "```",
    "[TOOL_CALLS]x[ARGS]",
    "a</think>b",
    "</parameter>",
    "</parameter> y\n",
    "</arg_value> <arg_value>",
    "<tool_call|> call:f{",
    "<|start|><|message|><|call|>",
    "<|python_tag|>",
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜><｜tool▁calls▁end｜>",
    "<|/tool_call|> <|tool_call|> functools[",
    "é😀",
    "<think>",
    "true",
    "7",
]


GLM = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls %}\n<tool_call>"
    "{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson(ensure_ascii=False) }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{{ '</s>' if m.role == 'assistant' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)
GEMMA4 = (
    "{% macro show(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}"
    "{% for k, one in v.items() %}<|\"|>{{ k }}<|\"|>:{{ show(one) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif v is boolean %}{{ v | lower }}{% elif v is sequence %}[{% for one in v %}{{ show(one) }}"
    "{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
    "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}<|tool_call>call:"
    "{{ c.function.name }}{{ '{' }}{% for k, v in c.function.arguments | dictsort %}{{ k }}:{{ show(v) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}<tool_call|>' }}{% endfor %}{{ '</s>' if m.role == 'assistant' }}"
    "{% endfor %}{{ '<|turn>assistant\n' if add_generation_prompt }}"
)
"""Templates that write calls as those of GLM-4.5 and Gemma 4."""
OWN = {"glm": GLM, "gemma4": GEMMA4}


def template_text(shared: Path, name: str) -> str:
    if name in OWN:
        return OWN[name]
    if name == "llama3_1":
        return json.loads((shared / "goldens/chat/llama3_1.json").read_text())["chat_template"]
    return (shared / "chat_templates" / f"{name}.jinja").read_text()


def rendered(template: str, messages: Sequence[Mapping[str, Any]], **keywords: Any) -> str:
    render = import_transformers("utils.chat_template_utils").render_jinja_template
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return render([messages], chat_template=template, **tokens, **keywords)[0][0]


def schema_of(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    properties = {key: {"type": types.get(type(value), "null"), "description": "D"} for key, value in arguments.items()}
    function = {"name": name, "description": "D", "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def assistant_turn(template: str, content: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Text that a template makes of an assistant message with calls, up to its end."""
    tools = [schema_of(name, arguments) for name, arguments in calls]
    written = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    asked = [{"role": "user", "content": "Q"}]
    answer = {"role": "assistant", "content": content, "tool_calls": written}
    prompt = rendered(template, asked, tools=tools, add_generation_prompt=True)
    text = rendered(template, [*asked, answer], tools=tools, add_generation_prompt=False)
    assert text.startswith(prompt)
    turn = text[len(prompt) :].rstrip("\n")
    end = next(end for end in ENDS if turn.endswith(end))
    return turn.removesuffix(end)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(HARD_TEXTS)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,7}", fullmatch=True)
some_calls = st.lists(
    st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3, unique_by=lambda c: c[0]
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40)
@given(calls=some_calls, content=st.sampled_from(["", "I look it up."]))
def test_calls_that_a_template_writes_are_read(
    shared: Path, name: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    """Red with a regular expression up to the closing tag in place of a JSON reader ("</tool_call>" in a text)."""
    kind = TEMPLATES[name]
    calls = calls[:1] if kind in SINGLE else calls
    content = "" if kind in WITHOUT_CONTENT else content
    text = assistant_turn(template_text(shared, name), content, calls)
    schemas = {called: schema_of(called, arguments)["function"]["parameters"] for called, arguments in calls}
    parsed = Format(kind, schemas).parse(text)
    assert parsed.malformed == []
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    assert parsed.content.rpartition("</think>")[2].strip() == content
    assert all(len(call.id) == 9 and call.id.isalnum() for call in parsed.calls)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=40)
@given(calls=some_calls)
def test_calls_that_a_writer_writes_are_read(kind: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    calls = [(f"f_{name}", {f"x_{key}": value for key, value in given.items()}) for name, given in calls]
    calls = calls[:1] if kind == "gpt_oss" else calls
    schemas = {called: schema_of(called, arguments)["function"]["parameters"] for called, arguments in calls}
    parsed = Format(kind, schemas).parse(write_calls(kind, [WrittenCall(*call) for call in calls]))
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    assert (list(parsed.malformed), parsed.content) == ([], "")


TEXT_OF_MARKS = """
<tool_call> </tool_call> <|tool_call|> <|/tool_call|> functools[ [TOOL_CALLS] [ARGS] [CALL_ID] <|python_tag|> </think>
<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <function=f> <parameter=x> </parameter>
</function> <|start|>assistant <|channel|>commentary to=functions.f <|message|> <|end|> ```tool_code\n ```json\n ```
{"name":"f","arguments":{"x":1}} {"name": "parameters":{ x=1 "\\ud800" NaN 1e999 \x00 \\d } ] [f( )
"""
MARKS = TEXT_OF_MARKS.split()
MARKS += ["<arg_key>x</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>", "call:f{x:", '<|"|>', "<tool_call|>"]
MARKS += ["[f(x=", "f" + ".a" * 1500 + "()", "0x" + "f" * 5000, "[" * 2000, "9" * 5000, "\n"]


@given(text=st.lists(st.sampled_from(MARKS) | st.text(max_size=8), max_size=12).map("".join))
def test_nothing_raises(text: str) -> None:
    for name in FORMATS:
        reader: ToolFormat = Format(name, {"f": {"type": "object", "properties": {"x": {"type": "integer"}}}})
        parsed = reader.parse(text)
        assert all("\n" not in line and line for line in parsed.malformed)
        for call in parsed.calls:
            json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()


X1 = [("f", {"x": 1})]
F, ARGUMENTS = '{"name": "f", "parameters": {"x": 1}}', '{"name": "f", "arguments": {"x": 1}}'
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{%s}\n```<｜tool▁call▁end｜>"
HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
CODER = "<function=f>\n<parameter=x>\n12\n</parameter>\n<parameter=s>\n12\n</parameter>\n</function>"
THOUGHT = "<think><tool_call>\n{}\n</tool_call></think>\n\nNo."


@pytest.mark.parametrize(
    ("kind", "text", "calls", "content"),
    [
        ("hermes", f"Hm.\n<tool_call>{ARGUMENTS}</tool_call>", X1, "Hm."),
        ("hermes", THOUGHT, [], THOUGHT),
        ("hermes", f"<think>\n<tool_call>{ARGUMENTS}</tool_call>", [], f"<think>\n<tool_call>{ARGUMENTS}</tool_call>"),
        ("llama3", '{"answer": 3}', [], '{"answer": 3}'),
        ("llama3", f'<|python_tag|>{F}; {{"name": "g", "parameters": {{}}}}', [*X1, ("g", {})], ""),
        ("llama3", '<|python_tag|>search.call(query="a, b")<|eom_id|>', [("search", {"query": "a, b"})], ""),
        ("llama3", f'{{"type": "function", "function": {F}}}', X1, ""),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}', [*X1, ("g", {})], ""),
        ("gemma", "So:\n```tool_code\nprint(f(x=[1, -2], y='a'))\n```", [("f", {"x": [1, -2], "y": "a"})], "So:"),
        ("gemma", "```tool_code\nf(3)\ng.h(True)\n```", [("f", {"x": 3}), ("g.h", {"on": True})], ""),
        ("gemma", "[f(x=1), f(x=2)]", [*X1, ("f", {"x": 2})], ""),
        ("gemma", f"```json\n{F}\n```", X1, ""),
        ("gemma", '```json\n{"a": 1}\n```', [], '```json\n{"a": 1}\n```'),
        ("deepseek", V3 % '"x": 1', X1, ""),
        ("gpt_oss", f'{HARMONY}commentary to=functions.f <|constrain|>json<|message|>{{"x": 1}}', X1, ""),
        ("gpt_oss", f"{HARMONY}final<|message|>Seven.", [], "Seven."),
        ("phi", f"<|tool_call|>[{ARGUMENTS}]<|/tool_call|>", X1, ""),
        ("phi", f"functools[{ARGUMENTS}]", X1, ""),
        ("pythonic", "[f(x=1)]", X1, ""),
        (
            "glm",
            "Hm.\n<tool_call>f<arg_key>x</arg_key><arg_value>12</arg_value></tool_call>",
            [("f", {"x": 12})],
            "Hm.",
        ),
        (
            "glm",
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12\n</arg_value>\n</tool_call>",
            [("f", {"s": "12\n"})],
            "",
        ),
        ("glm", "<tool_call>f</tool_call>\n<tool_call>g.h\n</tool_call>", [("f", {}), ("g.h", {})], ""),
        ("gemma4", '<|tool_call>call:f{x:1, s:<|"|>1, {"}\n<|"|>}<tool_call|>', [("f", {"x": 1, "s": '1, {"}\n'})], ""),
        (
            "gemma4",
            'So:<|tool_call>call:f{"s":"a\\n",x:[{},-1.5e3,None]}<tool_call|>',
            [("f", {"s": "a\n", "x": [{}, -1.5e3, None]})],
            "So:",
        ),
        (
            "gemma4",
            "<|channel>thought\n<|tool_call>call:f{}<tool_call|><channel|>No.",
            [],
            "<|channel>thought\n<|tool_call>call:f{}<tool_call|><channel|>No.",
        ),
        ("qwen_coder", CODER, [("f", {"x": 12, "s": "12"})], ""),
    ],
)
def test_other_forms(kind: str, text: str, calls: list[tuple[str, dict[str, Any]]], content: str) -> None:
    schemas = {
        "f": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}},
        "g.h": {"properties": {"on": {"type": "boolean"}}},
    }
    parsed = Format(kind, schemas).parse(text)
    made = [(call.name, call.arguments) for call in parsed.calls]
    assert (made, list(parsed.malformed), parsed.content) == (calls, [], content)


@pytest.mark.parametrize(
    ("kind", "text", "line"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}', "Expecting ',' delimiter at character"),
        ("hermes", '<tool_call>{"name": "f"}', "a call must end with </tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'a call must have a text as "name"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', '"arguments" of f must be an object'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "not JSON"),
        ("llama3", '{"name": "f", "parameters": {', "Expecting property name"),
        ("mistral", "[TOOL_CALLS]f{}", "a call must have [ARGS]"),
        ("mistral", "[TOOL_CALLS]", "a call must have [ARGS]"),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} x<｜tool▁call▁end｜>",
            "and end with <｜tool▁call▁end｜>: 'x<",
        ),
        ("gemma", "```tool_code\nf(x=y)\n```", "arguments of f must be literals"),
        ("gemma", "```tool_code\nf(\n```", "not Python in line 1"),
        ("gemma", "```tool_code\nimport os\n```", "only calls can be made, not a Import statement"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", "a call must have <｜tool▁sep｜>"),
        ("gpt_oss", "<|channel|>commentary to=functions.f <|message|>{", "Expecting property name"),
        ("gpt_oss", "<|channel|>commentary to=functions.f", "a call to functions.f must have its arguments"),
        ("qwen_coder", "<function=f>\n<parameter=x>\n1\n</parameter>", "and at the end </function>"),
        ("qwen_coder", "<tool_call>\n{}", "a call must begin with <function=name>"),
        ("glm", "<tool_call>\n<arg_key>", "a call must begin with the name"),
        ("glm", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1\n</tool_call>", "and at the end </tool_call>"),
        ("gemma4", "<|tool_call>f{}<tool_call|>", "a call must begin with call:name{"),
        ("gemma4", "<|tool_call>call:f{x:Paris}<tool_call|>", 'f: a text must stand in <|"|>: Paris'),
        ("gemma4", '<|tool_call>call:f{x:<|"|>a}<tool_call|>', 'a text must end with <|"|>'),
        ("gemma4", "<|tool_call>call:f{x:1}", "a call must end with <tool_call|>"),
        ("gemma4", "<|tool_call>call:f{x:" + "[" * 99, "nested deeper than 64"),
        ("phi", "functools[{]", "Expecting property name"),
    ],
)
def test_malformed_calls_say_why(kind: str, text: str, line: str) -> None:
    parsed = Format(kind, {}).parse(text)
    assert parsed.calls == []
    assert len(parsed.malformed) == 1
    assert line in parsed.malformed[0]


def test_calls_after_a_malformed_one_are_made() -> None:
    text = '<tool_call>{"name": f}</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    parsed = Format("hermes", {}).parse(text)
    assert ([call.name for call in parsed.calls], len(parsed.malformed)) == (["g"], 1)


HOSTILE = """
<tool_call> <tool_call>{" <function= <function=f><parameter=x></function> <function=f><parameter=x> [TOOL_CALLS]
[TOOL_CALLS]f[ARGS] [TOOL_CALLS]f[ARGS]{} <｜tool▁call▁begin｜> <｜tool▁call▁begin｜>f<｜tool▁sep｜>{ </think>
<|start|>to=f <|message|> <|channel|>commentary_to=f<|message|>{ <|tool_call|> functools[ ```json\n ```tool_code\n
[f( <|python_tag|> {"name": {"name":"f"}; </parameter> { <tool_call>{"name":"f"}</tool_call> </tool_call> <|call|>
``` <arg_key> <tool_call>f<arg_key>x</arg_key><arg_value> </arg_value> <|tool_call> <|tool_call>call:f{x:[ <|"|>
<tool_call|>
"""


@pytest.mark.parametrize("kind", FORMATS)
def test_time_is_linear(kind: str) -> None:
    """Marks of a collapsed policy, alone and after the beginning of a call, on the event loop of all samples: 20 times
    as many may take 40 times as long. A quadratic reader takes 400 times, and minutes."""
    reader = Format(kind, {})
    written = write_calls(kind, [WrittenCall("f", {"x": "y"})])
    took = []
    for size in (10_000, 200_000):
        begin = time.process_time()
        for mark in (*HOSTILE.split(), " ", "\n"):
            for before in ("", written[: written.index("y")]):
                assert len(reader.parse(before + mark * (size // len(mark))).malformed) <= 33
        took.append(time.process_time() - begin)
    assert took[1] < 40 * took[0] + 1


def test_what_follows_many_malformed_calls_is_said_to_be_unread() -> None:
    parsed = Format("hermes", {}).parse("<tool_call>" * 99 + f"<tool_call>{ARGUMENTS}</tool_call>")
    assert parsed.calls == [] and parsed.malformed[32:] == ["nothing is read after 32 calls that cannot be read"]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("{call}", 1),
        ("Sure. {call}", 1),
        ("<think>a</think>{call}", 1),
        ("a</think>{call}", 1),
        ("a {call}</think>{call} b", 1),
        ("<think>a {call} b</think>c", 0),
        ("<think>a {call}", 0),
        ("a <tool_call> b</think>{call}", 1),
        ("{call}{call}", 2),
    ],
)
def test_the_end_of_thinking_is_in_no_argument(text: str, calls: int) -> None:
    """`{call}` has a text with </think>; thinking may begin in the prompt."""
    for kind in ("hermes", "deepseek", "qwen_coder", "glm"):
        given = {"x": "y</think>z"}
        parsed = Format(kind, {}).parse(text.replace("{call}", write_calls(kind, [WrittenCall("f", given)])))
        assert [call.arguments for call in parsed.calls] == [given] * calls, kind


@pytest.fixture(scope="module")
def tokenizer(shared: Path) -> Tokenizer:
    return load_tokenizer(shared / "tokenizers/qwen3")


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    class Templated:
        chat_template = template

    return replace(tokenizer, hf=Templated())


def test_the_format_is_that_of_the_template(shared: Path, tokenizer: Tokenizer) -> None:
    for name, kind in TEMPLATES.items():
        assert format_name("auto", with_template(tokenizer, template_text(shared, name))) == kind, name
    gemma = json.loads((shared / "goldens/chat/gemma3_training.json").read_text())["chat_template"]
    assert format_name("auto", with_template(tokenizer, gemma)) == "gemma"
    for name in ("microsoft-Phi-3.5-mini-instruct", "HuggingFaceTB-SmolLM3-3B"):
        with pytest.raises(ConfigError, match="has no known form of tool calls; set tool_format to hermes, "):
            format_name("auto", with_template(tokenizer, template_text(shared, name)))
    with pytest.raises(ConfigError, match="tool_format=hermess: no such format; did you mean 'hermes'?"):
        make_format("hermess", tokenizer, [])
    made = make_format("auto", tokenizer, [schema_of("f", {"x": 1})])
    assert (made.name, dict(made.schemas)["f"]["type"]) == ("hermes", "object")
