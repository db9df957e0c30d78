"""Numbers and texts as causes show them."""

from __future__ import annotations

import numpy as np

SHOWN = 60
"""Characters of a text that are shown."""


def shown_text(text: str) -> str:
    """Beginning of a text in quotes, on one line."""
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…")


def shown_range(values: np.ndarray) -> str:
    """Value, or lowest and highest one.

    >>> shown_range(np.asarray([0.0, 0.0])), shown_range(np.asarray([0.0, 0.5]))
    ('0', '0 to 0.5')
    """
    low, high = float(values.min()), float(values.max())
    return f"{low:g}" if low == high else f"{low:.3g} to {high:.3g}"


def count(number: int, noun: str) -> str:
    """Number of things.

    >>> count(1, "row"), count(2500, "row")
    ('1 row', '2,500 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
