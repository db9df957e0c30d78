"""Source text of user code: what it reaches counts, comments and docstrings do not."""

from __future__ import annotations

import functools
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.yaml_file import load_config
from posttrain.runs.code_identity import code_texts
from posttrain.runs.source_text import source_of, source_of_name
from posttrain.user_code import import_object
from tests.stages.runs import rl_stage, write_run

FILES = {
    "task.py": '''"""A task."""
import re
from helpers import clean
import numbers_of as numbers
from pack.inner import deep

LIMIT = 3
SCALES = {}
SCALES["a"] = 2
UNUSED = 1

class Parser:
    """Parses."""
    def parse(self, text):
        return helper(text)

def helper(text):
    """Helps."""
    return len(text) > LIMIT  # why

def other(text):
    return 5

def correct(completions):
    def inner(text):
        from late import lazily
        return lazily(text)
    return [Parser().parse(clean(text)) * SCALES["a"] + numbers.one(deep(inner(text))) for text in completions]

if __name__ == "__main__":
    print(correct(["x"]))
''',
    "helpers.py": """def clean(text):
    return strip(text)
def strip(text):
    return text.strip()
def unused():
    pass
""",
    "numbers_of.py": "def one(x):\n    return 1\n",
    "late.py": "def lazily(text):\n    return text\n",
    "pack/__init__.py": "",
    "pack/inner.py": "from .deeper import deepest\ndef deep(text):\n    return deepest(text)\n",
    "pack/deeper.py": "def deepest(text):\n    return text\n",
}


def written(folder: Path, file: str = "task.py", before: str = "", after: str = "") -> Path:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        assert name != file or before in text
        path.write_text(text.replace(before, after) if before and name == file else text)
    return folder / "task.py"


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("task.py", "LIMIT = 3", "LIMIT = 4"),
        ("task.py", "> LIMIT", ">= LIMIT"),
        ("task.py", 'SCALES["a"] = 2', 'SCALES["a"] = 3'),
        ("task.py", "return helper(text)", "return not helper(text)"),
        ("task.py", "from helpers import clean", "from helpers import strip as clean"),
        ("helpers.py", "text.strip()", "text.lstrip()"),
        ("numbers_of.py", "return 1", "return 2"),
        ("late.py", "return text", "return text * 2"),
        ("pack/deeper.py", "return text", "return text * 2"),
    ],
)
def test_a_change_of_what_is_reached_is_seen(tmp_path: Path, file: str, before: str, after: str) -> None:
    same, changed = tmp_path / "same", tmp_path / "changed"
    texts = [source_of_name(written(same), "correct"), source_of_name(written(changed, file, before, after), "correct")]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("task.py", "  # why", "  # because"),
        ("task.py", '"""Helps."""', '"""Helps a lot."""'),
        ("task.py", '"""A task."""', '"""The task."""'),
        ("task.py", "UNUSED = 1", "UNUSED = 2"),
        ("task.py", "return 5", "return 6"),
        ("task.py", "print(correct", "print(len, correct"),
        ("task.py", "def helper(text):", "\n\ndef helper( text ):"),
        ("helpers.py", "def unused():\n    pass", "def unused():\n    return 1"),
    ],
)
def test_a_change_of_anything_else_is_not(tmp_path: Path, file: str, before: str, after: str) -> None:
    same, changed = tmp_path / "same", tmp_path / "changed"
    texts = [source_of_name(written(same), "correct"), source_of_name(written(changed, file, before, after), "correct")]
    assert texts[0] == texts[1] and "deepest" in texts[0] and "strip" in texts[0]


def test_a_function_in_memory_has_the_text_of_its_file(tmp_path: Path) -> None:
    file = written(tmp_path)
    correct: Any = import_object(f"{file}:correct", tmp_path)
    assert source_of(correct) == source_of_name(file, "correct")
    assert source_of(functools.partial(correct)) == source_of(correct)
    assert source_of(len) == source_of(Path.exists) == ""


def cell(text: str) -> Any:
    """The function `score` of a notebook's cell."""
    name = f"<cell {hash(text)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), namespace)
    return namespace["score"]


NOTEBOOK = """
import math
WEIGHT = 2.0
CACHE = {}
calls = 0
class Scale:
    factor = 3
    def of(self, x):
        return self.factor * x
def helper(text):
    return WEIGHT * len(text)
def score(completions):
    global calls
    calls += 1
    CACHE[calls] = 1
    return [Scale().of(helper(text)) for text in completions]  # why
"""


