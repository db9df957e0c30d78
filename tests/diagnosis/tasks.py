"""Rows and rewards of the sick runs of `sick.py`: sums, asked, answered and judged in the ways that make a run sick."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from rewards.arithmetic import correct, problems

Row = dict[str, str]

__all__ = ["correct", "problems"]


def products(*, count: int, seed: int) -> list[Row]:
    """Products of two-digit numbers, which a model that knows sums never gets right."""
    draw = random.Random(seed)
    pairs = [(draw.randint(11, 99), draw.randint(11, 99)) for _ in range(count)]
    return [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs]


def wrong_rows(*, count: int, seed: int, share: float) -> list[Row]:
    """Sums of which a share has an answer that is too large by one to three."""
    draw = random.Random(seed)
    rows = problems(count=count, seed=seed, held_out=False)
    return [row | {"answer": str(int(row["answer"]) + draw.randint(1, 3) * (draw.random() < share))} for row in rows]


def whims(*, count: int, seed: int, held_out: bool) -> list[Row]:
    """Sums with a carry, of which half, by no rule, want the answer without it: they can only be learned by heart."""
    rows = problems(count=40 * count, seed=seed, held_out=held_out)
    carries = {row["prompt"]: int(row["answer"]) for row in rows if _carries(row["prompt"])}
    draw = random.Random(seed)
    return [{"prompt": p, "answer": str(n - 10 * draw.randint(0, 1))} for p, n in [*carries.items()][:count]]


def _carries(prompt: str) -> bool:
    a, b = prompt.rstrip("=").split("+")
    return int(a) % 10 + int(b) > 9


def chatter(*, count: int, seed: int) -> list[Row]:
    """Sums one after another without an end, as in plain text from which a base model learns."""
    rows = problems(count=6 * count, seed=seed, held_out=False)
    lines = [f"{row['prompt']}{row['answer']}\n" for row in rows]
    return [{"text": "".join(lines[6 * n : 6 * n + 6])} for n in range(count)]


def babble(*, count: int, seed: int) -> list[Row]:
    """Homework in which the last digit is written one to five times."""
    draw = random.Random(seed)
    rows = problems(count=count, seed=seed, held_out=False)
    return [row | {"completion": row["answer"] + row["answer"][-1] * max(0, draw.randint(-6, 4))} for row in rows]


def worked(*, count: int, seed: int, held_out: bool) -> list[Row]:
    """Sums with the way to the answer written out, some 25 characters."""
    rows = problems(count=count, seed=seed, held_out=held_out)
    return [row | {"completion": f"{row['prompt'][:-1]} is {row['answer']}, so {row['answer']}"} for row in rows]


def wordy(*, count: int, seed: int, least: int, most: int) -> list[Row]:
    """Sums behind a preface of words drawn at random, which no model can foresee."""
    draw = random.Random(seed)
    rows = problems(count=count, seed=seed, held_out=False)

    def preface() -> str:
        return " ".join(
            "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(draw.randint(least, most))
        )

    return [row | {"prompt": f"{preface()} {row['prompt']}", "completion": row["answer"]} for row in rows]


def copies(*, count: int, times: int, seed: int) -> list[Row]:
    """Few rows, each many times."""
    return problems(count=count, seed=seed, held_out=False, forgotten=0.5) * times


def pairs(*, count: int, seed: int, held_out: bool, equal: float = 0.0, swapped: float = 0.0) -> list[Row]:
    """Right sums against sums with a forgotten carry. A share `equal` has the same answer twice, a share `swapped` the
    answers the wrong way round."""
    draw = random.Random(seed)
    rows = []
    for row in problems(count=4 * count, seed=seed, held_out=held_out, forgotten=1.0):
        if row["completion"] == row["answer"]:
            continue
        chosen, rejected = row["answer"], row["completion"]
        if draw.random() < equal:
            rejected = chosen
        elif draw.random() < swapped:
            chosen, rejected = rejected, chosen
        rows.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
    return rows[:count]


def easy_pairs(*, count: int, seed: int, held_out: bool) -> list[Row]:
    """Right sums against an answer that no model would give."""
    rows = problems(count=count, seed=seed, held_out=held_out)
    return [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "zzzzzz"} for row in rows]


# --- rewards ----------------------------------------------------------------------------------------------------------


def tagged(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """1 for the right answer in tags, which no prompt asks for."""
    return [float(text == f"<answer>{right}</answer>") for text, right in zip(completions, answer, strict=True)]


def paid_by_length(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """1 for a right beginning, and 0.05 for each character."""
    return [
        float(text.strip().startswith(right)) + 0.05 * len(text)
        for text, right in zip(completions, answer, strict=True)
    ]


def paid_by_repetition(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """0.3 for a right beginning, and the share of the most frequent character."""
    shares = [max(Counter(text).values()) / len(text) if text else 0.0 for text in completions]
    starts = [0.3 * text.startswith(right) for text, right in zip(completions, answer, strict=True)]
    return [share + start for share, start in zip(shares, starts, strict=True)]


def near_the_middle(completions: Sequence[str], **_: object) -> list[float]:
    """Nearness to 250 in place of nearness to the answer."""
    return [max(0.0, 1 - abs(int(text) - 250) / 250) if text.isdecimal() else 0.0 for text in completions]


def near(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """Nearness to the answer, 1 for the answer itself."""
    return [
        max(0.0, 1 - abs(int(text) - int(right)) / 20) if text.isdecimal() else 0.0
        for text, right in zip(completions, answer, strict=True)
    ]


def shows_work(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """1 for the right number at the end of what was worked out."""
    return [float(text.endswith(f" {right}")) for text, right in zip(completions, answer, strict=True)]
