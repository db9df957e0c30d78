"""The reward lab finds seeded faults of reward functions, and none in the project's own."""

from __future__ import annotations

import ast
import json
import time
from pathlib import Path

import pytest

from posttrain.errors import ConfigError
from posttrain.reward.lab.score import score_text
from posttrain.runs.reward_lab import LabReport, LabSettings, dataset_of, examine

ROWS = [
    {"prompt": f"A train of {3 * n + 20} seats has {n + 12} guests. How many more fit?", "answer": str(2 * n + 8)}
    for n in range(12)
]
FAULTY = """
import random, re, time

def number(text):
    found = re.findall(r"-?\\d+", text)
    return int(found[-1][:300]) if found else None

def wrong_sign(completions, answer):
    return [-float(number(c) == int(a)) for c, a in zip(completions, answer)]

def always_zero(completions, answer):
    return [float(number(c) == a) for c, a in zip(completions, answer)]

def always_one(completions, answer):
    return [1.0 if a else 0.0 for a in answer]

def raises_on_empty(completions, answer):
    return [float(c.split()[-1] == a) for c, a in zip(completions, answer)]

def off_by_one(completions, answer):
    return [float(number(c[:-1]) == int(a)) for c, a in zip(completions, answer)]

def sensitive_to_space(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def pays_for_length(completions, answer):
    return [float(number(c) == int(a)) + min(len(c) / 500, 1.0) for c, a in zip(completions, answer)]

def reads_the_prompt(prompts, completions, answer):
    return [float(a in re.findall(r"\\d+", p + " " + c)) for p, c, a in zip(prompts, completions, answer)]

def not_deterministic(completions, answer):
    return [random.random() * (number(c) == int(a)) for c, a in zip(completions, answer)]

def hangs(completions, answer):
    while any(len(c) > 5000 for c in completions):
        time.sleep(0.1)
    return [float(number(c) == int(a)) for c, a in zip(completions, answer)]

def wrong_number_of_values(completions, answer):
    return [float(number(c) == int(a)) for c, a in zip(completions, answer) if c]

def part_of_a_number(completions, answer):
    return [float(a in c) for c, a in zip(completions, answer)]

def not_a_number(completions, answer):
    found = [number(c) for c in completions]
    return [float("nan") if n is None else float(n == int(a)) for n, a in zip(found, answer)]

def compares_with_the_batch(completions, answer):
    right = [float(number(c) == int(a)) for c, a in zip(completions, answer)]
    return [r - right[0] * i / len(right) for i, r in enumerate(right)]

def any_of_many(completions, answer):
    return [float(a in re.findall(r"\\d+", c)) for c, a in zip(completions, answer)]

def never(completions, answer):
    return [None for _ in completions]

def pays_for_nines(completions, answer):
    return [float(c.strip() == a) + 0.3 * c.count("9") for c, a in zip(completions, answer)]

def adds_up(completions, answer):
    return [max(float(number(c) == int(a)), min(c.count("8") / 8, 1.0)) for c, a in zip(completions, answer)]

def grows(completions):
    return [len(c) / 1000 for c in completions]

def slow(completions, answer):
    if len(completions) == 1:
        time.sleep(0.51)
    return [float(number(c) == int(a)) for c, a in zip(completions, answer)]
"""
GOOD = """
import re

def correct(completions, answer):
    found = [re.findall(r"-?\\d+", text) for text in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer)]
"""
EXPECTED = {
    "wrong_sign": "sign",
    "always_zero": "constant",
    "always_one": "constant",
    "raises_on_empty": "error",
    "off_by_one": "golden",
    "sensitive_to_space": "whitespace",
    "pays_for_length": "length",
    "reads_the_prompt": "leak",
    "not_deterministic": "random",
    "hangs": "timeout",
    "wrong_number_of_values": "batch",
    "part_of_a_number": "substring",
    "not_a_number": "error",
    "compares_with_the_batch": "batch",
    "any_of_many": "hedge",
    "never": "never",
    "pays_for_nines": "absurd",
    "adds_up": "repetition",
    "grows": "length",
    "slow": "slow",
}
"""Word for the fault that each function has."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "faulty.py").write_text(FAULTY)
    return folder


def examined(folder: Path, *functions: str, **settings: object) -> LabReport:
    rows = dataset_of(str(folder / "rows.jsonl"), None)
    return examine(functions, rows, None, LabSettings(num_rows=6, timeout_s=2.0, **settings))  # type: ignore[arg-type]


def test_seeded_faults_are_found(folder: Path) -> None:
    start = time.monotonic()
    found = examined(folder, *(f"{folder / 'faulty.py'}:{name}" for name in EXPECTED))
    took = time.monotonic() - start
    codes = {name: {finding.code for finding in findings} for name, findings in found.findings.items()}
    assert {name: EXPECTED[name] in codes[name] for name in EXPECTED} == dict.fromkeys(EXPECTED, True), codes
    assert took < 300, took
    # The text that is cited is the one that is paid for, not the first of its kind, which is white space.
    (absurd,) = (one for one in found.findings["pays_for_nines"] if one.code == "absurd")
    assert "such as '...9999" in absurd.text
    assert not found.passed and all(finding.remedy for findings in found.findings.values() for finding in findings)


def test_good_functions_have_no_findings(folder: Path) -> None:
    found = examined(folder, "rewards/arithmetic.py:correct", "rewards/gsm8k.py:correct")
    assert found.passed, found.findings
    assert list(found.findings) == ["arithmetic.correct", "gsm8k.correct"]
    assert any("opposite order in" in line for line in found.lines)


def test_rewards_of_form(folder: Path) -> None:
    """Functions that read no answer: nothing is expected of right and wrong ones; a form that no answer has is told."""
    form = examined(folder, "rewards/gsm8k.py:has_marker")
    assert [finding.code for finding in form.findings["has_marker"]] == ["constant"]
    assert examined(folder, "rewards/gsm8k.py:has_marker", golden="#### {answer}").passed
    shaped = examined(folder, "rewards/soft_overlong.py:penalty", args={"max_tokens": 999, "buffer_tokens": 99})
    assert shaped.passed, shaped.findings


def test_the_written_tests_pass_and_find_a_change(folder: Path) -> None:
    """The file that the user keeps: it passes on the same function, and fails on a changed one."""
    reward, test = folder / "mine.py", folder / "tests" / "test_mine.py"
    reward.write_text(GOOD)
    spec = f"{reward}:correct"
    found = examined(folder, spec, write=test)
    assert found.passed and "checks; run them with pytest" in found.lines[-1]
    assert "posttrain" in test.read_text() and str(folder) not in test.read_text()
    cases = checks(test)
    assert len(cases) > 20 and {case[2] for case in cases} == {0.0, 1.0}
    assert all(score_text(spec, ROWS[row], text) == value for row, text, value in cases)
    changed = folder / "changed.py"
    changed.write_text(GOOD.replace("[-1]", "[0]"))
    assert any(score_text(f"{changed}:correct", ROWS[row], text) != value for row, text, value in cases)
    with pytest.raises(ConfigError, match="the file exists"):
        examined(folder, spec, write=test)


def checks(file: Path) -> list[tuple[int, str, float]]:
    """Table of values in a written test file."""
    tree = ast.parse(file.read_text())
    values = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    assert ast.literal_eval(values["ROWS"]) == ROWS[:2]
    return ast.literal_eval(values["VALUES"])  # type: ignore[no-any-return]


def test_mistakes_are_told_in_one_line(folder: Path) -> None:
    for functions, settings, message in (
        (["rewards/gsm8k.py:corect"], {}, "did you mean 'correct'"),
        (["rewards/soft_overlong.py:penalty"], {}, "--set NAME=VALUE"),
        (["rewards/gsm8k.py:correct"], {"answer": "gold"}, "--answer COLUMN"),
        ([], {}, "name a function"),
    ):
        with pytest.raises(ConfigError, match=message):
            examined(folder, *functions, **settings)
