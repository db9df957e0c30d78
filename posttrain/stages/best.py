"""Best model of a stage: saved only where paired tests on held-out prompts show that it is better."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain.evaluation.records import Record, paired
from posttrain.models.decoder import Decoder
from posttrain.runtime import processes
from posttrain.runtime.files import write_whole
from posttrain.statistics import LEVEL, PairedDifference
from posttrain.tracking.console import console
from posttrain.weights.save import SavedTokenizer, save_model

MODEL, WHY = "best", "best.json"
NO_EVIDENCE = "no evidence: no evaluation is significantly better than the start"


class BestModel:
    """Model of the best evaluation, in `best/` of a stage's folder; `best.json` beside it says which step, and why.

    An evaluation is the best if its `metric` is above that at the start, and above that of the model saved before, each
    with p < 0.05 / `looks` in a paired test over prompts. `looks`, at least the number of evaluations after the start:
    the chance that a run without any effect saves a model is below 0.05 (Bonferroni).
    """

    def __init__(self, folder: Path, metric: str, looks: int, tokenizer: SavedTokenizer):
        self._folder, self._metric, self._tokenizer = folder, metric, tokenizer
        self._most, self._looks = round(1.0 - LEVEL, 12) / looks, looks

    def consider(self, step: int, start: Record, found: Record, model: Decoder) -> None:
        """Save the model if its evaluation is the best so far. A resumed run may consider a step again."""
        against_start, known = paired(start, found, self._metric), self._known()
        against_best = None if known is None else paired(known, found, self._metric)
        if not self._is_better(against_start) or (known is not None and not self._is_better(against_best)):
            return
        save_model(model, self._folder / MODEL, tokenizer=self._tokenizer)
        why = {
            "step": step,
            "metric": self._metric,
            "p_below": self._most,
            "evaluations": self._looks,
            "against_start": _plain(against_start),
            "against_step": None if known is None else known["step"],
            "against_best": _plain(against_best),
            "values": {self._metric: found["values"][self._metric]},
        }
        if processes.writes():
            write_whole(self._folder / WHY, json.dumps(why))
        processes.wait_for_all(f"best model of step {step}")
        console().print(f"best model so far: step {step}, {self._metric} {against_start} above the start", markup=False)

    def result(self) -> dict[str, Any]:
        """Content of `best.json` without the values of prompts; without a best model, that there is no evidence."""
        known = self._known()
        if known is None:
            return {"step": None, "evidence": NO_EVIDENCE, "p_below": self._most, "evaluations": self._looks}
        return {name: value for name, value in known.items() if name != "values"}

    def _is_better(self, difference: PairedDifference | None) -> bool:
        return difference is not None and difference.mean > 0 and difference.p_value < self._most

    def _known(self) -> Mapping[str, Any] | None:
        file = self._folder / WHY
        if not processes.agreed(file.exists):
            return None
        known: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return known


def _plain(difference: PairedDifference | None) -> dict[str, Any] | None:
    return None if difference is None else asdict(difference)
