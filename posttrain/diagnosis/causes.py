"""Causes: what a check finds in the evidence of a stage, and in which order causes are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.diagnosis.evidence import Evidence


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Cause for which a stage has learned nothing, or something else than was meant."""

    name: str
    """Name in files and tests, such as `rate_too_large`."""
    summary: str
    """Cause in one line, with its most telling number."""
    evidence: Sequence[str]
    """Numbers that show it, a line each."""
    advice: str
    """Setting or action that helps, by its name."""
    sure: bool = True
    """True if the numbers leave little doubt: a run tells it while it trains; else only `posttrain why` does."""
    hack: bool = False
    """True if the reward grows by something else than better answers."""
    explains: Sequence[str] = ()
    """Names of causes that are its consequences, which are not told beside it."""
    proof: Mapping[str, Any] = field(default_factory=dict)
    """Settings with which a replayed step proves it, by their names within the stage; none: it cannot be proved so."""

    def record(self) -> dict[str, Any]:
        """Cause as JSON."""
        return {**asdict(self), "evidence": list(self.evidence), "explains": list(self.explains)}


Check = Callable[[Evidence], Cause | None]
"""Pure function that finds one cause, or None. It returns None where the evidence does not suffice: a wrong cause is
worse than none."""


def find_causes(evidence: Evidence, checks: Sequence[Check]) -> list[Cause]:
    """Causes in the order of the checks, each name once, without those that another one explains."""
    found: dict[str, Cause] = {}
    for check in checks:
        if (cause := check(evidence)) is not None:
            found.setdefault(cause.name, cause)
    explained = {name for cause in found.values() for name in cause.explains}
    return [cause for cause in found.values() if cause.name not in explained]
