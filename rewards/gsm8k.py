"""Grade-school maths (GSM8K): the answer is the number after `####`."""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


def final_number(text: str) -> float | None:
    """The number after the last `####`, else the last number in the text.

    >>> final_number("She has 3 + 4 = 7 apples. #### 1,007")
    1007.0
    """
    tail = text.rsplit("####", 1)[-1] if "####" in text else text
    found = NUMBER.findall(tail)
    if not found:
        return None
    number = found[0] if "####" in text else found[-1]
    return float(number.replace("$", "").replace(",", ""))


def correct(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """1 where the completion's final number is the answer's."""
    pairs = zip(completions, answer, strict=True)
    return [float(final_number(text) is not None and final_number(text) == final_number(gold)) for text, gold in pairs]


def has_marker(completions: Sequence[str], **_: object) -> list[float]:
    """1 where the completion ends in `#### number`, the form that the dataset uses."""
    return [float(re.search(r"####\s*-?\$?\d[\d,.]*\s*$", text) is not None) for text in completions]
