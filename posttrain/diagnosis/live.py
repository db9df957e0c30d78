"""Diagnosis while a stage trains: a sink that tells each cause once, when its numbers leave little doubt, and writes it
to `warnings.jsonl` of the run's folder; and at the end the causes that hold then."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.config import ModelSection, TrainSection
from posttrain.diagnosis.answers import Answers
from posttrain.diagnosis.causes import Cause
from posttrain.diagnosis.diagnose import diagnose
from posttrain.diagnosis.evidence import WARNINGS, Evidence, read_evidence, read_warnings, stage_evidence
from posttrain.diagnosis.report import StageDiagnosis, stage_diagnosis
from posttrain.diagnosis.score_answers import score_answers
from posttrain.metrics import Sample
from posttrain.tracking.console import console, printable
from posttrain.tracking.history import keep_lines, open_for_append, write_line
from posttrain.tracking.records import read_metrics

FIRST_STEPS = (3, 10, 30)
EVERY = 10
"""Steps between diagnoses after the first ones."""


class DiagnosisSink:
    """Sink that diagnoses a stage at steps 3, 10, 30 and then every ten; `warnings.jsonl` has what it told.

    `start_step`: the step from which a stage resumes, -1 if it begins; what was told later is told again.
    """

    def __init__(
        self, run: Path, name: str, section: TrainSection, *, kind: str, model: ModelSection, start_step: int
    ) -> None:
        self._run, self._name, self._section, self._kind, self._model = run, name, section, kind, model
        if (run / WARNINGS).exists():
            keep_lines(run / WARNINGS, lambda line: line["stage"] != name or line["step"] <= start_step)
        before = [line for line in read_warnings(run) if line["stage"] == name]
        self._told = {line["name"] for line in before}
        self.hacks = [f"step {line['step']}: reward hacking: {line['summary']}" for line in before if line["hack"]]
        """Reward hacking told so far, a line for each kind."""
        self._lines: dict[int, dict[str, Any]] = {
            line["step"]: line for line in read_metrics(run) if line["stage"] == name and line["step"] <= start_step
        }
        self._failed = False
        self._scored: Answers | None = None
        # Rows and tokenizers stay the same while a stage trains: they are read once, not at each diagnosis.
        first = self._stage()
        self._read: dict[str, Any] = {
            "read_rows": cache(first.read_rows),
            "read_tokenizer": cache(first.read_tokenizer),
            "read_source_tokenizer": cache(first.read_source_tokenizer),
        }

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step, and diagnose the stage if it is due."""
        own = self._lines.setdefault(step, {"step": step, "stage": self._name})
        own |= {name: float(value) for name, value in metrics.items()}
        trained = any(not name.startswith("eval/") for name in metrics)
        if trained and (step in FIRST_STEPS or (step > FIRST_STEPS[-1] and step % EVERY == 0)) and not self._failed:
            self._diagnose(step)

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """Ignored: causes are found by numbers and records."""

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Ignored: records have more of them."""

    def close(self) -> None:
        """Nothing to close; the end is told by `tell_end`, when the stage's result is there."""

    def _diagnose(self, step: int) -> None:
        try:
            found = [cause for cause in diagnose(self._evidence()) if cause.sure and cause.name not in self._told]
        except Exception as error:  # a fault of the diagnosis must not end the training
            self._failed = True
            tell(f"the diagnosis of {self._name} has failed, and is left out: {type(error).__name__}: {error}")
            return
        for cause in found:
            self._told.add(cause.name)
            if cause.hack:
                self.hacks.append(f"step {step}: reward hacking: {cause.summary}")
            tell(warning_line(step, cause))
        write_warnings(self._run, self._name, step, found)

    def _evidence(self) -> Evidence:
        return replace(self._stage(), read_answers=self._answers, **self._read)

    def _stage(self) -> Evidence:
        return stage_evidence(
            self._run,
            self._name,
            self._section,
            kind=self._kind,
            model=self._model,
            lines=[self._lines[step] for step in sorted(self._lines)],
        )

    def _answers(self, rows: Sequence[int]) -> Answers:
        """Answers of the data, scored once: the function and the rows stay the same."""
        if self._scored is None:
            self._scored = score_answers(self._run, self._name, self._section, rows)
        return self._scored


def tell(line: str) -> None:
    """Print a warning."""
    console().print(printable(line, console().encoding), style="bold yellow", markup=False, soft_wrap=True)


def warning_line(step: int, cause: Cause) -> str:
    """Cause in one line: what, and what to try; of a hack with its samples."""
    kind = "REWARD HACKING" if cause.hack else "WARNING"
    shown = f" ({cause.evidence[-1]})" if cause.hack and cause.evidence else ""
    return f"{kind}, step {step}: {cause.summary}{shown}; try: {cause.advice}"


def write_warnings(run: Path, stage: str, step: int, causes: Sequence[Cause]) -> None:
    """Append causes to `warnings.jsonl`; no file without any."""
    if not causes:
        return
    with open_for_append(run / WARNINGS) as file:
        for cause in causes:
            write_line(file, {"step": step, "stage": stage, "time": round(time.time(), 3), **cause.record()})


def first_hack(causes: Sequence[Cause]) -> Cause | None:
    """First cause that is a hack."""
    return next((cause for cause in causes if cause.hack), None)


def end_of_run(run: Path, *, writes: bool) -> dict[str, StageDiagnosis]:
    """Diagnosis at the end of each stage; causes that were not told yet are written to `warnings.jsonl`."""
    found: dict[str, StageDiagnosis] = {}
    try:
        for evidence in read_evidence(run):
            if not evidence.steps:
                continue
            stage = found[evidence.name] = stage_diagnosis(evidence)
            told = {line["name"] for line in evidence.warnings}
            if writes:
                new = [cause for cause in stage.causes if cause.name not in told]
                write_warnings(run, evidence.name, evidence.num_steps, new)
    except Exception as error:  # nor must it hide what was trained
        tell(f"the diagnosis has failed, and is left out: {type(error).__name__}: {error}")
    return found
