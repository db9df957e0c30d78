"""Rewards of the gallery on answers whose score is plain: formats, lengths, repetition, JSON, programs, mathematics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rewards import coding, length, repetition
from rewards import format as formats


def test_think_tags() -> None:
    texts = {
        "<think>a\nb</think>\n\nThe answer.": 1.0,
        " <think></think>x": 1.0,
        "<think>a</think>": 0.0,
        "<think>a</think> \n": 0.0,
        "a <think>b</think> c": 0.0,
        "<think>a</think>b</think>c": 0.0,
        "<think>a<think>b</think>c": 0.0,
        "a</think>b": 0.0,
        "no tags": 0.0,
    }
    assert formats.think_tags(list(texts)) == list(texts.values())
    assert formats.think_tags(["a</think>b", "<think>a</think>b"], opened=True) == [1.0, 0.0]


def test_think_and_answer() -> None:
    texts = {
        "<think>a</think>\n<answer>b</answer>": 1.0,
        "<think>a</think><answer>b</answer> end": 0.0,
        "<think>a</think><answer>b": 0.0,
        "<answer>b</answer><think>a</think>": 0.0,
        "<think><answer>a</answer></think><answer>b</answer>": 0.0,
    }
    assert formats.think_and_answer(list(texts)) == list(texts.values())
    assert formats.think_and_answer(["a</think><answer>b</answer>"], opened=True) == [1.0]


def test_cosine_length() -> None:
    """By its ends, its middle, the direction for each kind of answer, and beyond the limit."""
    values = {"correct_short": 2.0, "correct_long": 1.0, "wrong_short": -10.0, "wrong_long": 0.0, "exceeded": -12.0}
    lengths = [0, 50, 99, 100, 0, 50, 99, 150, 5]
    completions = ["#### 1"] * 4 + ["#### 2"] * 4 + ["#### 1"]
    found = length.cosine(
        completions,
        [[7] * count for count in lengths],
        answer=["#### 1"] * 9,
        correct="rewards.gsm8k:correct",
        max_tokens=100,
        **values,
    )
    assert found == pytest.approx([2, 1.5, 1, -12, -10, -5, 0, -12, 2], abs=0.01)
    assert found[8] < found[0] and found[5] > found[4]


def test_repetition_penalty() -> None:
    tokens = [[1, 2, 3, 1, 2, 3], [1, 2, 3, 4], [5] * 11, []]
    assert repetition.penalty(tokens, ngram_tokens=3, weight=0.5) == pytest.approx([-0.125, 0, -0.5 * 8 / 9, 0])
    with pytest.raises(ValueError, match="ngram_tokens=0 must be at least 1"):
        repetition.penalty(tokens, ngram_tokens=0, weight=1.0)


def test_json_schema() -> None:
    json_schema = pytest.importorskip("rewards.json_schema", reason="needs the extra rewards")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    texts = ['{"n": 1}', 'Here:\n```json\n{"n": 2}\n```', '{"n": "1"}', "[NaN]", "{'n': 1}", "", "[" * 100_000]
    assert json_schema.valid(texts, schema) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert json_schema.valid(texts[:4], json.dumps(schema), parsed=0.25) == [1.0, 1.0, 0.25, 0.0]
    assert json_schema.valid(["1", "1"], [{"type": "integer"}, '{"type": "string"}']) == [1.0, 0.0]
    with pytest.raises(ValueError, match="schema: 'whole' is not valid"):
        json_schema.valid(["1"], {"type": "whole"})


def test_programs_and_their_tests() -> None:
    """Red if an exit code of 0 were enough: two of the programs leave before their tests, or hide from them."""
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
    texts = {
        "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.": 1.0,
        "def add(a, b):\n    return a + b": 1.0,
        "def add(a, b):\n    return 3": 0.0,
        "import sys; sys.exit(0)": 0.0,
        "import os; os._exit(0)": 0.0,
        "def add(a, b):": 0.0,
        "while True: pass": 0.0,
        "": 0.0,
    }
    found = coding.passes(list(texts), [tests] * len(texts), seconds=1.0)
    assert found == list(texts.values())
    assert coding.passes([next(iter(texts))], ["assert add(2, 2) == 4"]) == [1.0]


def test_programs_and_their_output() -> None:
    double = "n = int(input())\nprint(2 * n)"
    one = "print(2)"
    inputs, outputs = [["1", "4"]] * 3, [["2", "8\n"]] * 3
    assert coding.outputs([double, one, "x"], inputs, outputs) == [1.0, 0.0, 0.0]
    assert coding.outputs([double, one, "x"], inputs, outputs, partial=True) == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.thorough)])
def test_human_eval(shared: Path, every: int) -> None:
    """All 164 solutions pass in the thorough run; a function that returns nothing, or leaves, never does."""
    path = shared / "data/code/HumanEval.jsonl"
    if not path.exists():
        pytest.skip("HumanEval is not there")
    rows = [json.loads(line) for line in path.read_text().splitlines()][::every]
    columns: Any = {name: [row[name] for row in rows] for name in ("prompt", "test", "entry_point")}
    solutions = [row["canonical_solution"] for row in rows]
    whole = [f"```python\n{row['prompt']}{row['canonical_solution']}\n```" for row in rows]
    assert coding.human_eval(solutions, **columns) == [1.0] * len(rows)
    assert coding.human_eval(whole, **columns) == [1.0] * len(rows)
    for broken in ("    return None\n", "    import sys; sys.exit(0)\n"):
        assert sum(coding.human_eval([broken] * len(rows), **columns)) == 0


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.thorough)])
def test_mathematics(shared: Path, every: int) -> None:
    """All 500 answers of MATH-500 equal themselves, and what their solutions say, in the thorough run."""
    math_answers = pytest.importorskip("rewards.math_answers", reason="needs the extra rewards")
    answers = ["0.5", r"\boxed{1/2}", r"so $\frac12$", r"\boxed{0.51}", "nothing", ""]
    assert math_answers.correct(answers, [r"\frac{1}{2}"] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert math_answers.correct(["1", r"\boxed{(2, 1]}"], ["", "(1,2]"]) == [None, 0.0]
    rows = [json.loads(line) for line in (shared / "data/math/math500.jsonl").read_text().splitlines()][::every]
    gold = [row["answer"] for row in rows]
    assert math_answers.correct([row["solution"] for row in rows], gold) == [1.0] * len(rows)
    assert math_answers.correct([f"\\boxed{{{one}}}" for one in gold], gold) == [1.0] * len(rows)
    assert sum(math_answers.correct(gold[1:] + gold[:1], gold)) < 10
