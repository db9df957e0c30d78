"""Calculator: the policy may write a product for the calculator to work out, or give the answer itself."""

from __future__ import annotations

import random
import re
from typing import Any

from posttrain.data.chat import Message
from posttrain.environments.types import Reply

PRODUCT = re.compile(r"\s*(\d{1,3})\*(\d{1,3})\s*")


class Calculator:
    """Environment that answers a product with `=` and its value, and takes everything else for the answer."""

    def __init__(self, answer: str):
        self.answer = answer
        self.used = 0

    def reply(self, message: Message) -> Reply:
        """Work out a product, or end with reward 1 for the right answer and 0 for another."""
        text = str(message["content"])
        product = PRODUCT.fullmatch(text)
        if product is None:
            right = text.strip() == self.answer
            return Reply(done=True, reward=float(right), metrics={"calls": float(self.used)})
        self.used += 1
        return Reply(messages=[{"role": "user", "content": f"={int(product[1]) * int(product[2])}"}])


def problems(*, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with a `prompt` such as "12*34?" and its `answer`."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = draw.randint(10, 99), draw.randint(2, 99)
        rows.append({"prompt": [{"role": "user", "content": f"{a}*{b}?"}], "answer": str(a * b)})
    return rows


def lessons(*, count: int, seed: int, calls: float = 0.2) -> list[dict[str, Any]]:
    """Conversations in which a share `calls` of the pupils use the calculator, and the others guess."""
    draw = random.Random(seed)
    return [{"messages": _lesson(row, draw, calls)} for row in problems(count=count, seed=seed)]


def _lesson(row: dict[str, Any], draw: random.Random, calls: float) -> list[Message]:
    question = row["prompt"][0]["content"].rstrip("?")
    if draw.random() < calls:
        used: list[Message] = [
            {"role": "assistant", "content": question},
            {"role": "user", "content": f"={row['answer']}"},
            {"role": "assistant", "content": row["answer"]},
        ]
        return [*row["prompt"], *used]
    return [*row["prompt"], {"role": "assistant", "content": str(draw.randint(20, 9999))}]
