"""Identity of user code: files that a function imports and values that it reads count, comments do not."""

from __future__ import annotations

import functools
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import Locator
from posttrain.config.yaml_file import load_config
from posttrain.errors import ConfigError
from posttrain.runs.code_identity import CODE_NAME, UserCode, check_code, code_digests, remember_code
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
    "pack/__init__.py": "DEPTH = 1\n",
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


def of_name(file: Path, name: str = "correct") -> dict[str, str]:
    code = UserCode()
    code.add_name(Locator(f"{file}:{name}"))
    return code.digests


def of_object(found: Any) -> dict[str, str]:
    code = UserCode()
    code.add_object(found)
    return code.digests


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(part for part in before | after if before.get(part) != after.get(part))


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("task.py", "LIMIT = 3", "LIMIT = 4"),
        ("task.py", "> LIMIT", ">= LIMIT"),
        ("task.py", 'SCALES["a"] = 2', 'SCALES["a"] = 3'),
        ("task.py", "return helper(text)", "return not helper(text)"),
        ("task.py", "from helpers import clean", "from helpers import strip as clean"),
        ("task.py", '"""Helps."""', '"""Helps a lot."""'),
        ("helpers.py", "text.strip()", "text.lstrip()"),
        ("numbers_of.py", "return 1", "return 2"),
        ("late.py", "return text", "return text * 2"),
        ("pack/__init__.py", "DEPTH = 1", "DEPTH = 2"),
        ("pack/deeper.py", "return text", "return text * 2"),
    ],
)
def test_an_imported_file_that_changes_is_named(tmp_path: Path, file: str, before: str, after: str) -> None:
    old, new = written(tmp_path / "old"), written(tmp_path / "new", file, before, after)
    assert changed(of_name(old), of_name(new)) == [file]
    assert {"task.py", "helpers.py", "pack/deeper.py"} <= of_name(old).keys()


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("task.py", "  # why", "  # because"),
        ("task.py", "def helper(text):", "\n\ndef helper( text ):"),
        ("helpers.py", "    pass", "\n\n    pass  # nothing"),
    ],
)
def test_comments_and_layout_do_not_count(tmp_path: Path, file: str, before: str, after: str) -> None:
    old, new = written(tmp_path / "old"), written(tmp_path / "new", file, before, after)
    assert of_name(old) == of_name(new)


def test_a_function_in_memory_has_the_files_of_its_name(tmp_path: Path) -> None:
    file = written(tmp_path)
    correct: Any = import_object(f"{file}:correct", tmp_path)
    assert of_name(file).items() <= of_object(correct).items()
    assert of_name(file).items() <= of_object(functools.partial(correct)).items()
    assert changed({}, of_object(len)) == ["settings of builtin_function_or_method"]
    assert changed({}, of_object(Path.exists)) == ["settings of function"]


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
    text = of_object(first)
    for before, after in (("2.0", "2.5"), ("len(text)", "-len(text)"), ("factor = 3", "factor = 4"), ("* x", "+ x")):
        assert of_object(cell(NOTEBOOK.replace(before, after))) != text, before
    assert of_object(cell(NOTEBOOK.replace("# why", "# because"))) == text
    first(["x"])
    assert of_object(first) == text, "its counters and caches are no part of it"


def test_functions_inside_functions_count_with_what_they_hold() -> None:
    def make(scale: float, power: Any = None) -> Any:
        def score(completions: list[str]) -> list[float]:
            return [scale * len(text) if power is None else power(text) for text in completions]

        return score

    def double(text: str) -> float:
        return 2.0

    def triple(text: str) -> float:
        return 3.0

    texts = [of_object(made) for made in (make(1.0), make(2.0), make(1.0, double), make(1.0, triple))]
    assert len({str(text) for text in texts}) == 4 and of_object(make(1.0)) == texts[0]


class Judge:
    def __init__(self, threshold: float):
        self.threshold = threshold

    def __call__(self, completions: list[str]) -> list[float]:
        return [float(len(text) > self.threshold) for text in completions]


