"""Families are descriptions: none is long, and none repeats another."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

MODELS = Path(__file__).resolve().parents[2] / "posttrain" / "models"
FAMILY_LINES = 150
LONGER = {"gemma4_text"}
SHARED_RUN = 10


def lines(path: Path) -> list[str]:
    return [line.rstrip() for line in path.read_text().splitlines()]


def repeated(files: dict[str, list[str]], run: int) -> list[str]:
    """`first, second: LINE` for every two files that share so many lines in a row."""
    places: defaultdict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    for name, text in files.items():
        for start in range(len(text) - run + 1):
            places[tuple(text[start : start + run])].setdefault(name, start + 1)
    return [f"{one}, {two}: {found[one]}" for found in places.values() for one, two in pairwise(found)]


def test_families() -> None:
    files = {path.stem: lines(path) for path in sorted((MODELS / "families").glob("*.py"))}
    assert {name for name, text in files.items() if len(text) > FAMILY_LINES} <= LONGER
    assert repeated(files, SHARED_RUN) == []


def test_what_counts_as_repeated() -> None:
    files = {"a": list("xabcdy"), "b": list("abcd"), "c": list("abxcd")}
    assert repeated(files, 4) == ["a, b: 2"]
    assert repeated(files, 5) == []
