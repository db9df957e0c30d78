"""Sums made on the spot, with the homework of a careless class to imitate: a task that needs no download."""

from __future__ import annotations

import random
from collections.abc import Sequence

LARGEST = 499


def problems(*, count: int, seed: int, held_out: bool, forgotten: float = 0.0) -> list[dict[str, str]]:
    """Rows with `prompt` ("47+8="), `answer` ("55") and `completion`, what a pupil wrote down.

    Pupils forget the carry in a share `forgotten` of the sums that have one, and write "45". Every fourth problem is
    held out; which ones depends on the numbers alone, so no seed and no count can mix the two sets.
    """
    draw = random.Random(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        a, b = draw.randint(0, LARGEST), draw.randint(1, 9)
        if _is_held_out(a, b) != held_out:
            continue
        written = a + b
        if a % 10 + b > 9 and draw.random() < forgotten:
            written -= 10
        rows.append({"prompt": f"{a}+{b}=", "answer": str(a + b), "completion": str(written)})
    return rows


def pairs(*, count: int, seed: int, held_out: bool) -> list[dict[str, str]]:
    """Rows with `prompt`, `chosen`, the right sum, and `rejected`, the one with a forgotten carry."""
    rows = problems(count=count, seed=seed, held_out=held_out, forgotten=1.0)
    return [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["completion"]}
        for row in rows
        if row["completion"] != row["answer"]
    ]


def _is_held_out(a: int, b: int) -> bool:
    return random.Random(1000 * a + b).random() < 0.25


def correct(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """1 for exactly the right number."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]