def test_objects_count_with_their_class_and_settings() -> None:
    assert of_object(Judge(1.0)) == of_object(Judge(1.0)) != of_object(Judge(2.0))
    assert changed(of_object(Judge(1.0).__call__), of_object(Judge(2.0).__call__)) == ["threshold of Judge"]


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

    def digests(
        number: int, *words: str, bonus: float = 0.0, power: str = "2", **environment: str
    ) -> tuple[dict[str, str], dict[str, str]]:
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "settings.py").write_text("import os\nPOWER = int(os.environ['POWER'])\n")
        (folder / "script.py").write_text(PARAMETERS)
        with monkeypatch.context() as patch:
            patch.setattr("sys.argv", ["script.py", *words])
            patch.delitem(sys.modules, "settings", raising=False)
            for name, value in {"POWER": power, "OFFSET": "0", "JUDGE_API_KEY": "a", **environment}.items():
                patch.setenv(name, value)
            score: Any = import_object(f"{folder / 'script.py'}:score", tmp_path)
            score.__globals__["BONUS"] = bonus
            found = of_object(score)
            score(["x"])
            assert of_object(score) == found, "what it changes itself is no part of it"
            return found, of_name(folder / "script.py")

    object_before, name_before = digests(0, "1.0")
    assert digests(1, "1.0", JUDGE_API_KEY="b", JAX_PROCESS_ID="1") == (object_before, name_before)
    cases: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
        ("SCALE of helper", ("5.0",), {}),
        ("ARGS of helper", ("1.0", "--width", "2"), {}),
        ("BONUS of helper", ("1.0",), {"bonus": 1.0}),
        ("environment variable POWER", ("1.0",), {"power": "3"}),
        ("environment variable OFFSET", ("1.0",), {"OFFSET": "1"}),
    ]
    for number, (part, words, settings) in enumerate(cases, 2):
        found, named = digests(number, *words, **settings)
        assert part in changed(object_before, found)
        assert changed(name_before, named) == [part] * part.startswith("environment")


def test_every_function_of_a_stage_counts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def keep(rewards_PG):\n    return rewards_PG.max(axis=1) > 0.5\n")
    stage = rl_stage(algorithm={"kind": "grpo", "filter": "own.py:keep"})
    digests = code_digests(load_config(write_run(tmp_path, stage)))
    assert digests["stages.0.algorithm.filter=own.py:keep"].keys() == {"own.py"}
    stage = rl_stage(refill={"limit": 1, "keep": "own.py:keep"})
    assert "stages.0.refill.keep=own.py:keep" in code_digests(load_config(write_run(tmp_path, stage)))


def test_a_refusal_names_the_file_and_the_ways_out(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from limits import BOUND\ndef keep(rewards_PG):\n    return rewards_PG > BOUND\n")
    limits = tmp_path / "limits.py"
    limits.write_text("BOUND = 0.5\n")
    config = load_config(write_run(tmp_path, rl_stage(algorithm={"kind": "grpo", "filter": "own.py:keep"})))
    remember_code(tmp_path, config)
    limits.write_text("BOUND = 0.5  # half\n")
    check_code(tmp_path, config)
    limits.write_text("BOUND = 0.6\n")
    with pytest.raises(
        ConfigError, match=r"code of stages.0.algorithm.filter=own.py:keep \(limits.py\); .*delete .*code"
    ):
        check_code(tmp_path, config)
    (tmp_path / CODE_NAME).unlink()
    check_code(tmp_path, config)
    assert (tmp_path / CODE_NAME).exists(), "the run resumes with the new code, which is its code from now on"


def test_a_reward_that_reads_a_clock_says_so(tmp_path: Path) -> None:
    score = cell("import time\nSTART = time.time()\ndef score(completions):\n    return [time.time() - START]\n")
    again = cell("import time\nSTART = time.time()\ndef score(completions):\n    return [time.time() - START]\n")
    assert changed(of_object(score), of_object(again)) == ["START of score"]
