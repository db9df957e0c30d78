"""Pairs of features of offline stages, see `tests.test_pairs`; a file of their own, which another worker takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_pairs import cases, check_pair, own_cache, teacher

__all__ = ["own_cache", "teacher"]


@pytest.mark.thorough
@pytest.mark.by_case
@pytest.mark.parametrize(("kind", "a", "b"), cases("sft", "preference", "distill"))
def test_a_pair_runs(tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch, kind: str, a: str, b: str) -> None:
    check_pair(tmp_path, teacher, monkeypatch, kind, a, b)
