"""Cases of a test that run each time, among all of `-m thorough`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def often(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of which only `kept` run without `-m thorough`; a tuple holds the values of several arguments."""
    made = list(cases)
    if missing := [case for case in kept if case not in made]:
        raise pytest.UsageError(f"{missing}: not among the cases {made}")
    values = [case if isinstance(case, tuple) else (case,) for case in made]
    return [
        pytest.param(*value, marks=() if case in kept else pytest.mark.thorough)
        for case, value in zip(made, values, strict=True)
    ]