def test_functions_of_a_notebook() -> None:
    first = cell(NOTEBOOK)
    text = source_of(first)
    for before, after in (("2.0", "2.5"), ("len(text)", "-len(text)"), ("factor = 3", "factor = 4"), ("* x", "+ x")):
        assert source_of(cell(NOTEBOOK.replace(before, after))) != text, before
    assert source_of(cell(NOTEBOOK.replace("# why", "# because"))) == text
    first(["x"])
    assert source_of(first) == text, "its counters and caches are no part of it"


def test_functions_inside_functions_count_with_what_they_hold() -> None:
    def make(scale: float, power: Any = None) -> Any:
        def score(completions: list[str]) -> list[float]:
            return [scale * len(text) if power is None else power(text) for text in completions]

        return score

    def double(text: str) -> float:
        return 2.0

    def triple(text: str) -> float:
        return 3.0

    texts = [source_of(made) for made in (make(1.0), make(2.0), make(1.0, double), make(1.0, triple))]
    assert len(set(texts)) == 4 and source_of(make(1.0)) == texts[0]


class Judge:
    def __init__(self, threshold: float):
        self.threshold = threshold

    def __call__(self, completions: list[str]) -> list[float]:
        return [float(len(text) > self.threshold) for text in completions]


def test_objects_count_with_their_class_and_settings() -> None:
    assert source_of(Judge(1.0)) == source_of(Judge(1.0)) != source_of(Judge(2.0))
    assert "self.threshold" in source_of(Judge(1.0)) and source_of(Judge(1.0).__call__) != source_of(
        Judge(2.0).__call__
    )


PARAMETERS = """
import argparse
import os
import sys
from settings import POWER

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=float, default=1.0)
ARGS, rest = parser.parse_known_args()
SCALE = float(rest[0]) if rest else 1.0
API_KEY = os.environ.get("JUDGE_API_KEY")
UNREAD = SCALE + 1
LITERAL = 7
calls = []

def helper(text):
    calls.append(text)
    return SCALE * ARGS.width * len(text) ** POWER + float(os.environ.get("OFFSET", 0)) + LITERAL + BONUS + int(
        os.environ.get("JAX_PROCESS_ID", 0)
    )

def score(completions):
    return [helper(text) for text in completions if API_KEY != text]
"""


def test_parameters_of_a_script_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line, the environment, another file, or set by the script; keys may be renewed."""

    def texts(number: int, *words: str, bonus: float = 0.0, power: str = "2", **environment: str) -> tuple[str, str]:
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "settings.py").write_text("import os\nPOWER = int(os.environ['POWER'])\n")
        (folder / "script.py").write_text(PARAMETERS)
        with monkeypatch.context() as changed:
            changed.setattr("sys.argv", ["script.py", *words])
            changed.delitem(sys.modules, "settings", raising=False)
            for name, value in {"POWER": power, "OFFSET": "0", "JUDGE_API_KEY": "a", **environment}.items():
                changed.setenv(name, value)
            score: Any = import_object(f"{folder / 'script.py'}:score", tmp_path)
            score.__globals__["BONUS"] = bonus
            text = source_of(score)
            score(["x"])
            assert source_of(score) == text, "what it changes itself is no part of it"
            return text, source_of_name(folder / "script.py", "score")

    plain, of_name = texts(0, "1.0")
    assert texts(1, "1.0", JUDGE_API_KEY="b", JAX_PROCESS_ID="1") == (plain, of_name) and "UNREAD" not in plain
    assert texts(2, "5.0")[0] != plain and texts(3, "1.0", "--width", "2")[0] != plain
    assert texts(4, "1.0", bonus=1.0)[0] != plain and texts(5, "1.0", power="3")[0] != plain
    for text, before in zip(texts(6, "1.0", OFFSET="1"), (plain, of_name), strict=True):
        assert text != before


def test_every_function_of_a_stage_counts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def keep(rewards_PG):\n    return rewards_PG.max(axis=1) > 0.5\n")
    stage = rl_stage(filter="own.py:keep")
    texts = code_texts(load_config(write_run(tmp_path, stage)))
    assert "> 0.5" in texts["stages.0.filter=own.py:keep"]
    stage = rl_stage(refill={"limit": 1, "keep": "own.py:keep"})
    assert "stages.0.refill.keep=own.py:keep" in code_texts(load_config(write_run(tmp_path, stage)))
