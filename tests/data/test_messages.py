"""Messages: what is read as the same, what is refused, and what templates that leave things out do with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import DatasetSection
from posttrain.data.chat import Renderer
from posttrain.data.format import tokenize_example
from posttrain.data.messages import Message, checked_messages, checked_tools
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.data.tokenizer_files import shipped_templates
from posttrain.errors import ConfigError
from posttrain.stages.inputs import rows_and_renderer
from tests.environments.helpers import template_names

pytestmark = pytest.mark.fast

USER: Message = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
CALLING: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TEXT_CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"x": {"default": None}}}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "H", "image": None}, "i"], "name": None}, USER),
        ({"from": "human", "value": "Hi", "tool_calls": None}, USER),
        ({"role": "assistant", "content": None, "tool_calls": [TEXT_CALL], "refusal": None}, CALLING),
        ({"role": "assistant", "tool_calls": json.dumps([TEXT_CALL])}, CALLING),
        ({"role": "assistant", "tool_calls": [CALL["function"]]}, CALLING),
        ({"role": "assistant", "function_call": TEXT_CALL["function"]}, CALLING),
        ({"from": "function_call", "value": json.dumps(CALL["function"])}, CALLING),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": ""}, "id": "x"}]},
            {**CALLING, "tool_calls": [{"type": "function", "id": "x", "function": {"name": "add", "arguments": {}}}]},
        ),
        ({"from": "observation", "value": "3"}, {"role": "tool", "content": "3"}),
        ({"role": "function", "name": "add", "content": "3"}, {"role": "tool", "name": "add", "content": "3"}),
        *(
            ({"role": "assistant", "content": "a", **flag}, {"role": "assistant", "content": "a", "weight": 0})
            for flag in ({"weight": 0}, {"train": False}, {"loss": False}, {"weight": 0.0, "train": False})
        ),
        ({"role": "assistant", "content": "a", "weight": 1, "train": True}, {"role": "assistant", "content": "a"}),
        ({"role": "user", "content": "Hi", "weight": 0, "id": "7", "tool_calls": []}, USER),
    ],
)
def test_forms_of_a_message(given: dict[str, Any], expected: Message) -> None:
    assert checked_messages([given], "messages") == [expected]
    assert checked_messages(json.dumps([given]), "messages") == [expected]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "tool", "content": {"a": 1}}, r"messages\[0\].content is \{'a': 1\} \(dict\); it must be text"),
        ({"role": "user", "content": 3}, r"content is 3 \(int\)"),
        ({"role": "user", "content": []}, r"content is \[\] \(list\)"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
            r"content\[0\] is .*'image_url'; only",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\] is .* only text is read"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]},
            r"tool_calls\[0\] must be a call with",
        ),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, r"arguments is text, but no JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "arguments must be an object"),
        ({"role": "assistant", "content": "a", "weight": 0.5}, r"weight=0.5: use 0 .* or 1"),
        (
            {"role": "assistant", "content": "a", "weight": 0, "train": True},
            "weight and train contradict",
        ),
        ({"role": "user", "content": "a", "train": True}, "a user message never has loss"),
        ({"from": "gtp", "value": "a"}, r"from='gtp': .*did you mean 'gpt'"),
        ({"role": "assistant", "content": None, "refusal": "No."}, "has neither content nor tool_calls"),
    ],
)
def test_what_is_no_message(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        checked_messages([message], "messages")


def test_forms_of_tools() -> None:
    forms = ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [TOOL["function"]], json.dumps([TOOL["function"]]))
    assert all(checked_tools(one) == [TOOL] for one in forms)
    assert checked_tools(None) is checked_tools("") is checked_tools("[]") is checked_tools([]) is None
    for wrong, reason in (
        ("[", "no JSON"),
        ([{"type": "function"}], r"tools\[0\] must be a tool"),
        (5, "a list"),
        ({"a": 1}, "a list"),
    ):
        with pytest.raises(ConfigError, match=reason):
            checked_tools(wrong)


def chat(body: str, before: str = "", calls: str = "") -> Tokenizer:
    """Tokenizer with a template that writes `body` of each message, and `calls` of each tool call."""
    calls = f"{{% for c in m.tool_calls or [] %}}{calls}{{% endfor %}}"
    turn = f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{body}{calls}<|im_end|>\n{{% endfor %}}"
    tokenizer = load_tokenizer("bytes")
    tokenizer.hf.chat_template = f"{before}{turn}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
    return tokenizer


def trained(tokenizer: Tokenizer, *messages: dict[str, Any], **columns: Any) -> str:
    """Text with loss of a row."""
    (example,) = tokenize_example(
        {"messages": list(messages), **columns}, DatasetSection(path="x"), Renderer(tokenizer, True), "answers"
    )
    return tokenizer.decode(example.tokens[example.loss_mask].tolist(), skip_special_tokens=False)


@pytest.mark.parametrize(
    "arguments",
    ["{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}", "{{ c.function.arguments }}"],
)
def test_arguments_are_written_once_by_every_template(arguments: str) -> None:
    """Red with mappings for all: they do not add to text, or are written as Python does."""
    tokenizer = chat("{{ m.content }}", calls="{{ c.function.name }}" + arguments)
    for calls in ([CALL], [TEXT_CALL]):
        said = trained(tokenizer, {**USER}, {"role": "assistant", "tool_calls": calls})
        assert said == 'add{"a": 1, "b": null}<|im_end|>'


@pytest.mark.parametrize(
    ("body", "calls", "messages", "reason"),
    [
        ("{{ m.content }}", "", [USER, CALLING], "leaves out a call of add in an assistant turn"),
        (
            "{{ m.content }}",
            "{{ c.function.name if loop.first }}",
            [USER, {**CALLING, "tool_calls": [CALL, CALL]}],
            "a ca",
        ),
        (
            "{{ m.content[:2] if m.role == 'assistant' else m.content }}",
            "",
            [USER, {"role": "assistant", "content": "long"}],
            "leaves out the content 'long'",
        ),
        (
            "{{ m.content if m.role != 'tool' }}",
            "{{ c.function.name }}",
            [USER, CALLING, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "4 it is"}],
            r"leaves out the content of message 2 \(role tool\)",
        ),
        ("{{ m.content if m.role != 'system' }}", "", [{"role": "system", "content": "i"}, USER], r"\(role system\)"),
        (
            "{{ m.content }}",
            "",
            [USER, {**USER, "role": "assistant", "conten": "x"}],
            "'conten', .* did you mean 'content'",
        ),
    ],
)
def test_templates_that_leave_something_out(body: str, calls: str, messages: list[Any], reason: str) -> None:
    answer = [] if messages[-1]["role"] == "assistant" else [{"role": "assistant", "content": "ok"}]
    with pytest.raises(ConfigError, match=reason):
        trained(chat(body, calls=calls), *messages, *answer)


def test_tools_that_a_template_leaves_out() -> None:
    with pytest.raises(ConfigError, match="tools: chat template of bytes does not write them into the prompt"):
        trained(chat("{{ m.content }}"), {**USER}, {"role": "assistant", "content": "a"}, tools=json.dumps([TOOL]))


def test_keys_that_the_template_reads_are_obeyed() -> None:
    tokenizer = chat("{{ m['mood'] }}{{ m.content }}")
    assert trained(tokenizer, {**USER}, {"role": "assistant", "content": "a", "mood": "glad "}) == "glad a<|im_end|>"
    thinks = chat("{{ m.thinking }}{{ m.content }}")
    answer = {"role": "assistant", "content": "a", "reasoning_content": "so "}
    assert trained(thinks, {**USER}, answer) == "so a<|im_end|>"
    renderer = Renderer(chat("{{ m.content }}"), True)
    renderer.conversation(checked_messages([USER, answer], "messages"))
    assert list(renderer.remarks.texts) == ["thinking"]


MARKED = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
)


@pytest.mark.parametrize("body", ["{{ m.content }}", MARKED])
def test_turns_without_loss(body: str) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "BAD", "train": False},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "good"},
    ]
    assert trained(chat(body), *turns) == "good<|im_end|>"
    with pytest.raises(ConfigError, match="no token of the conversation would have loss"):
        trained(chat(body), *turns[:2])
    with pytest.raises(ConfigError, match="weight: 0 of a message has no effect with train_on_prompt"):
        tokenize_example({"messages": turns}, DatasetSection(path="x"), Renderer(chat(body), True), "all")
    plain = {"prompt": "a", "completion": turns[1:2]}
    with pytest.raises(ConfigError, match="message 0 has weight; without a chat template"):
        tokenize_example(plain, DatasetSection(path="x", chat=False), Renderer(chat(body), False), "answers")


def test_developer_messages_are_system_messages_where_templates_drop_them() -> None:
    """Red without the mapping: the instruction vanishes from data, RL and the endpoint."""
    developer: Message = {"role": "developer", "content": "Be brief."}
    drops = Renderer(chat("{{ m.content if m.role != 'developer' }}"), True)
    assert drops.rendered([developer, USER], reply=False).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    keeps = Renderer(chat("{{ m.content }}"), True)
    assert keeps.rendered([developer, USER], reply=False).startswith("<|im_start|>developer\nBe brief.")
    system: Message = {"role": "system", "content": "Be kind."}
    both = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>"
    assert drops.rendered([system, developer, USER], reply=False).startswith(both)
    neither = Renderer(chat("{{ m.content if m.role in ('user', 'assistant') }}"), True)
    with pytest.raises(ConfigError, match=r"leaves out the content of message 0 \(role developer\)"):
        neither.prompt([developer, USER])


@pytest.mark.parametrize("role", ["developer", "system"])
def test_instructions_of_templates_with_one_place_for_them_are_one_message(role: str) -> None:
    """Red without: the second is refused, or vanishes."""
    first = "{{ m.content if loop.first or m.role in ('user', 'assistant') }}"
    messages: list[Message] = [{"role": "system", "content": "Be kind. "}, {"role": role, "content": "Be brief."}, USER]  # type: ignore[misc]
    renderer = Renderer(chat(first), True)
    expected = "<|im_start|>system\nBe kind.\n\nBe brief.<|im_end|>\n<|im_start|>user"
    assert renderer.rendered(messages, reply=False).startswith(expected)
    answer: Message = {"role": "assistant", "content": "Hey"}
    masked = renderer.conversation([*messages, answer])
    assert bytes(t for t, m in zip(masked.tokens, masked.mask, strict=True) if m and t < 256) == b"Hey"
    assert bytes(t for t in masked.tokens if t < 256).startswith(b"system\nBe kind.\n\nBe brief.")
    with pytest.raises(ConfigError, match=r"leaves out the content of message 1 \(role system\)"):
        renderer.prompt([USER, messages[0], USER])


@pytest.mark.parametrize("name", shipped_templates())
def test_instructions_in_shipped_templates(name: str) -> None:
    tokenizer = load_tokenizer("bytes").with_chat_template(shipped_templates()[name])
    messages: list[Message] = [{"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Be brief."}]
    text = Renderer(tokenizer, True).rendered([*messages, USER], reply=True)
    assert 0 <= text.find("Be kind.") < text.find("Be brief.") < text.find("Hi")


def test_real_templates(shared: Path) -> None:
    """Text parts, a developer message, and arguments as JSON text, in templates of eight models."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Paris"}'}}
    developer = {"role": "developer", "content": "Be brief."}
    parts = [{**USER, "content": [{"type": "text", "text": "Hi there"}]}, {"role": "assistant", "content": ["Well"]}]
    silent = ("microsoft-Phi-3.5-mini-instruct", "HuggingFaceTB-SmolLM3-3B")
    tokenizer = load_tokenizer(shared / "tokenizers" / "qwen3")
    for name in template_names(shared):
        tokenizer.hf.chat_template = (shared / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
        assert "Well" in trained(tokenizer, *parts)
        prompt = tokenizer.decode(Renderer(tokenizer, True).prompt(checked_messages([developer, parts[0]], "m")))
        assert "Be brief." in prompt and "Hi there" in prompt, name
        asked = checked_messages([{"role": "system", "content": "Be kind."}, developer, parts[0]], "m")
        prompt = tokenizer.decode(Renderer(tokenizer, True).prompt(asked))
        assert 0 <= prompt.find("Be kind.") < prompt.find("Be brief.") and "Hi there" in prompt, name
        if name in silent:
            with pytest.raises(ConfigError, match="leaves out a call of look_up"):
                trained(tokenizer, parts[0], {"role": "assistant", "tool_calls": [call]})
            continue
        said = trained(tokenizer, parts[0], {"role": "assistant", "content": None, "tool_calls": [call]})
        xml = "<parameter=city>\nParis\n</parameter>"
        assert said.count('{"city": "Paris"}') + said.count(xml) == 1 and "\\" not in said, name


@pytest.mark.parametrize(
    ("row", "notes"),
    [
        ({"prompt": "<|im_start|>user\nHi", "completion": "a<|im_end|>"}, ["role user holds '<|im_start|>'"]),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "a"}]}, ["read as messages"]),
        ({"instruction": "Hi", "input": None, "output": "a"}, ["instruction and input are read as prompt, output as"]),
        ({"prompt": "Hi", "system": "s", "completion": "a"}, ["the column system is read as part of the prompt"]),
        ({"prompt": "2+2? ", "completion": "2+2? 4"}, ["completion begins with the text of the prompt '2+2?'"]),
        ({"text": "<|im_start|>user\nHi"}, []),
        ({"prompt": "Hi", "completion": "a"}, []),
    ],
)
def test_notes_about_rows(tmp_path: Path, row: dict[str, Any], notes: list[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    section = DatasetSection(path=str(tmp_path / "rows.jsonl"))
    rows, renderer = rows_and_renderer(section, load_tokenizer("bytes"))
    with rows.named(0) as given:
        tokenize_example(given, section, renderer, "answers")
    assert len(rows.notes) == len(notes) and all(note in line for note, line in zip(notes, rows.notes, strict=True))
    assert all("rows.jsonl row 0: " in line or "column system" in line for line in rows.notes)
