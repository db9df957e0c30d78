"""Sums and differences of small numbers, made on the spot: a task that needs no download."""

from __future__ import annotations

import random
from collections.abc import Sequence


def problems(*, count: int, seed: int, largest: int, held_out: bool) -> list[dict[str, str]]:
    """Rows with `prompt` ("31+45=") and `completion` ("76"). One problem in eight is held out of training for ever.

    Whether a problem is held out depends on its numbers alone, so no seed and no count can mix the two sets.
    """
    draw = random.Random(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        a, b = draw.randint(0, largest), draw.randint(0, largest)
        if (_mix(a, b) % 8 == 0) == held_out:
            rows.append({"prompt": f"{a}+{b}=", "completion": str(a + b)})
    return rows


def _mix(a: int, b: int) -> int:
    return ((a * 2654435761) ^ (b * 40503)) >> 4


def correct(completions: Sequence[str], completion: Sequence[str], **_: object) -> list[float]:
    """1 for exactly the right number."""
    return [float(text.strip() == answer) for text, answer in zip(completions, completion, strict=True)]
