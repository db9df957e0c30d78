"""Docstrings that a person scans: they begin with a noun or a verb, and modules say in three lines what they hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parent.parent
EVASIONS = {"Of", "What", "Which", "Whether", "How"}
MAX_MODULE_LINES = 3


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring: of modules, classes and functions, and string expressions after assignments."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([node, *body], body, strict=False):
            documented = before is node or isinstance(before, ast.Assign | ast.AnnAssign | ast.AugAssign)
            if documented and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value.value
                if isinstance(value, str):
                    yield statement.lineno, value


def faults(text: str) -> list[str]:
    """Violations in a module's text as `LINE: rule`."""
    tree = ast.parse(text)
    found = [
        f"{line}: begins with {word}"
        for line, docstring in docstrings(tree)
        if (word := docstring.split(maxsplit=1)[0] if docstring.strip() else "") in EVASIONS
    ]
    lines = len((ast.get_docstring(tree) or "").splitlines())
    return found + ([f"1: module docstring of {lines} lines"] if lines > MAX_MODULE_LINES else [])


def test_docstrings() -> None:
    files = [path for package in ("posttrain", "rewards") for path in sorted((ROOT / package).rglob("*.py"))]
    assert [f"{path.relative_to(ROOT)}:{fault}" for path in files for fault in faults(path.read_text())] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""Layers."""\nX = 1\n"""Of a prompt."""\n', ["3: begins with Of"]),
        (
            'class A:\n    """What it holds."""\n    x: int\n    """Which one."""\n',
            ["2: begins with What", "4: begins with Which"],
        ),
        ('def f():\n    """Whether it is."""\n    return "How"\n', ["2: begins with Whether"]),
        ('"""One.\n\nTwo.\nThree.\n"""\n', ["1: module docstring of 4 lines"]),
        ('"""Offset of a row.\n\nHowever long it is.\n"""\nf("Of")\n', []),
    ],
)
def test_a_fault_is_found(text: str, expected: list[str]) -> None:
    assert faults(text) == expected
