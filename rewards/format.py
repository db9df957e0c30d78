"""Formats of answers: reasoning in think tags, answers in tags or in a box."""

from __future__ import annotations

import re
from collections.abc import Sequence

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
THOUGHT = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*(?:(?!</?think>)\S)(?:(?!</?think>).)*", re.DOTALL)
STRICT = re.compile(
    r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>\s*", re.DOTALL
)


def think_tags(completions: Sequence[str], *, opened: bool = False) -> list[float]:
    """1 where one `<think>...</think>` comes first and text follows it. `opened`: the chat template has written
    `<think>` at the end of the prompt."""
    return [float(THOUGHT.fullmatch(_whole(text, opened)) is not None) for text in completions]


def think_and_answer(completions: Sequence[str], *, opened: bool = False) -> list[float]:
    """1 where the completion is `<think>...</think><answer>...</answer>` and nothing else. DeepSeek-R1,
    arXiv:2501.12948."""
    return [float(STRICT.fullmatch(_whole(text, opened)) is not None) for text in completions]


def tag_share(completions: Sequence[str], *, opened: bool = False) -> list[float]:
    """Share of the four tags that occur exactly once: a way towards `think_and_answer`.

    >>> tag_share(["<think>a</think>b", "<think><think></think><answer>b</answer>"])
    [0.5, 0.75]
    """
    return [sum(_whole(text, opened).count(tag) == 1 for tag in TAGS) / len(TAGS) for text in completions]


def boxed(completions: Sequence[str]) -> list[float]:
    r"""1 where the completion has exactly one `\boxed{...}` that is not empty.

    >>> boxed([r"so \boxed{\frac{1}{2}}", r"\boxed{1} or \boxed{2}", r"\boxed{", "2"])
    [1.0, 0.0, 0.0, 0.0]
    """
    return [float(text.count("\\boxed{") == 1 and bool(last_boxed(text))) for text in completions]


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` with balanced braces; None without one.

    >>> last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    depth = 0
    for end in range(start + len("\\boxed"), len(text) if start >= 0 else 0):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start + len("\\boxed{") : end].strip()
    return None


def _whole(text: str, opened: bool) -> str:
    return f"<think>{text}" if opened else text
