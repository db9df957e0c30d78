"""Report of a diagnosis, as text and as JSON: `posttrain why RUN` and `pt.why`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.diagnosis.answers import CONFIG
from posttrain.diagnosis.causes import Cause
from posttrain.diagnosis.diagnose import diagnose
from posttrain.diagnosis.evidence import Evidence, read_evidence
from posttrain.errors import ConfigError

HEADLINES = {
    "rl": "reward",
    "online_preference": "reward",
    "sft": "nll",
    "preference": "loss",
    "reward_model": "loss",
    "distill": "distill/kl",
    "drafter": "drafter/kl",
}
"""Main metric of each kind of stage."""
NOTHING = "nothing stands out"


@dataclass(frozen=True, kw_only=True)
class StageDiagnosis:
    """Causes of a stage, the first one first."""

    name: str
    head: str
    """Steps and main metric in one line."""
    updated: bool
    """False if no step has updated the model."""
    causes: Sequence[Cause]

    @property
    def hack(self) -> Cause | None:
        """First cause that is a hack."""
        return next((cause for cause in self.causes if cause.hack), None)

    def lines(self) -> list[str]:
        """Causes in words: what, the numbers, and what to try."""
        if not self.causes:
            return [self.head, f"  {NOTHING}"]
        found = [self.head]
        for number, cause in enumerate(self.causes, start=1):
            found.append(f"  {number}. {cause.summary}{'' if cause.sure else ' (likely)'}")
            found += [f"     {line}" for line in cause.evidence]
            found.append(f"     try: {cause.advice}")
        return found

    def record(self) -> dict[str, Any]:
        return {"stage": self.name, "head": self.head, "causes": [cause.record() for cause in self.causes]}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Diagnosis of a run; in a notebook and with `print` its lines."""

    stages: Sequence[StageDiagnosis]

    @property
    def causes(self) -> list[Cause]:
        """Causes of all stages, in order."""
        return [cause for stage in self.stages for cause in stage.causes]

    def lines(self) -> list[str]:
        return [line for stage in self.stages for line in stage.lines()]

    def record(self) -> list[dict[str, Any]]:
        """Diagnosis as JSON."""
        return [stage.record() for stage in self.stages]

    def __repr__(self) -> str:
        return "\n".join(self.lines())


def why(run: str | Path) -> Diagnosis:
    """Diagnose a run, or one stage of it, from its folder: why it did not learn, or learned something else than was
    meant. ConfigError for a folder that is no run, or has not begun."""
    path = Path(run).expanduser().resolve()
    if not (path / CONFIG).is_file() and (path.parent / CONFIG).is_file():
        found = [one for one in read_evidence(path.parent) if one.name == path.name]
    else:
        found = read_evidence(path)
    if not any(evidence.steps for evidence in found):
        raise ConfigError(f"why: {run} has no step yet; wait for the first ones")
    return Diagnosis(stages=[stage_diagnosis(evidence) for evidence in found if evidence.steps])


def stage_diagnosis(evidence: Evidence) -> StageDiagnosis:
    """Diagnose a stage, of which something is known."""
    skipped = evidence.column("update_skipped")
    updated = not (len(skipped) and bool((skipped == 1.0).all()))
    head = _head(evidence) if updated else f"{_head(evidence)}; NO UPDATE WAS MADE"
    return StageDiagnosis(name=evidence.name, head=head, updated=updated, causes=diagnose(evidence))


def _head(evidence: Evidence) -> str:
    metric = HEADLINES.get(evidence.kind, "loss")
    values = evidence.column(metric)
    known = values[np.isfinite(values)]
    line = f"{evidence.name}: {evidence.num_steps:,} steps"
    change = evidence.change(metric)
    if change is not None:
        line += f"; {metric} {change}"
    elif known.size:
        line += f"; {metric} {known[0]:.3g} -> {known[-1]:.3g}"
    return line
