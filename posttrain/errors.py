"""Errors that a person can mend, and the nearest-name hints of their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SIMILAR = 0.65
"""Least `difflib` ratio of a misspelling: `stf` for `sft` has more, two words that share a syllable less."""


class ConfigError(ValueError):
    """A mistake in a configuration or call: one line that says where, the rule, what was given, what to do."""


class RunError(RuntimeError):
    """A run-time failure with a one-line, actionable message."""


def nearest_name(name: str, options: Iterable[str]) -> str | None:
    """Return the option spelled most like the name, if any is a misspelling of it."""
    return next(iter(difflib.get_close_matches(name, list(options), n=1, cutoff=SIMILAR)), None)


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Format `; did you mean 'nearest'?`, or nothing where no option is spelled like the name."""
    near = nearest_name(name, options)
    return "" if near is None else f"; did you mean {near!r}?"
