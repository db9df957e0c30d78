"""Rows of labelled answers: formats, implicit prompts, malformed rows, and packing into the rows of a batch."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from posttrain.config import DatasetSection, PreferenceSection
from posttrain.data.chat import Renderer
from posttrain.data.columns import standard_row
from posttrain.data.pair_examples import ComparisonBatches, PairExamples, all_rows
from posttrain.data.preference import labelled_answers, margin, pair_answers, steps
from posttrain.data.sources import Rows
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError

pytestmark = pytest.mark.fast

BYTES = load_tokenizer("bytes")
PLAIN, CHAT = Renderer(BYTES, chat=False), Renderer(BYTES, chat=True)
DATASET = DatasetSection(path="x.jsonl")
USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "Hi?"), ("assistant", "Yes."), ("assistant", "No.")))


def answers(row: dict[str, Any], renderer: Renderer = PLAIN, **dataset: Any) -> list[tuple[str, str, int]]:
    """Prompt, answer and role of each sequence, as text."""
    found = pair_answers(standard_row(row)[0], DATASET.model_copy(update=dataset), renderer)
    assert found is not None
    texts = []
    for masked, role, _ in found:
        first = masked.mask.index(True)
        answer = [token for token, kept in zip(masked.tokens, masked.mask, strict=True) if kept]
        parts = (masked.tokens[:first], answer)
        texts.append((*(BYTES.decode(part, skip_special_tokens=True) for part in parts), role))
    return texts


def test_text() -> None:
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    assert answers(row) == [("1+1=", "2", 1), ("1+1=", "3", -1)]
    assert answers({"q": "7", "chosen": "2", "rejected": "3"}, prompt="{q}?") == [("7?", "2", 1), ("7?", "3", -1)]


def test_implicit_prompt_of_texts() -> None:
    row = {"chosen": "Human: Hi\n\nAssistant: I am well", "rejected": "Human: Hi\n\nAssistant: I ask you"}
    start = "Human: Hi\n\nAssistant: I"
    assert answers(row) == [(start, " am well", 1), (start, " ask you", -1)]
    one_longer = {"chosen": "a b c", "rejected": "a b"}
    assert answers(one_longer) == [("a", " b c", 1), ("a", " b", -1)]
    with pytest.raises(ConfigError, match="whole texts without a prompt"):
        pair_answers(row, DATASET, CHAT)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "Hi?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [{**USER, "name": None}, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Hi?", "chosen": [{**USER, "content": "Hi? \n"}, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Hi?", "chosen": GOOD, "rejected": {"from": "gpt", "value": "No."}},
        {"conversations": [{"from": "human", "value": "Hi?"}], "chosen": GOOD, "rejected": BAD},
        {"conversations": json.dumps([USER]), "chosen": GOOD, "rejected": BAD},
        {"instruction": "Hi?", "input": "", "chosen": "Yes.", "rejected": "No."},
    ],
)
def test_messages(row: dict[str, Any]) -> None:
    """The same in every form that datasets have."""
    prompt = "user\nHi?\nassistant\n"
    assert answers(row, CHAT) == [(prompt, "Yes.", 1), (prompt, "No.", -1)]
    (start, _, _), _ = answers(row, CHAT, system="S")
    assert start == f"system\nS\n{prompt}"


def test_answers_that_bring_the_system_message() -> None:
    """Red without: the prompt is written twice."""
    system = {"role": "system", "content": "S"}
    row = {"prompt": "Hi?", "chosen": [system, USER, GOOD], "rejected": [system, USER, BAD]}
    assert answers(row, CHAT) == answers({**row, "prompt": [system, USER]}, CHAT)
    assert [text for text, _, _ in answers(row, CHAT)] == ["system\nS\nuser\nHi?\nassistant\n"] * 2
    assert answers(row, CHAT, system="S") == answers(row, CHAT)
    with pytest.raises(ConfigError, match="chosen begins with another system message than the prompt"):
        answers(row, CHAT, system="T")
    with pytest.raises(ConfigError, match="chosen and rejected begin with different system messages"):
        answers({**row, "rejected": [USER, BAD]}, CHAT)
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, USER]
    last = answers({"prompt": before, "chosen": [USER, GOOD], "rejected": [USER, BAD]}, CHAT)
    assert last == answers({"prompt": before, "chosen": [GOOD], "rejected": [BAD]}, CHAT)
    for other in ([{**USER, "content": "Ho?"}, GOOD], [system, GOOD]):
        with pytest.raises(ConfigError, match=f"chosen begins with a {other[0]['role']} message after the prompt"):
            answers({**row, "chosen": other}, CHAT)


def test_same_answers_are_left_out() -> None:
    assert pair_answers({"prompt": "a", "chosen": "b", "rejected": "b"}, DATASET, PLAIN) is None


def test_single_answers() -> None:
    row = {"prompt": "1+1=", "completion": "2", "label": True}
    assert [a.role for a in labelled_answers(row, DATASET, PLAIN)] == [1]
    assert [a.role for a in labelled_answers({**row, "label": 0}, DATASET, PLAIN)] == [-1]
    said = labelled_answers({"messages": [USER, GOOD], "label": True}, DATASET, CHAT)
    assert said == labelled_answers({"prompt": "Hi?", "completion": "Yes.", "label": True}, DATASET, CHAT)
    both = labelled_answers({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, DATASET, PLAIN)
    assert [a.role for a in both] == [1, -1]


def test_steps() -> None:
    row = {"prompt": "Q", "completions": ["1+1=2", "2+2=5"], "labels": [True, False]}
    masked, roles = steps(row, DATASET, PLAIN)
    ends = [i for i, kept in enumerate(masked.mask) if kept]
    assert [BYTES.decode([masked.tokens[i]]) for i in ends] == ["\n", "\n"]
    assert [roles[i] for i in ends] == [1, -1] and sum(map(abs, roles)) == 2
    assert BYTES.decode(masked.tokens) == "Q1+1=2\n2+2=5\n"
    with pytest.raises(ConfigError, match="a step ends with its first newline"):
        steps({**row, "completions": ["1+1\n=2", "2+2=5"]}, DATASET, PLAIN)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejcted": "c"}, "missing: 'rejected'; did you mean 'rejcted'?"),
        ({"prompt": "a", "completion": "b", "label": True}, "this loss needs pairs"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "one of chosen and rejected is a string"),
        ({"prompt": "a", "chosen": [USER], "rejected": [BAD]}, "chosen must end with an assistant message"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "share no message"),
        ({"prompt": "a", "chosen": None, "rejected": "c"}, "column 'chosen' is null"),
    ],
)
def test_what_is_wrong_with_a_pair(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pair_answers(row, DATASET, CHAT)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b", "label": "good"}, "column 'label' must be true or false, got 'good'"),
        ({"prompt": "a", "completion": "b"}, "missing: 'chosen', 'rejected', 'label'; dataset.completion: "),
        (
            {"prompt": "a", "label": True},
            r"missing: 'chosen', 'rejected', 'completion'; .*\(dataset.path: file.py:func",
        ),
    ],
)
def test_what_is_wrong_with_an_answer(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        labelled_answers(row, DATASET, PLAIN)


def test_a_template_makes_a_judged_completion() -> None:
    chosen = DATASET.model_copy(update={"prompt": "{q}=", "completion": "{a}"})
    found = labelled_answers({"q": "1+1", "a": "2", "label": True}, chosen, PLAIN)
    assert [(BYTES.decode(answer.masked.tokens), answer.role) for answer in found] == [("1+1=2", 1)]


def units(table: list[dict[str, Any]], kind: str = "pairs", row_tokens: int = 40, **fields: Any) -> PairExamples:
    section = PreferenceSection(
        dataset=DATASET,
        num_steps=1,
        batch_rows=2,
        row_tokens=row_tokens,
        optimizer={"learning_rate": 1.0},
        **{name: fields.pop(name) for name in ("overlong", "packing") if name in fields},
    )
    rows = Rows("x.jsonl", table, 0, len(table))
    return PairExamples(section=section, dataset=DATASET, rows=rows, renderer=PLAIN, kind=kind, **fields)


TABLE = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "no" * (i % 3 + 1), "margin": i} for i in range(7)]


def sequences(batch: Any) -> list[tuple[int, int, str, set[int]]]:
    """Row, segment, text and roles of every sequence; its positions count from 0."""
    found = []
    for row in range(batch.shape[0]):
        for segment in range(1, int(batch.segments[row].max()) + 1):
            here = batch.segments[row] == segment
            assert np.array_equal(batch.positions[row][here], np.arange(here.sum()))
            text = BYTES.decode(batch.tokens[row][here].tolist())
            found.append((row, segment, text, set(batch.roles[row][here].tolist())))
    return found


def test_pairs_share_a_row() -> None:
    made = [item for batch, _ in all_rows(units(TABLE, margins=True)) for item in sequences(batch)]
    assert len(made) == 14
    for (row, first, chosen, one), (other, second, rejected, two) in zip(made[::2], made[1::2], strict=True):
        assert row == other and second == first + 1 and first % 2 == 1
        assert (one, two) == ({0, 1}, {0, -1})
        assert chosen.split("=")[0] == rejected.split("=")[0] and rejected.split("=")[1].startswith("no")
    for batch, unit in all_rows(units(TABLE, margins=True)):
        assert np.array_equal(batch.margins, np.where(batch.roles == 1, unit % 7, 0))
        assert np.array_equal(batch.loss_weight > 0, batch.roles != 0)
        assert np.array_equal(batch.segments == 0, batch.tokens == 0)


@pytest.mark.parametrize("row_tokens", [40, 11])
def test_what_prompts_have_in_common_stands_once(row_tokens: int) -> None:
    """Each answer with what it goes on from is the sequence that it is without sharing."""
    table = [*TABLE, {"prompt": "x", "chosen": "1", "rejected": "2"}]
    apart = [unit for i in range(len(table)) if (unit := units(table, margins=True)(i)) is not None]
    made, numbers = [], set()
    for batch, unit in all_rows(units(table, margins=True, share_prompts=True, row_tokens=row_tokens, overlong="drop")):
        assert batch.parents is not None and np.array_equal(batch.loss_weight > 0, batch.roles != 0)
        for row, number in {(r, int(n)) for r, n in np.argwhere(batch.segments) for n in [unit[r, n]]}:
            whole = apart[number]
            here = (unit[row] == number) & (batch.segments[row] > 0)
            for segment in np.unique(batch.segments[row][here & (batch.roles[row] != 0)]):
                own = batch.segments[row] == segment
                parent = batch.parents[row][own]
                seen = own | ((batch.segments[row] == parent[0]) & (parent[0] > 0))
                assert (parent == parent[0]).all() and np.array_equal(batch.positions[row][seen], np.arange(seen.sum()))
                part = whole["part"] == 1 + (batch.roles[row][own].min() < 0)
                assert not batch.loss_weight[row][own][0]
                for name in ("tokens", "roles", "loss_weight", "margins"):
                    assert np.array_equal(getattr(batch, name)[row][seen], whole[name][part]), name
                made.append((number, segment))
            numbers.add(number)
    # Of "0+1=" with 1 and no, 15 tokens, 4 stand once.
    assert numbers == (set(range(8)) if row_tokens == 40 else {0, 3, 6, 7}), numbers
    assert len(made) == 2 * len(numbers)


def test_kto_gets_answers_to_other_prompts() -> None:
    table = [{"prompt": f"{i}+1=", "completion": str(i + 1), "label": i != 1} for i in range(3)]
    made = [item for batch, _ in all_rows(units(table, "answers_and_others")) for item in sequences(batch)]
    assert [(text, roles - {0}) for _, _, text, roles in made] == [
        ("0+1=1", {1}),
        ("0+1=2", {2}),
        ("1+1=2", {-1}),
        ("1+1=3", {2}),
        ("2+1=3", {1}),
        ("2+1=1", {2}),
    ]
    from_pairs = units(TABLE, "answers_and_others")
    assert len(from_pairs) == 14
    first = from_pairs(1)
    assert first is not None and set(first["roles"].tolist()) == {0, -1, 2}
    with pytest.raises(ConfigError, match="at least two rows"):
        units(table[:1], "answers_and_others")(0)
    # Several answers to one prompt: the next row with another prompt.
    repeated = [{**table[0], "completion": "x"}, *table[:2]]
    made = [item for batch, _ in all_rows(units(repeated, "answers_and_others")) for item in sequences(batch)]
    assert [text for _, _, text, roles in made if 2 in roles] == ["0+1=2", "0+1=2", "1+1=x"]
    with pytest.raises(ConfigError, match="with other prompts"):
        units(repeated[:2], "answers_and_others")(0)


def test_weight_on_prompts_of_chosen_answers() -> None:
    unit = units(TABLE, weigh_prompts=True)(0)
    assert unit is not None
    first = unit["part"] == 1
    assert unit["loss_weight"][first].tolist() == [0.0] + [1.0] * (int(first.sum()) - 1)
    assert np.array_equal(unit["loss_weight"][~first] > 0, unit["roles"][~first] != 0)


def test_overlong_pairs() -> None:
    with pytest.raises(ConfigError, match="x.jsonl row 2: it has 7 \\+ 12 tokens, which must share row_tokens=16"):
        units(TABLE, row_tokens=16)(2)
    assert units(TABLE, row_tokens=16, overlong="drop")(2) is None
    cut = units(TABLE, row_tokens=16, overlong="truncate")(2)
    assert cut is not None and np.bincount(cut["part"]).tolist() == [0, 7, 9]
    assert units(TABLE, row_tokens=8, overlong="truncate")(2) is None


@pytest.mark.parametrize(("kind", "both"), [("pairs", 48), ("answers", 24), ("answers_and_others", 48)])
def test_answers_that_truncation_makes_equal_are_dropped(kind: str, both: int) -> None:
    rows = [{"prompt": p, "chosen": f"{'a ' * 9}good", "rejected": f"{'a ' * 9}bad"} for p in ("0", "1")]
    cut = units(rows, kind, row_tokens=both - 14, overlong="truncate")
    assert all(cut(index) is None for index in range(len(cut)))
    whole = units(rows, kind, row_tokens=2 * both, overlong="truncate")
    assert all(whole(index) is not None for index in range(len(whole)))


@pytest.mark.parametrize("value", [None, "", "0.0", 0])
def test_a_margin_that_is_absent_or_a_text(value: Any) -> None:
    assert margin({"margin": value}) == margin({}) == 0.0
    assert margin({"margin": "-1.5"}) == -1.5
    for wrong in (True, "much", "nan", [1]):
        with pytest.raises(ConfigError, match="column 'margin' must be a finite number"):
            margin({"margin": wrong})


def test_labels_of_a_csv_file() -> None:
    roles = {value: labelled_answers({"prompt": "a", "completion": "b", "label": value}, DATASET, PLAIN)[0].role
             for value in ("True", "true", "1", "1.0", " 1", "False", "false", "0", "0.0")}  # fmt: skip
    assert list(roles.values()) == [1] * 5 + [-1] * 4


def test_the_stream_goes_on_where_it_stood() -> None:
    stream = ComparisonBatches(units(TABLE), seed=1)
    next(stream)
    state, expected = stream.state(), [next(stream).tokens for _ in range(3)]
    other = ComparisonBatches(units(TABLE), seed=1)
    other.restore(state)
    assert all(np.array_equal(next(other).tokens, tokens) for tokens in expected)
    with pytest.raises(ConfigError, match="cannot resume: seed"):
        ComparisonBatches(units(TABLE), seed=2).restore(state)


def test_answers_follow_a_prompt_that_opens_the_thought() -> None:
    """As sampled: both sides share the prompt with its mark, and each has its own thought, with and without a pair."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.hf.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{{ m.content.split('</think>')[-1] }}<|im_end|>"
        "{% else %}U:{{ m.content }}{% endif %}{% endfor %}{{ 'A:<think>\n' if add_generation_prompt }}"
    )
    renderer = Renderer(tokenizer, chat=True)
    sides = {"chosen": "<think>\na\n</think>\n\nYes.", "rejected": "<think>\nb\n</think>\n\nNo."}
    said = {name: [{"role": "assistant", "content": text}] for name, text in sides.items()}
    assert answers({"prompt": [USER], **said}, renderer) == [
        ("U:Hi?A:<think>\n", "a\n</think>\n\nYes.", 1),
        ("U:Hi?A:<think>\n", "b\n</think>\n\nNo.", -1),
    ]
    row = {"prompt": [USER], "completion": said["rejected"], "label": False}
    (one,) = labelled_answers(standard_row(row)[0], DATASET, renderer)
    assert one.prompt[0] == renderer.prompt([USER]) and one.masked.tokens[: len(one.prompt[0])] == one.prompt[0]
    with pytest.raises(ConfigError, match=r"opens a thought in the prompt .*model.chat_template_args"):
        answers({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, renderer)
