"""Backstops of size, not goals: a file over 800 lines or a function over 80 lines of code is read by nobody at once."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("posttrain", "rewards", "bench", "notebooks", "tests")
FILE_LINES = 800
FUNCTION_LINES = 80
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code: not blank, not only a comment, not a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Name, first line and lines of code of every function; an inner one counts for the outer as well."""
    code = code_lines(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))


def longest(text: str) -> int:
    """Lines of the longest function, with all that is no code."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return max(((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions), default=0)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def test_files(sources: dict[str, str]) -> None:
    sizes = {name: len(text.splitlines()) for name, text in sources.items()}
    assert {name: size for name, size in sizes.items() if size > FILE_LINES} == {}, f"at most {FILE_LINES} lines"


def test_functions(sources: dict[str, str]) -> None:
    long = {
        f"{name}:{line} {function}": size
        for name, text in sources.items()
        if longest(text) > FUNCTION_LINES  # to count lines of code takes longer
        for function, line, size in functions(text)
        if size > FUNCTION_LINES
    }
    assert long == {}, f"at most {FUNCTION_LINES} lines of code"


def test_what_counts_as_code() -> None:
    docstring = '    """Doc.\n\n    More.\n    """\n'
    text = f'def f(\n    x,\n):\n{docstring}    # why\n\n    y = """a\n    b"""\n    return y  # z\n'
    assert list(functions(text)) == [("f", 1, 6)]
