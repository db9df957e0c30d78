"""A run that was killed or interrupted ends bitwise where it would have ended without that."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.recipes.runs import INIT, lines, posttrain, rl_stage, sft_stage, start, steps, weights, write_run

TIMEOUT_S = 300.0


def wait_for(output: Path, stage: str, step: int, process: subprocess.Popen[str]) -> None:
    """Until the metrics have the step: the process is then about to do the next one, or to save this one."""
    end = time.monotonic() + TIMEOUT_S
    while step not in steps(output, stage):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, lines(output)
        time.sleep(0.002)


def finish(file: Path) -> str:
    process = start("run", file)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, out
    return out


def kill_at(file: Path, output: Path, stage: str, step: int) -> None:
    process = start("run", file)
    wait_for(output, stage, step, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


STEPS = 30
"""So many that a kill after a few steps comes long before the end."""


def two_stages(folder: Path) -> Path:
    sft = sft_stage(num_steps=STEPS, checkpoint_every=1, packing=True)
    rl = rl_stage(num_steps=STEPS, checkpoint_every=2, kl_coef=0.1, recompute_old_logps=True, samples_every=1000)
    return write_run(folder, sft, rl)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(two_stages(folder))
    return folder / "out"


def test_killed_in_both_stages_ends_as_never_killed(tmp_path: Path, uninterrupted: Path) -> None:
    file, output = two_stages(tmp_path), tmp_path / "out"
    kill_at(file, output, "0-sft", 3)
    kill_at(file, output, "1-rl", 5)
    done = (output / "0-sft" / "model" / "model.safetensors").stat().st_mtime_ns
    out = finish(file)
    assert "0-sft: done before" in out and "resuming after step" in out
    assert (output / "0-sft" / "model" / "model.safetensors").stat().st_mtime_ns == done
    for stage in ("0-sft", "1-rl"):
        assert steps(output, stage) == list(range(1, STEPS + 1))
        assert weights(output, stage) == weights(uninterrupted, stage), stage
    rewards = [[line["reward"] for line in lines(folder, "1-rl")] for folder in (output, uninterrupted)]
    assert rewards[0] == rewards[1]


def test_interrupted_stops_after_the_step_with_a_checkpoint(tmp_path: Path, uninterrupted: Path) -> None:
    file, output = two_stages(tmp_path), tmp_path / "out"
    process = start("run", file)
    wait_for(output, "0-sft", 3, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, out
    assert "stopping after this step" in out and "the same command goes on from there" in out
    assert "Traceback" not in out
    last = steps(output, "0-sft")[-1]
    assert 3 <= last < STEPS and (output / "0-sft" / "checkpoints" / str(last)).is_dir()
    out = finish(file)
    assert f"resuming after step {last} of {STEPS}" in out
    for stage in ("0-sft", "1-rl"):
        assert steps(output, stage) == list(range(1, STEPS + 1))
        assert weights(output, stage) == weights(uninterrupted, stage), stage


SIGNALLING = """
import os, signal
calls = 0
def low(completion_tokens, **_):
    global calls
    calls += 1
    if calls == {at}:
        os.kill(os.getpid(), signal.SIGINT)
    return [sum(t < 128 for t in c) / len(c) for c in completion_tokens]
"""


def test_adapters_interrupted_and_resumed(tmp_path: Path) -> None:
    """With LoRA, in this process and on eight devices; held-out evaluations are not repeated."""

    def adapted(folder: Path, at: int) -> Path:
        model = {"init": INIT, "tokenizer": "bytes", "lora": {"rank": 2}}
        held_out = {"path": "rows.jsonl", "chat": False, "limit": 3}
        rl = rl_stage(checkpoint_every=3, kl_coef=0.1, eval_dataset=held_out, eval_every=3)
        file = write_run(folder, sft_stage(num_steps=2), rl, model=model)
        (folder / "rewards_of_test.py").write_text(SIGNALLING.format(at=at))
        return file

    whole, halves = adapted(tmp_path / "whole", 0), adapted(tmp_path / "halves", 3)
    assert posttrain("run", whole).code == 0
    # The first call scores the evaluation before, the third is step 2.
    stopped = posttrain("run", halves)
    assert stopped.code == 130 and stopped.err == "stopped after step 2 of 4; the same command goes on from there\n"
    assert posttrain("run", halves).code == 0
    outputs = [folder.parent / "out" for folder in (whole, halves)]
    for stage in ("0-sft", "1-rl"):
        assert weights(outputs[0], stage) == weights(outputs[1], stage)
    told = [[(line["step"], "eval/reward" in line) for line in lines(output, "1-rl")] for output in outputs]
    assert told[0] == told[1] == [(0, True), (1, False), (2, False), (3, False), (3, True), (4, False), (4, True)]


def test_stop_between_stages(tmp_path: Path) -> None:
    """A signal during the last step of a stage ends the run before the next stage."""
    first = rl_stage(num_steps=1)
    file = write_run(tmp_path, first, rl_stage(num_steps=1))
    (tmp_path / "rewards_of_test.py").write_text(SIGNALLING.format(at=1))
    stopped = posttrain("run", file)
    assert stopped.code == 130 and stopped.err.startswith("stopped before 1-rl")
    assert (tmp_path / "out" / "0-rl" / "model").is_dir() and not steps(tmp_path / "out", "1-rl")
    assert posttrain("run", file).code == 0
