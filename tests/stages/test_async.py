"""Runs with asynchronous RL: their metrics, resumed and killed runs, and configurations that are refused."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from posttrain.config import RLSection
from posttrain.config.yaml_file import load_config
from posttrain.errors import ConfigError
from posttrain.losses.ratios import ImportanceSampling
from posttrain.runs.prepare import prepare
from posttrain.runs.replay import MEASURED, replay
from posttrain.stages.online import one_process
from posttrain.stages.prompts import RLInputs
from tests.stages.runs import few_devices, fork, lines, posttrain, rl_stage, steps, weights, write_run

SLOW = '''
import os, random, signal, time
calls = 0

def low(completion_tokens, **_):
    """Share of tokens below 128, after some time."""
    global calls
    calls += 1
    if calls == {at}:
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(random.random() * {longest_s})
    return [sum(t < 128 for t in c) / len(c) for c in completion_tokens]

def first_is_low(rewards_PG):
    return rewards_PG[:, 0] < rewards_PG[:, 1:].max(axis=1)
'''
ENV = '''
import random, time
from posttrain.environments.types import Reply


class Talk:
    """Up to three turns, each answered after some time."""

    def __init__(self):
        self.count = 0

    def reply(self, message):
        time.sleep(random.random() * {longest_s})
        self.count += 1
        said, messages = sum(map(ord, message["content"])), [{{"role": "user", "content": "go"}}]
        return Reply(messages=messages, done=self.count == 3 or said % 4 == 0, reward=float(said % 5))
'''
TALK: dict[str, Any] = {
    "env": {"fn": "envs_of_test.py:Talk", "timeout_s": 10.0},
    "rewards": [],
    "row_tokens": 48,
    "sampling": {"max_tokens": 6, "stop_token_ids": [*range(0, 260, 3)]},
}
REFILLED: dict[str, Any] = {
    "refill": {"limit": 2, "keep": "rewards_of_test.py:first_is_low"},
    "curriculum": {"pools": [0.0, 0.5, 1.0], "draw": [0.5, 0.5]},
}
PLAIN: dict[str, Any] = {
    "rewards": [{"fn": "rewards_of_test.py:low", "isolate": "thread"}],
    "eval_dataset": {"path": "rows.jsonl", "chat": False, "limit": 3},
    "eval_every": 2,
    "checkpoint_every": 2,
    "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
}


def write(folder: Path, *, at: int = 0, longest_s: float = 0.0, in_flight: bool = False, **changes: Any) -> Path:
    ahead = {"max_staleness": 2, "in_flight": in_flight}
    file = write_run(folder, rl_stage(**PLAIN | {"asynchronous": ahead} | changes))
    (folder / "rewards_of_test.py").write_text(SLOW.format(at=at, longest_s=longest_s))
    (folder / "envs_of_test.py").write_text(ENV.format(longest_s=longest_s))
    return file


def groups(output: Path) -> list[int]:
    """Numbers of the groups that were learned from, step by step."""
    files = sorted((output / "0-rl" / "trajectories").glob("*.parquet"))
    return [number for file in files for number in dict.fromkeys(pyarrow.parquet.read_table(file)["group"].to_pylist())]


@pytest.mark.thorough
def test_an_interrupted_run_ends_as_never_stopped(tmp_path: Path) -> None:
    """Evaluations in between, rewards that take another time in each run. Turned red by: a queue that is not saved."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert posttrain("run", write(whole, num_steps=5)).code == 0
    # The first call scores the evaluation before; the sixth a group of the first steps, all of which are begun at once.
    stopped = posttrain("run", write(halves, at=6, longest_s=0.02, num_steps=5))
    assert stopped.code == 130, stopped.err
    last = steps(halves / "out", "0-rl")[-1]
    assert last < 5
    assert posttrain("run", halves / "run.yaml").code == 0
    assert weights(halves / "out", "0-rl") == weights(whole / "out", "0-rl")
    assert groups(halves / "out") == groups(whole / "out") == list(range(10))
    names = ("reward", "eval/reward", "sampling/staleness/mean", "sampling/staleness/max")
    told, again = ([[line.get(name) for name in names] for line in lines(folder / "out")] for folder in (whole, halves))
    assert told == again
    training = [line for line in lines(whole / "out") if "grad_norm" in line]
    assert [line["sampling/staleness/max"] for line in training] == [0, 1, 2, 2, 2]
    for line in training:
        seconds = [f"async/{name}_s" for name in ("wait_for_rollouts", "learn", "between_steps")]
        assert sum(line[name] for name in seconds) == pytest.approx(
            line["async/sample_s"] + line["async/wait_for_trainer_s"]
        )
        assert line["rollout/late_compilations"] == 0 and line["memory/rollout/rollout_gib"] > 0


