"""Mathematics with a verifier: answers are parsed and compared by value (Math-Verify). Needs
`pip install posttrain[rewards]`; runs best in a child process, its default as `rewards/math_answers.py:correct`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException

SECONDS = 5
"""Time-out of one comparison in the main thread. A comparison that ignores it ends at the reward's `timeout_s`."""

logging.getLogger("math_verify").setLevel(logging.ERROR)


def correct(completions: Sequence[str], answer: Sequence[str]) -> list[Any]:
    """1 where the completion's final answer equals `answer`, which is LaTeX or plain (`\\frac{1}{2}`, `0.5`, `(1,2]`).

    None where the dataset's answer cannot be parsed; a comparison that takes too long is an error of its sample.
    """
    parsed = {text: _parsed_gold(text) for text in dict.fromkeys(answer)}
    return [_value(text, parsed[gold]) for text, gold in zip(completions, answer, strict=True)]


def _parsed_gold(text: str) -> list[Any]:
    plain = text.replace("\\$", "")
    return _parsed(plain if "\\boxed" in plain or "$" in plain else f"\\boxed{{{plain}}}")


def _parsed(text: str) -> list[Any]:
    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    found: list[Any] = parse(text, configs, parsing_timeout=_seconds())
    return found


def _value(text: str, gold: list[Any]) -> Any:
    if not gold:
        return None
    try:
        return float(verify(gold, _parsed(text), timeout_seconds=_seconds(), raise_on_error=True))
    except TimeoutException as error:
        return error
    except Exception:  # what cannot be compared is not equal
        return 0.0


def _seconds() -> int | None:
    """Math-Verify's time-outs are signals, which only the main thread gets."""
    return SECONDS if threading.current_thread() is threading.main_thread() else None
