"""Rewards of the gallery on answers whose score is plain: formats, lengths, repetition, JSON, programs, mathematics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.sandbox.run import run_test
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


def test_penalties_do_not_turn_their_sign() -> None:
    """A negative weight would pay what it is to make rare; 0 has no effect, and NaN is none."""
    tokens = [[1, 2, 1, 2, 1]]
    for weight in (-0.5, 0.0, float("nan")):
        with pytest.raises(ValueError, match="weight=.* must be above 0"):
            repetition.penalty(tokens, ngram_tokens=2, weight=weight)
        with pytest.raises(ValueError, match="per_token=.* must be above 0"):
            length.budget(tokens, 3, per_token=weight)
    for slack in (-20, 0):
        with pytest.raises(ValueError, match="slack_tokens=.* must be at least 1"):
            length.within_budget(tokens, 3, slack_tokens=slack)


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


EQUAL = """
class E(int):
    def __getattr__(self, name): return lambda *a: True
for name in ("eq", "lt", "le", "gt", "contains"):
    setattr(E, f"__{name}__", lambda *a: True)
for name in ("sub", "abs", "round"):
    setattr(E, f"__{name}__", lambda *a: 0)
class F(E.__mro__[1] if {plain} else object): pass
F.__getattr__ = E.__getattr__
for name in ("eq", "lt", "le", "gt", "contains", "sub", "abs", "round"):
    setattr(F, f"__{name}__", getattr(E, f"__{name}__"))
f = lambda *a: F()
"""
SPEAK = """
import os
for fd in range(3, 30):
    try:
        os.write(fd, b'["value", ["int", "4"], [], ""]\\n' * 9)
    except OSError:
        pass
os._exit(0)
"""
HACKS = {
    "exits": "import os; os._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "exits in the call": "def f(x):\n    import os; os._exit(0)",
    "equals everything": EQUAL.replace("{plain}", "0"),
    "a number that equals everything": EQUAL.replace("{plain}", "1"),
    "replaces builtins": "import builtins\nbuiltins.abs = abs = lambda x: 0\ndef f(x): return 1.5",
    "replaces a library": "class math:\n    isclose = lambda *a: True\ndef f(x): return 1.5",
    "reads the test": "print(open(__file__).read())\nf = lambda x: open('/proc/1/mem')",
    "speaks first": SPEAK,
    "changes the harness": 'import json\njson.dumps = lambda *a: \'["value", true, [], ""]\'\ndef f(x): return 1',
    "leaves files": "open('sitecustomize.py', 'w').write('raise SystemExit')\ndef f(x): return 1",
    "a thread that outlives": "import threading as t, time\nt.Thread(target=time.sleep, args=(60,)).start()",
    "floods": "def f(x):\n    print('x' * 10**7)\n    return 'x' * 10**7",
    "deep": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
}


def test_no_program_gives_itself_a_verdict() -> None:
    """The tests compare plain values where no code of the program runs."""
    tests = "import math\nassert abs(f(2) - 4) < 0.5\nassert f(3) == 6 and math.isclose(f(5), 10)"
    programs = [*HACKS.values(), "def f(x): return 2 * x", "import numpy\ndef f(x): return numpy.int64(2 * x)"]
    found = coding.passes(programs, [tests] * len(programs), seconds=5.0)
    assert dict(zip([*HACKS, "right", "right as numpy"], found, strict=True)) == {
        **dict.fromkeys(HACKS, 0.0), "right": 1.0, "right as numpy": 1.0,
    }  # fmt: skip
    for returned in ("F().startswith('a')", "4 in F()", "F() == 4"):
        assert coding.passes([HACKS["equals everything"]], [f"assert {returned.replace('F()', 'f(1)')}"]) == [0.0]


PROGRAM = """
from collections import Counter
class Odd(ValueError): pass
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, x): self.items.append(x); return self
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
def same(x): return x
def count(x): return Counter(x)
def sort(x): x.sort()
def apply(f, x): return [f(one) for one in x]
def odd(): raise Odd('no')
def numbers(n): yield from range(n)
def say(x): print(x)
TABLE = {1: (2, 3)}
"""
TEST = """
import contextlib, io
from collections import deque
from datetime import date
from decimal import Decimal
from fractions import Fraction
for x in (None, True, 1, -2**70, 1.5, float('inf'), 2j, 'a\\ud800', b'a', bytearray(b'b'), [1, [2]], (1, (2,)),
          {1: {2}}, frozenset({(1,)}), range(3), ..., Fraction(1, 3), Decimal('0.10'), date(2024, 2, 29), deque([1])):
    assert same(x) == x and type(same(x)) is type(x), x
assert str(same(-0.0)) == '-0.0' and same(float('nan')) != same(float('nan'))
assert count('aab') == {'a': 2, 'b': 1} and TABLE == {1: (2, 3)}
a = [3, 1, 2]
assert sort(a) is None and a == [1, 2, 3]
assert apply(lambda x: x + 1, [1, 2]) == [2, 3]
s = Stack(1)
s.push(2).push(3)
assert len(s) == 3 and s.items == [1, 2, 3] and isinstance(s, Stack)
assert Stack(1) == Stack(1) and not Stack(1) == Stack(2)
assert list(numbers(3)) == [0, 1, 2] and 2 in numbers(3)
with contextlib.redirect_stdout(io.StringIO()) as out:
    say('hi')
assert out.getvalue() == 'hi\\n'
for kind in (Odd, ValueError):
    try:
        odd()
        raise AssertionError
    except kind as error:
        assert str(error) == 'no'
"""


def test_what_crosses_between_test_and_program() -> None:
    """Values of all plain classes, changed arguments, callbacks, objects, iterators, output and exceptions."""
    found = run_test(PROGRAM, TEST, timeout_s=20.0)
    assert found.code == 0, found.stderr
    # A file of the program may have any name.
    files = {"main.py": "def f(): return 2", "main_.py": "from main import f"}
    test = "import main, main_, other\nassert main.f() == main_.f() == f() == 2 and other.g() == 3"
    modules = {"program_files": files, "test_files": {**files, "other.py": "def g(): return 3"}}
    found = run_test("from main_ import f", test, modules=["main", "main_"], timeout_s=20.0, **modules)
    assert found.code == 0, found.stderr


def test_programs_and_their_output() -> None:
    double = "n = int(input())\nprint(2 * n)"
    one = "print(2)"
    inputs, outputs = [["1", "4"]] * 3, [["2", "8\n"]] * 3
    assert coding.outputs([double, one, "x"], inputs, outputs) == [1.0, 0.0, 0.0]
    assert coding.outputs([double, one, "x"], inputs, outputs, partial=True) == [1.0, 0.5, 0.0]


@pytest.mark.thorough
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
