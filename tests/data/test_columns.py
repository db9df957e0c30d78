"""Columns that change what a row means are obeyed or refused by name, in every kind of stage; others are named."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import DatasetSection
from posttrain.data.chat import Renderer
from posttrain.data.columns import RowKind, standard_row, unread_columns
from posttrain.data.format import prompt_conversation, tokenize_example
from posttrain.data.preference import labelled_answers, pair_answers, steps
from posttrain.data.sources import Rows, load_rows
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError
from posttrain.reward.rubric import Rubric
from posttrain.rl.by_hand import make_examples
from posttrain.stages.prompts import examples_of

pytestmark = pytest.mark.fast

PLAIN = copy.deepcopy(load_tokenizer("bytes"))
PLAIN.hf.chat_template = None
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SECTION = DatasetSection(path="rows.jsonl")
FUNCTION = {"name": "add", "description": "Sum of numbers", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "2+2"), ("assistant", "4"), ("assistant", "5"))
)


def chat(template: str = TEMPLATE) -> Renderer:
    hf = copy.deepcopy(PLAIN.hf)
    hf.chat_template = template
    return Renderer(replace(PLAIN, hf=hf), True)


def text(tokens: Any) -> str:
    return PLAIN.decode([int(token) for token in tokens], skip_special_tokens=False)


def of_examples(row: dict[str, Any], renderer: Renderer) -> list[int]:
    """Prompt of a stage that samples."""
    rows = Rows("rows", [row], 0, 1)
    (one,), _ = examples_of(rows, SECTION, renderer, 500, Rubric([]), None, "error")
    return list(one.prompt_tokens)


Reader = tuple[dict[str, Any], Callable[[dict[str, Any], Renderer], Any]]
READERS: dict[str, Reader] = {
    "sft": ({"prompt": "2+2", "completion": "4"}, lambda r, c: tokenize_example(r, SECTION, c, "answers")[0].tokens),
    "sft_messages": ({"messages": [USER, GOOD]}, lambda r, c: tokenize_example(r, SECTION, c, "answers")[0].tokens),
    "dpo": (
        {"prompt": "2+2", "chosen": "4", "rejected": "5"},
        lambda r, c: (pair_answers(r, SECTION, c) or [])[1].masked.tokens,
    ),
    "dpo_implicit": (
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        lambda r, c: (pair_answers(r, SECTION, c) or [])[1].masked.tokens,
    ),
    "kto": (
        {"prompt": "2+2", "completion": "4", "label": True},
        lambda r, c: labelled_answers(r, SECTION, c)[0].masked.tokens,
    ),
    "kto_messages": (
        {"messages": [USER, GOOD], "label": False},
        lambda r, c: labelled_answers(r, SECTION, c)[0].masked.tokens,
    ),
    "steps": (
        {"prompt": "2+2", "completions": ["I add.", "4"], "labels": [True, True]},
        lambda r, c: steps(r, SECTION, c)[0].tokens,
    ),
    "rl": ({"prompt": "2+2"}, of_examples),
    "by_hand": ({"prompt": "2+2"}, lambda r, c: make_examples([r], c.tokenizer, chat=c.chat)[0].prompt_tokens),
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "columns",
    [
        {"tools": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"functions": [FUNCTION]},
        {"functions": json.dumps([FUNCTION]), "tools": [TOOL]},
    ],
)
def test_tools_are_in_the_prompt_of_every_kind(kind: str, columns: dict[str, Any]) -> None:
    row, read = READERS[kind]
    written = text(read({**row, **columns}, chat()))
    assert written.count("Sum of numbers") == 1
    assert written.removeprefix(PLAIN.hf.bos_token or "").startswith('{"type": "function"')


@pytest.mark.parametrize("kind", [kind for kind in READERS if "messages" not in kind and kind != "dpo_implicit"])
def test_tools_without_a_chat_template_are_refused(kind: str) -> None:
    row, read = READERS[kind]
    with pytest.raises(ConfigError, match=r"tools: there is no place .* set model.chat_template"):
        read({**row, "tools": [TOOL]}, Renderer(PLAIN, False))


@pytest.mark.parametrize("key", ["tools", "functions"])
def test_tools_of_a_message(key: str) -> None:
    said = [{"role": "system", "content": "Be brief.", key: json.dumps([TOOL])}, USER, GOOD]
    (one,) = tokenize_example({"messages": said}, SECTION, chat(), "answers")
    assert text(one.tokens).count("Sum of numbers") == 1
    other = {**TOOL, "function": {**FUNCTION, "name": "subtract"}}
    with pytest.raises(ConfigError, match="describes other tools"):
        tokenize_example({"messages": said, "tools": [other]}, SECTION, chat(), "answers")
    # A template that writes the key itself, as OLMo's does, gets it.
    olmo = TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content }}{% if m." + key + " %}<" + "{{ m." + key + " }}>{% endif %}"
    )
    (one,) = tokenize_example({"messages": said}, SECTION, chat(olmo), "answers")
    assert text(one.tokens).count("Sum of numbers") == 1 and "Be brief.<[" in text(one.tokens)
    with pytest.raises(ConfigError, match="the columns tools and functions describe different tools"):
        tokenize_example({"messages": said[1:], "tools": [TOOL], "functions": [other]}, SECTION, chat(), "answers")


REFUSED = {
    "videos": ["cat.mp4"],
    "audio": "a.wav",
    "documents": [{"title": "t", "text": "secret"}],
    "enable_thinking": False,
    "reasoning_effort": "high",
    "chat_template_kwargs": {"a": 1},
    "chat_template": "{{ x }}",
}
OF_LOSS = {"weight": 0, "sample_weight": "0.5", "train": "false", "loss": False, "completion_mask": [0, 1]}


@pytest.mark.parametrize("kind", READERS)
def test_columns_that_nothing_obeys_are_refused(kind: str) -> None:
    row, read = READERS[kind]
    samples = kind in ("rl", "by_hand")
    for name, value in (REFUSED if samples else REFUSED | OF_LOSS).items():
        with pytest.raises(ConfigError, match=f"column '{name}' is .*not obeyed"):
            read({**row, name: value}, chat())
    neutral = {"videos": [], "audio": None, "documents": [], "enable_thinking": None, "weight": 1.0, "train": "true"}
    plain = list(read(row, chat()))
    assert list(read({**row, **neutral, "loss": 2.31}, chat())) == plain


@pytest.mark.parametrize("kind", READERS)
def test_a_system_prompt_is_obeyed(kind: str) -> None:
    row, read = READERS[kind]
    renderer = chat()
    assert text(read({**row, "system_prompt": "Be brief."}, renderer)).count("system: Be brief.") == 1
    with pytest.raises(ConfigError, match="the columns system and system_prompt differ"):
        read({**row, "system": "Be long.", "system_prompt": "Be brief."}, chat())


def test_a_column_in_a_template_is_text() -> None:
    row = {"q": "2+2", "a": "4", "tools": json.dumps([TOOL]), "weight": 3, "documents": "d"}
    section = DatasetSection(path="x", prompt="{tools}{weight}{documents}{q}", completion="{a}", chat=False)
    (one,) = tokenize_example(row, section, Renderer(PLAIN, False), "answers")
    assert json.dumps([TOOL]) + "3d2+2" in text(one.tokens)


def test_names_of_messages() -> None:
    said = [{**USER, "name": "Ada"}, GOOD]
    with pytest.raises(ConfigError, match=r"message 0 \(user\) has a name, 'Ada', which the chat template"):
        tokenize_example({"messages": said}, SECTION, chat(), "answers")
    named = TEMPLATE.replace("{{ m.role }}", "{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}")
    (one,) = tokenize_example({"messages": said}, SECTION, chat(named), "answers")
    assert "user Ada: 2+2" in text(one.tokens)
    with pytest.raises(ConfigError, match="message 0 has name; without a chat template"):
        tokenize_example({"prompt": said[:1], "completion": "4"}, SECTION, Renderer(PLAIN, False), "answers")


def test_plain_rows_have_one_text_of_each_side() -> None:
    """Turns of a conversation are refused wherever they stand, also those of a tool."""
    turns = [GOOD, {**USER, "content": "Three?"}, BAD]
    call = {"role": "tool", "content": "4"}
    rows: list[tuple[dict[str, Any], Callable[[dict[str, Any], Renderer], Any]]] = [
        ({"prompt": [USER], "completion": turns}, READERS["sft"][1]),
        ({"prompt": [USER], "completion": [GOOD, call, BAD]}, READERS["sft"][1]),
        ({"prompt": [USER, *turns[:2]], "completion": "4"}, READERS["sft"][1]),
        ({"prompt": "2+2", "completion": "4", "history": [["a", "b"]]}, READERS["sft"][1]),
        ({"prompt": "2+2", "completion": "4", "system": "S"}, READERS["sft"][1]),
        ({"prompt": [USER], "chosen": turns, "rejected": [BAD]}, READERS["dpo"][1]),
        ({"chosen": [USER, *turns], "rejected": [USER, GOOD]}, READERS["dpo"][1]),
        ({"prompt": [USER], "completion": turns, "label": True}, READERS["kto"][1]),
        ({"messages": [USER, *turns], "label": True}, READERS["kto"][1]),
        ({"prompt": [USER, *turns[:2]], "completions": ["a"], "labels": [True]}, READERS["steps"][1]),
        ({"prompt": [USER, *turns[:2]]}, READERS["rl"][1]),
        ({"prompt": [USER, *turns[:2]]}, READERS["by_hand"][1]),
    ]
    for row, read in rows:
        with pytest.raises(ConfigError, match=r"has messages of roles .* set model.chat_template"):
            read(row, Renderer(PLAIN, False))
    (one,) = tokenize_example({"prompt": [USER], "completion": [GOOD]}, SECTION, Renderer(PLAIN, False), "answers")
    assert text(one.tokens[one.loss_mask]) == "4" + PLAIN.hf.eos_token


@pytest.mark.parametrize(
    "written",
    [
        '[{"from": "Paris", "to": "Rome"}]',
        '[{"role": "engineer", "name": "Ada"}]',
        '[{"role": "assistant", "content": "Hi"}]',
        '[{"from": "gpt", "value": "Hi"}]',
        "[]",
    ],
)
def test_a_text_is_never_messages(written: str) -> None:
    plain = Renderer(PLAIN, False)
    for row in ({"prompt": "q", "completion": written}, {"prompt": written, "completion": "a"}, {"text": written}):
        (one,) = tokenize_example(row, SECTION, plain, "answers")
        whole = text(one.tokens).removeprefix(PLAIN.hf.bos_token or "").removesuffix(PLAIN.hf.eos_token)
        assert whole == "".join(row.values())
    chosen, _ = pair_answers({"prompt": written, "chosen": written, "rejected": "b"}, SECTION, plain) or []
    assert text(chosen.masked.tokens).count(written) == 2
    templated = DatasetSection(path="x", prompt="{q}", completion="{a}", chat=False)
    (one,) = tokenize_example({"q": written, "a": "b"}, templated, plain, "answers")
    assert written in text(one.tokens)
    assert prompt_conversation({"prompt": written}, SECTION, plain).prompt == [{"role": "user", "content": written}]


def test_json_text_is_a_remark_where_it_looks_like_messages() -> None:
    renderer = chat()
    tokenize_example({"prompt": "q", "completion": json.dumps([GOOD])}, SECTION, renderer, "answers")
    assert "looks like a JSON list of messages" in renderer.remarks.texts["json"]
    (one,) = tokenize_example({"messages": json.dumps([USER, GOOD])}, SECTION, chat(), "answers")
    assert text(one.tokens[one.loss_mask]).startswith("4")
    with pytest.raises(ConfigError, match="column 'conversations' must hold a non-empty list of messages"):
        standard_row({"conversations": "no JSON", "chosen": "a", "rejected": "b"})


@pytest.mark.parametrize(
    ("columns", "fields", "kind", "unread"),
    [
        ("messages tools source id", {}, "sequence", "source id"),
        ("messages prompt completion", {}, "sequence", "prompt completion"),
        ("conversations id", {}, "sequence", "id"),
        ("instruction input output data", {}, "sequence", "data"),
        ("prompt completion label system", {}, "sequence", "label"),
        ("text title", {}, "sequence", "title"),
        ("q a b", {"prompt": "{q}", "completion": "{a}"}, "sequence", "b"),
        ("prompt chosen rejected score", {}, "pair", "score"),
        ("q chosen rejected prompt", {"prompt": "{q}"}, "pair", "prompt"),
        ("prompt completion label id", {}, "answer", "id"),
        ("messages label id", {}, "answer", "id"),
        ("prompt completions labels image", {}, "steps", "image"),
        ("prompt answer image", {}, "prompt", "answer image"),
    ],
)
def test_columns_that_are_not_read(columns: str, fields: dict[str, str], kind: RowKind, unread: str) -> None:
    section = DatasetSection(path="x", **fields)
    assert unread_columns(columns.split(), section, kind, images=False) == unread.split()
    assert unread_columns(columns.split(), section, kind, images=False, others=unread.split()) == []


def test_empty_fields_of_csv(tmp_path: Path) -> None:
    """A missing value is refused as null is, and fills a template over other columns as nothing."""
    (tmp_path / "rows.csv").write_text("prompt,completion,note,system,tools\n2+2,,n,,\n2+2,4,,,\n")
    rows = load_rows(DatasetSection(path=str(tmp_path / "rows.csv")))
    with pytest.raises(ConfigError, match="row 0: .*column 'completion' is null"), rows.named(0) as row:
        tokenize_example(row, SECTION, chat(), "answers")
    (one,) = tokenize_example(rows[1], SECTION, chat(), "answers")
    assert "system" not in text(one.tokens)
    noted = DatasetSection(path="x", prompt="{prompt}{note}", chat=False)
    (one,) = tokenize_example(rows[1], noted, Renderer(PLAIN, False), "answers")
    assert text(one.tokens).removeprefix(PLAIN.hf.bos_token or "") == "2+24" + PLAIN.hf.eos_token
