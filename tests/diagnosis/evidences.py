"""Evidence made by hand: metrics of some steps, records and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.config import Locator, ModelSection, RLSection
from posttrain.diagnosis.answers import Answers
from posttrain.diagnosis.diagnose import diagnose
from posttrain.diagnosis.evidence import Evidence, RecordedSample
from tests.stages.runs import rl_stage

STEPS = 40
MODEL = ModelSection(path=Locator("model"))
NOISE = 0.03
"""Standard deviation of a step's mean reward."""

HEALTHY: Mapping[str, Any] = {
    "reward": np.linspace(0.3, 0.8, STEPS),
    "reward_stderr": NOISE,
    "frac_mixed": 0.6,
    "frac_all_bad": np.linspace(0.3, 0.05, STEPS),
    "pass_rate": np.linspace(0.3, 0.8, STEPS),
    "update_skipped": 0.0,
    "completions/clipped_ratio": 0.02,
    "completions/mean_length": 10.0,
    "kl": np.linspace(0.0, 0.2, STEPS),
    "grad_norm": 0.5,
    "entropy": np.linspace(0.6, 0.4, STEPS),
    "learning_rate": 3e-4,
    "hacking/length_correlation": 0.05,
    "hacking/length_slope": 0.0,
    "hacking/length_spread": 2.0,
    "hacking/reward_values": 20.0,
    "hacking/repetition": 0.05,
    "hacking/copied": 0.02,
    "sampling/logp_difference/mean": 1e-6,
    "sampling/logp_difference/limit": 1e-3,
    "sampling/staleness/mean": 0.0,
    "sampling/staleness/max": 0.0,
}
"""Metrics of a run that learns."""
STILL = {"reward": 0.5, "pass_rate": 0.5, "kl": 0.05}
"""What differs in one that does not."""


def section(**changes: Any) -> RLSection:
    stage = rl_stage(dataset={"path": "rows.jsonl", "chat": False}, **{"group_size": 4, **changes})
    return RLSection.model_validate({name: value for name, value in stage.items() if name != "kind"})


def evidence(
    columns: Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    records: Sequence[RecordedSample] = (),
    answers: Answers | None = None,
    steps: int = STEPS,
    **more: Any,
) -> Evidence:
    """Evidence of a healthy run with other columns, each a value or one for each step; the reward is noisy."""
    draw = np.random.default_rng(0)
    known = {**HEALTHY, **columns}
    values = {}
    for name, given in known.items():
        values[name] = np.broadcast_to(np.asarray(given, np.float64), (STEPS,))[:steps].copy()
    noise = NOISE * draw.normal(size=steps)
    values["reward"] = values["reward"] + np.where(values["frac_mixed"] > 0, noise, 0.0)
    lines = [{"step": i + 1, **{name: float(column[i]) for name, column in values.items()}} for i in range(steps)]
    return Evidence(
        name="0-rl",
        kind="rl",
        section=section(**(settings or {})),
        model=MODEL,
        steps=lines,
        read_records=lambda: list(records),
        read_answers=lambda rows: Answers(missing="none") if answers is None else answers,
        **more,
    )


def names(found: Evidence) -> list[str]:
    return [cause.name for cause in diagnose(found)]


def groups(
    texts: Sequence[str], rewards: Sequence[float], *, steps: Sequence[int], rows: int = 8
) -> list[RecordedSample]:
    """Records of steps, in each of which every row has one group with these texts and rewards."""
    return [
        RecordedSample(
            step=step,
            group=step * rows + row,
            row=row,
            reward=float(reward),
            stop="stop",
            prompt=(row,),
            tokens=tuple(text.encode()),
        )
        for step in steps
        for row in range(rows)
        for text, reward in zip(texts, rewards, strict=True)
    ]


def answers(right: float, wrong: float, count: int = 8) -> Answers:
    return Answers(
        rows=range(count),
        texts=[str(row) for row in range(count)],
        prompts=[f"{row}=" for row in range(count)],
        rewards=np.full(count, right),
        wrong=np.full(count, wrong),
        num_rows=count,
    )
