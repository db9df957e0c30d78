"""Error classes for users, and nearest-name hints in messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SIMILAR = 0.65
"""Minimum `difflib` ratio of a misspelling: `stf` for `sft` is above it, words sharing one syllable are below."""


class OneLine(Exception):
    """Error that a notebook shows as its message alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython prints in place of the traceback."""
        return [f"{type(self).__name__}: {line}" for line in str(self).splitlines()]


class ConfigError(OneLine, ValueError):
    """Invalid configuration or call: one line with location, rule, given value and remedy."""


class RunError(OneLine, RuntimeError):
    """A run-time failure with a one-line, actionable message."""


def nearest_name(name: str, options: Iterable[str]) -> str | None:
    """Return the option most similar to a misspelt name, if any."""
    return next(iter(difflib.get_close_matches(name, list(options), n=1, cutoff=SIMILAR)), None)


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Format `; did you mean 'nearest'?`; empty if no option is similar."""
    near = nearest_name(name, options)
    return "" if near is None else f"; did you mean {near!r}?"
