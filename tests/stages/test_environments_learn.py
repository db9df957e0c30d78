"""The examples of environments and agents learn: shorter than their configurations, which say how far they get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stages.runs import ROOT, lines, posttrain

pytestmark = [pytest.mark.thorough, pytest.mark.optimized]

LEARNS: dict[str, tuple[float, dict[str, Any]]] = {
    "guess": (0.12, {"num_steps": 50}),
    "calculator": (0.4, {"num_steps": 12}),
    "guess_agent": (0.08, {"num_steps": 60, "prompts_per_step": 16}),
}
"""Least rise of the mean reward over the last steps, and what is shorter."""


@pytest.mark.parametrize("name", LEARNS)
def test_the_reward_rises(name: str, tmp_path: Path) -> None:
    rise, shorter = LEARNS[name]
    changes = [f"stages.rl.{field}={value}" for field, value in shorter.items()]
    run = tmp_path / "run"
    outcome = posttrain("run", ROOT / "configs" / "rl" / f"{name}.yaml", f"output={run}", "seed=7", *changes)
    assert outcome.code == 0, outcome.err
    told = [line for line in lines(run, "1-rl") if "grad_norm" in line]
    rewards = [line["reward"] for line in told]
    assert np.mean(rewards[-5:]) - np.mean(rewards[:2]) > rise, rewards
    assert all(line["env/errors"] == line["env/timeouts"] == 0 for line in told)
    assert max(line["sampling/logp_difference/max"] for line in told) < 1e-3
    # Samples of a prompt share it, and later turns read their history from the cache.
    assert np.mean([line["rollout/prefix_hit_rate"] for line in told]) > 0.6
