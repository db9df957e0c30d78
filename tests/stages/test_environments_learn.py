"""The examples of environments and agents learn: shorter than their configurations, which say how far they get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.stages.runs import ROOT, lines, posttrain

pytestmark = [pytest.mark.thorough, pytest.mark.optimized]

EXAMPLES = ROOT / "configs" / "rl"
SEED = 1
"""Seed with which SFT on games with less to listen for taught nothing, and RL began from nothing."""


def learn(config: Path, run: Path, num_steps: int) -> list[dict[str, Any]]:
    """Run a configuration with fewer RL steps and no evaluation; returns the metrics of its RL steps."""
    changes = (f"output={run}", f"seed={SEED}", f"stages.rl.num_steps={num_steps}", "stages.rl.eval_dataset=null")
    outcome = posttrain("run", config, *changes)
    assert outcome.code == 0, outcome.err
    (folder,) = run.glob("*-rl")
    return [line for line in lines(run, folder.name) if "grad_norm" in line]


def check(told: list[dict[str, Any]], rise: float) -> None:
    """Check that the mean reward of the last steps is above that of the first by `rise`, and that nothing failed."""
    rewards = [line["reward"] for line in told]
    assert np.mean(rewards[-5:]) - np.mean(rewards[:2]) > rise, rewards
    assert all(line["env/errors"] == line["env/timeouts"] == 0 for line in told)
    assert max(line["sampling/logp_difference/max"] for line in told) < 1e-3
    # Samples of a prompt share it, and later turns read their history from the cache.
    assert np.mean([line["rollout/prefix_hit_rate"] for line in told]) > 0.6


@pytest.fixture(scope="module")
def guess(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Folder and metrics of a run of the guessing game."""
    run = tmp_path_factory.mktemp("guess") / "run"
    return run, learn(EXAMPLES / "guess.yaml", run, 20)


def test_guess_learns(guess: tuple[Path, list[dict[str, Any]]]) -> None:
    check(guess[1], 0.12)


def test_guess_agent_learns(guess: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """The agent's RL begins from the other run's SFT, which is the same as its own."""
    example = yaml.safe_load((EXAMPLES / "guess_agent.yaml").read_text())
    assert example["stages"][0] == yaml.safe_load((EXAMPLES / "guess.yaml").read_text())["stages"][0]
    config = tmp_path / "agent.yaml"
    model = {"path": str(guess[0] / "0-sft" / "model")}
    config.write_text(yaml.safe_dump({**example, "model": model, "stages": example["stages"][1:]}))
    check(learn(config, tmp_path / "run", 15), 0.06)


def test_calculator_learns(tmp_path: Path) -> None:
    check(learn(EXAMPLES / "calculator.yaml", tmp_path / "run", 8), 0.4)
