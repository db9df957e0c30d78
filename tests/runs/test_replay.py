"""A recorded step gives the same batch, loss and metrics again without sampling, and others with another loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.errors import ConfigError
from posttrain.rl.store import read_record
from posttrain.rollout.records import recorded_steps
from posttrain.runs.replay import MEASURED, Replayed, replay, token_losses
from tests.often import often
from tests.stages.runs import few_devices, posttrain, rl_stage, sft_stage, write_run

ENDS = {"max_tokens": 6, "stop_token_ids": [*range(0, 260, 4)]}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"algorithm": {"kind": "grpo", "kl_coef": 0.1}, "sampling": {**ENDS, "top_p": 0.9}},
    "updates": {"updates": 2, "update_epochs": 2, "num_steps": 8, "rollout": {"quantize": "int8"}},
    "critic": {"algorithm": {"kind": "ppo", "kl_coef": 0.05}, "updates": 2},
    "refill": {"refill": {"limit": 1}, "algorithm": {"kind": "grpo", "kl_coef": 0.0}},
    "ahead": {"asynchronous": {"max_staleness": 2}, "sampling": ENDS, "rollout": {"decode_steps": 2}},
}

QUANTIZED = 0.02
"""Largest difference of log-probabilities of the 8-bit sampler and the trainer, in nats."""


@pytest.fixture(scope="module", params=often(KINDS, "plain"))
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished stage, with checkpoints of the last two steps; the plain one is behind another stage."""
    folder = tmp_path_factory.mktemp(request.param)
    # Each step has a checkpoint, of which two are kept.
    stages = [rl_stage(checkpoint_every=1, **KINDS[request.param])]
    if request.param == "plain":
        stages.insert(0, sft_stage(num_steps=1))
    assert posttrain("run", write_run(folder, *stages)).code == 0
    return folder / "out" / f"{len(stages) - 1}-rl"


of_the_plain_one = pytest.mark.parametrize("stage", ["plain"], indirect=True, scope="module")


def replayed(stage: Path, step: int, **options: Any) -> Replayed:
    with few_devices(1):
        return replay(stage, step, **options)


def check_as_logged(found: Replayed) -> None:
    names = [name for name in found.logged if not name.startswith(MEASURED)]
    assert {"loss", "grad_norm", "reward", "entropy", "approx_kl"} <= {*names}
    for name in names:
        ours, logged = found.metrics[name], found.logged[name]
        assert math.isclose(ours, logged, rel_tol=1e-6, abs_tol=1e-6), (name, ours, logged)


def test_replayed_as_logged(stage: Path) -> None:
    """The last step from the checkpoint before it, and the first one from the start."""
    steps = recorded_steps(stage / "trajectories")
    assert len(steps) > 1
    for step in (steps[0], steps[-1]):
        check_as_logged(replayed(stage, step))


@pytest.mark.thorough
@of_the_plain_one
def test_replayed_with_another_loss(stage: Path) -> None:
    last = recorded_steps(stage / "trajectories")[-1]
    other = replayed(stage, last, changes=["algorithm=dr_grpo", "algorithm.entropy_coef=0.1"])
    assert math.isclose(other.metrics["reward"], other.logged["reward"], rel_tol=1e-6)
    assert abs(other.metrics["loss"] - other.logged["loss"]) > 1e-3


@of_the_plain_one
def test_replayed_with_another_model(stage: Path) -> None:
    """The model of the stage before is the one that sampled the first step."""
    first = recorded_steps(stage / "trajectories")[0]
    check_as_logged(replayed(stage, first, model=stage.parent / "0-sft" / "model"))
    final = replayed(stage, first, model=stage / "model")
    assert final.metrics["sampling/logp_difference/mean"] > 1e-3


@pytest.mark.thorough
@of_the_plain_one
def test_command(stage: Path) -> None:
    step = recorded_steps(stage / "trajectories")[0]
    found = posttrain("replay", stage.parent, "--step", str(step), "--set", "algorithm.clip_high=0.3", devices=1)
    assert found.code == 0, found.err
    rows = {line.split()[0]: line.split()[1:] for line in found.out.splitlines()}
    assert rows["reward"][0] == rows["reward"][1] and "loss" in rows


@of_the_plain_one
def test_what_cannot_be_replayed_is_said(stage: Path) -> None:
    with pytest.raises(ConfigError, match="no trajectories of step 99; there are"):
        replayed(stage, 99)
    with pytest.raises(ConfigError, match="sft is a stage of kind sft; only those of kind rl"):
        replayed(stage.parent / "0-sft", 1)
    steps = recorded_steps(stage / "trajectories")
    # The newest two checkpoints are kept: of the step before the last, and of the last, after which there is none.
    named, gone = f"1, {steps[-1]}", ", ".join(map(str, steps[1:-1]))
    with pytest.raises(ConfigError, match=f"no checkpoint of step 1; .*step 1 is kept; .*the steps {named}$"):
        replayed(stage, 2)
    told = posttrain("replay", stage, devices=1).out
    assert f"steps that can be replayed: {named}\n" in told and f"is gone: {gone}\n" in told


of_several_updates = pytest.mark.parametrize("stage", ["updates"], indirect=True, scope="module")


@pytest.mark.thorough
@of_several_updates
def test_losses_of_tokens(stage: Path) -> None:
    """They add up to the logged loss, and belong to the recorded tokens. Red if updates are each divided by their own
    weight, or if a packed sequence is taken for another sample's."""
    step = recorded_steps(stage / "trajectories")[-1]
    with few_devices(1):
        found = token_losses(stage, step)
    columns = found.columns
    assert abs(columns["share"].sum() - found.logged) < 1e-6 < abs(found.logged)
    assert set(columns["update"]) == {0, 1, 2, 3}
    recorded = read_record(stage / "trajectories", step)
    assert recorded.advantages_PG is not None
    for p, g in np.ndindex(recorded.advantages_PG.shape):
        sample = recorded.groups_P[p][g]
        own = (columns["group"] == sample.group) & (columns["sample"] == g) & (columns["update"] < 2)
        chosen = {name: values[own] for name, values in columns.items()}
        sampled = np.asarray(sample.sampled)
        assert chosen["position"].tolist() == list(range(len(sample.tokens)))
        assert (chosen["weight"] > 0).tolist() == sampled.tolist()
        drawn = np.asarray(sample.logps)[sampled]
        np.testing.assert_allclose(chosen["old_logp"][sampled], drawn, atol=QUANTIZED)
        np.testing.assert_allclose(chosen["advantage"][sampled], recorded.advantages_PG[p, g], rtol=1e-6)
        ratio = np.exp(chosen["logp"] - chosen["old_logp"])[sampled]
        np.testing.assert_allclose(chosen["ratio"][sampled], ratio, rtol=1e-5)
