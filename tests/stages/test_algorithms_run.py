"""Whole runs of every algorithm that steps carry out, and of a loss, an advantage and a filter of the user's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import ALGORITHMS
from tests.stages.runs import posttrain, rl_stage, write_run

TAUGHT, NOT_YET = {"distill"}, {"ppo", "gdpo"}
NAMES = sorted(ALGORITHMS.keys() - TAUGHT - NOT_YET)

OWN = """
import jax.numpy as jnp
import numpy as np

import posttrain as pt


class Loss:
    kl_coef = 0.0

    def __call__(self, stats, batch):
        weight = jnp.asarray(batch.loss_weight)
        advantages, logps = (jnp.where(weight > 0, x, 0.0) for x in (batch.advantages, stats.logps))
        total = pt.Mean(total=-(advantages * logps * weight).sum(), weight=weight.sum())
        return pt.LossOutput(loss=total, metrics={"own": total})


def advantage(rewards):
    return rewards - np.nanmean(rewards, axis=1, keepdims=True)


def keep(rewards_PG):
    return np.nanmax(rewards_PG, axis=1) > 0.2
"""


def metrics_of(folder: Path, **changes: Any) -> list[dict[str, float]]:
    """Metrics of two steps of two updates each, so that the second is off-policy."""
    stage = rl_stage(updates=2, num_steps=4, **changes)
    outcome = posttrain("run", write_run(folder, stage))
    assert outcome.code == 0, outcome.err
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line and line.get("stage", "").endswith("rl")]


@pytest.mark.parametrize("name", [n if n == "cispo" else pytest.param(n, marks=pytest.mark.thorough) for n in NAMES])
def test_an_algorithm_runs(tmp_path: Path, name: str) -> None:
    single = {"group_size": 1} if name == "reinforce_plus_plus" else {}
    lines = metrics_of(tmp_path, algorithm=name, **single)
    assert lines, "no step was logged"
    for line in lines:
        assert math.isfinite(line["loss"]) and line["grad_norm"] > 0 and line["ratio/mean"] > 0, line


@pytest.mark.thorough
def test_functions_of_the_user_run(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "own.py").write_text(OWN)
    own = {"kind": "rloo", "loss": "own.py:Loss", "advantage": "own.py:advantage", "filter": "own.py:keep"}
    lines = metrics_of(tmp_path, algorithm=own)
    assert lines and all(line["own"] == pytest.approx(line["loss"]) and line["grad_norm"] > 0 for line in lines), lines
