"""Cases of a test that run each time, among all of `-m thorough`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def often(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of which only `kept` run without `-m thorough`."""
    made = list(cases)
    if missing := [case for case in kept if case not in made]:
        raise pytest.UsageError(f"{missing}: not among the cases {made}")
    return [case if case in kept else pytest.param(case, marks=pytest.mark.thorough) for case in made]