@pytest.mark.thorough
def test_conversations_do_not_depend_on_time(tmp_path: Path) -> None:
    """A step that was sampled ahead is replayed as logged."""
    folders = [tmp_path / name for name in ("fast", "slow")]
    for folder, longest_s in zip(folders, (0.0, 0.05), strict=True):
        outcome = posttrain("run", write(folder, longest_s=longest_s, num_steps=4, **TALK))
        assert outcome.code == 0, outcome.err
    fast, slow = (folder / "out" for folder in folders)
    assert weights(fast, "0-rl") == weights(slow, "0-rl")
    assert lines(fast)[-1]["eval/reward"] == lines(slow)[-1]["eval/reward"]
    with few_devices(1):
        found = replay(fast / "0-rl", 3)
    for name in (name for name in found.logged if not name.startswith(MEASURED)):
        assert math.isclose(found.metrics[name], found.logged[name], rel_tol=1e-5, abs_tol=1e-6), name


@pytest.mark.thorough
def test_in_flight(tmp_path: Path) -> None:
    assert posttrain("run", write(tmp_path, in_flight=True, num_steps=4, rollout={"decode_steps": 2})).code == 0
    assert groups(tmp_path / "out") == list(range(8))
    training = [line for line in lines(tmp_path / "out") if "grad_norm" in line]
    assert all(line["sampling/staleness/max"] <= 2 for line in training)


@pytest.mark.thorough
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("changes", [{}, TALK, REFILLED], ids=["one turn", "conversations", "refill"])
def test_killed_at_any_time_it_resumes(tmp_path: Path, changes: dict[str, Any], in_flight: bool) -> None:
    """Bitwise without `in_flight`, else with each group once."""
    count, longest_s = 12, 0.05
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more: dict[str, Any] = {"num_steps": count, "in_flight": in_flight, "longest_s": longest_s, **changes}
    assert posttrain("run", write(whole, **more)).code == 0
    file = write(killed, **more)
    for wait_s in (0.0, 0.02, 0.05, 0.1, 0.15, 0.2):
        before = len(steps(killed / "out", "0-rl"))
        process = fork("run", file)
        while len(steps(killed / "out", "0-rl")) <= before and process.poll() is None:
            time.sleep(0.002)
        time.sleep(wait_s)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    process = fork("run", file)
    out, _ = process.communicate(timeout=300.0)
    assert process.returncode == 0, out
    numbers = groups(killed / "out")
    if "refill" in changes:
        assert len(numbers) > 2 * count and len({*numbers}) == len(numbers)
    else:
        assert numbers == list(range(2 * count))
    if not in_flight:
        assert numbers == groups(whole / "out")
        assert weights(killed / "out", "0-rl") == weights(whole / "out", "0-rl")


@pytest.mark.thorough
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("rollout", [None, 2])
def test_placements(tmp_path: Path, rollout: int | None, in_flight: bool) -> None:
    """Four devices for both halves, which then take turns, or two for each: no run hangs."""
    placed = {"placement": {"rollout": {"devices": rollout}}} if rollout else {}
    file = write(tmp_path, in_flight=in_flight, num_steps=8, longest_s=0.02, **placed)
    assert posttrain("run", file, devices=4).code == 0
    assert groups(tmp_path / "out") == list(range(16))


def section(folder: Path, *overrides: str) -> RLSection:
    return inputs(folder, *overrides).section


def inputs(folder: Path, *overrides: str) -> RLInputs:
    loaded = load_config(write(folder), [f"stages.0.{change}" for change in overrides])
    (stage,) = prepare(loaded, offline_ok=True).stages
    assert isinstance(stage, RLInputs)
    return stage


def test_what_follows_from_the_section(tmp_path: Path) -> None:
    """Stale samples are weighed, against log-probabilities of the trainer; without staleness nothing changes."""
    stale, fresh = inputs(tmp_path), inputs(tmp_path, "asynchronous.max_staleness=0")
    assert stale.section.proximal_logps == "trainer" and fresh.section.proximal_logps == "self"
    assert stale.algorithm.loss.importance == ImportanceSampling() and fresh.algorithm.loss.importance is None
    assert stale.section.samples_while_updating and not fresh.section.samples_while_updating
    assert stale.section.samples_in_flight == 8
    flying = section(tmp_path, "asynchronous.in_flight=true")
    assert flying.samples_in_flight == 24 and not flying.samples_while_updating
    assert one_process(flying) == "asynchronous works in one process only"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["oversample_prompts=1"],
            "oversample_prompts: unknown field; did you mean .asynchronous.. .write asynchronous: {max_staleness: 1}",
        ),
        (["max_staleness=3"], "max_staleness: unknown field; did you mean 'asynchronous.max_staleness'"),
        (
            ["refill={limit: 2}", "rewards=[{model: m}]"],
            "asynchronous and refill with reward models: they score a step",
        ),
        (["algorithm.old_logps=self"], "max_staleness=2 with old_logps=self: samples come from older weights"),
        (["asynchronous={max_staleness: 0, in_flight: true}"], "in_flight has no effect with max_staleness=0"),
        (
            ["asynchronous={in_flight: true}", "rollout.record_routing=true"],
            "would mix the experts of several versions",
        ),
        (["asynchronous.stall_s=0"], "stall_s: .*greater than 0"),
    ],
)
def test_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section(tmp_path, *overrides)
