"""Trajectories of a step on disk: whole, small, rotated; a write that fails ends the run."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from posttrain.errors import ConfigError, RunError
from posttrain.reward.types import RewardError, Rewards
from posttrain.rl.assemble import assemble
from posttrain.rl.store import TOKENS, Recorded, TrajectoryStore, read_record
from posttrain.rollout.records import file_of, recorded_steps
from posttrain.rollout.trajectory import Group
from posttrain.tree import Mean
from tests.rl.helpers import trajectory

pytestmark = pytest.mark.fast

PROMPTS, GROUP = 3, 4


def scored(seed: int = 0, length: int = 9, *, experts: bool = False) -> Recorded:
    """Samples of random tokens and log-probabilities, which do not compress; one of them is not scored."""
    draw = np.random.default_rng(seed)

    def sample(p: int, g: int) -> Any:
        made = trajectory(sample=g, tokens=draw.integers(0, 150_000, length).tolist(), num_prompt=2, stop="length")
        numbers = ("logps", "kept_logps", "truncation_logps")
        values = {name: draw.normal(size=length).astype(np.float32) for name in numbers}
        lists = {name: np.where(made.sampled, array, np.float32(0)).tolist() for name, array in values.items()}
        versions = np.where(made.sampled, draw.integers(0, 1000, length), -1).tolist()
        recorded = draw.integers(0, 8, (length, 2, 2)).astype(np.int16) if experts else None
        example = replace(made.example, index=10 + p, prompt_tokens=made.tokens[:2])
        return replace(made, group=70 + p, example=example, versions=versions, experts=recorded, **lists)

    groups: list[Group] = [[sample(p, g) for g in range(GROUP)] for p in range(PROMPTS)]
    total = draw.normal(size=(PROMPTS, GROUP)).astype(np.float32)
    total[1, 2] = np.nan
    error = RewardError(function="low", prompt=1, sample=2, kind="timeout", error="too slow")
    rewards = Rewards(
        total_PG=total,
        parts_PG={"low": total / 2, "a.b": -total},
        errors=[error],
        metrics={"rewards/low/x": Mean(total=1.5, weight=3.0)},
        extras={},
    )
    advantages = draw.normal(size=(PROMPTS, GROUP)).astype(np.float32)
    return Recorded(
        before=6, step=8, version=3, groups_P=groups, rewards=rewards, advantages_PG=advantages, roles_PG=None
    )


def store(folder: Path, *, keep: int = 50, start: int = 0) -> TrajectoryStore:
    return TrajectoryStore(folder, keep=keep, start=start)


@pytest.mark.parametrize("experts", [False, True])
def test_what_is_read_is_what_was_written(tmp_path: Path, experts: bool) -> None:
    written = scored(experts=experts)
    with store(tmp_path) as opened:
        opened.write(written)
    read = read_record(tmp_path, 8)
    assert (read.before, read.step, read.version, read.roles_PG) == (6, 8, 3, None)
    assert (read.rewards.errors, read.rewards.metrics) == (written.rewards.errors, written.rewards.metrics)
    assert_array_equal(read.rewards.total_PG, written.rewards.total_PG)
    assert_array_equal(read.advantages_PG, written.advantages_PG)
    assert read.rewards.parts_PG.keys() == {"low", "a.b"}
    for name, part in read.rewards.parts_PG.items():
        assert_array_equal(part, written.rewards.parts_PG[name])
    for ours, theirs in zip(*(chain(*recorded.groups_P) for recorded in (read, written)), strict=True):
        for name in ("group", "sample", *TOKENS, "stop"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert (ours.example.index, ours.example.prompt_tokens) == (theirs.example.index, theirs.example.prompt_tokens)
        assert_array_equal(ours.experts, theirs.experts)


def test_the_batch_is_the_same(tmp_path: Path) -> None:
    written = scored(experts=True)
    with store(tmp_path) as opened:
        opened.write(written)
    read = read_record(tmp_path, 8)
    batches = []
    for recorded in (written, read):
        assert recorded.advantages_PG is not None
        valid = ~np.isnan(recorded.rewards.total_PG)
        like = recorded.groups_P[0][0]
        batches.append(
            assemble(
                recorded.groups_P,
                recorded.advantages_PG,
                valid,
                like=like,
                row_tokens=16,
                num_rows=12,
                version=recorded.version,
            )
        )
    for name, array in vars(batches[0]).items():
        assert_array_equal(array, getattr(batches[1], name), err_msg=name)


def test_roles_of_preference_steps(tmp_path: Path) -> None:
    roles = np.asarray([[1, -1, 0, 0], [0, 0, 0, 0], [0, 1, 0, -1]], np.int32)
    with store(tmp_path) as opened:
        opened.write(replace(scored(), advantages_PG=None, roles_PG=roles))
    read = read_record(tmp_path, 8)
    assert read.advantages_PG is None
    assert_array_equal(read.roles_PG, roles)


def test_at_most_24_bytes_a_token(tmp_path: Path) -> None:
    """Of 500 tokens, of which nothing compresses, and of 6,000; everything counts."""
    for length, most in ((42, 24), (500, 17)):
        with store(tmp_path) as opened:
            opened.write(scored(length=length))
        assert file_of(tmp_path, 8).stat().st_size / (PROMPTS * GROUP * length) < most


def test_the_newest_are_kept(tmp_path: Path) -> None:
    with store(tmp_path, keep=2) as opened:
        for step in (8, 9, 100, 1000):
            opened.write(replace(scored(), step=step))
    assert recorded_steps(tmp_path) == [100, 1000]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["00000100.parquet", "00001000.parquet"]
    # A run that goes on from an earlier checkpoint makes the later ones again.
    with store(tmp_path, keep=2, start=100) as opened:
        opened.write(replace(scored(), step=101))
    assert recorded_steps(tmp_path) == [100, 101]


def test_a_failed_write_is_raised_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "trajectories"
    folder.write_text("a file where the folder should be")
    opened = store(folder)
    opened.write(scored())
    with pytest.raises(RunError, match=r"trajectories cannot be written \(FileExistsError: .*set record to null"):
        opened.write(scored())
    with pytest.raises(RunError, match="cannot be written"), store(folder) as again:
        again.write(scored())
    opened = store(folder)
    opened.write(scored())
    opened.__exit__(KeyError, KeyError(), None)  # an error of the run is not hidden behind that of the store


def test_a_step_does_not_wait_for_its_own_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write = threading.Event(), TrajectoryStore._write

    def slow(self: TrajectoryStore, recorded: Recorded) -> None:
        assert go_on.wait(30)
        write(self, recorded)

    monkeypatch.setattr(TrajectoryStore, "_write", slow)
    with store(tmp_path) as opened:
        opened.write(scored())
        assert recorded_steps(tmp_path) == []
        go_on.set()
        opened.wait()
        assert recorded_steps(tmp_path) == [8]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trajectories of step 8; there are none"):
        read_record(tmp_path, 8)
    with store(tmp_path) as opened:
        opened.write(scored())
    with pytest.raises(ConfigError, match="no trajectories of step 7; there are 1, from 8 to 8"):
        read_record(tmp_path, 7)
