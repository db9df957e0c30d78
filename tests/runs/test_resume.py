"""A run that was killed or interrupted ends bitwise where it would have ended without that."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from posttrain import load_tokenizer, save_model
from tests.often import often
from tests.stages.children import Child
from tests.stages.runs import INIT, fork, lines, posttrain, rl_stage, sft_stage, steps, weights, write_run
from tests.tiny import tiny_model

TIMEOUT_S = 300.0


def wait_for(output: Path, stage: str, step: int, process: Child) -> None:
    """Until the metrics have the step: the process is then about to do the next one, or to save this one."""
    end = time.monotonic() + TIMEOUT_S
    while step not in steps(output, stage):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, lines(output)
        time.sleep(0.005)


def finish(file: Path) -> str:
    ended = posttrain("run", file)
    assert ended.code == 0, ended.err
    return ended.out + ended.err


def kill_at(file: Path, output: Path, stage: str, step: int) -> None:
    process = fork("run", file)
    wait_for(output, stage, step, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


STEPS = 14
"""So many that a kill after a few steps comes long before the end."""


def two_stages(folder: Path, *, adapted: bool) -> Path:
    """All parameters; or an adapter, with evaluations in between and samples of earlier weights."""
    held_out = {"path": "rows.jsonl", "chat": False, "limit": 3}
    more = {"eval_dataset": held_out, "eval_every": 4} if adapted else {}
    sft = sft_stage(num_steps=STEPS, checkpoint_every=1, packing=True, **more)
    ends = {"max_tokens": 6, "stop_token_ids": [*range(0, 260, 4)]}
    ahead = {"asynchronous": {"max_staleness": 2}, "sampling": ends, "rollout": {"decode_steps": 2}} if adapted else {}
    algorithm = {"kind": "grpo", "kl_coef": 0.1, "old_logps": "trainer"}
    rl = rl_stage(num_steps=STEPS, checkpoint_every=2, algorithm=algorithm, samples_every=1000, **more, **ahead)
    lora = {"lora": {"rank": 2}} if adapted else {}
    return write_run(folder, sft, rl, model={"init": INIT, "tokenizer": "bytes", **lora})


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.thorough)], ids=["full", "lora"])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    whole = posttrain("run", two_stages(folder, adapted=request.param))
    assert whole.code == 0, whole.err
    return folder / "out", request.param


def interrupt_at(file: Path, output: Path, stage: str, step: int) -> int:
    """The last step of a run that is asked to stop: it ends after this one, with a checkpoint."""
    ended = threading.Event()

    def ask() -> None:
        while step not in steps(output, stage) and not ended.wait(0.005):
            pass
        if not ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    asking = threading.Thread(target=ask)
    asking.start()
    stopped = posttrain("run", file)
    ended.set()
    asking.join()
    assert stopped.code == 130, stopped.err
    assert "run the same command again to resume" in stopped.err
    last = steps(output, stage)[-1]
    assert step <= last < STEPS and (output / stage / "checkpoints" / str(last)).is_dir()
    return last


def test_killed_and_interrupted_ends_as_never_stopped(tmp_path: Path, uninterrupted: tuple[Path, bool]) -> None:
    whole, adapted = uninterrupted
    file, output = two_stages(tmp_path, adapted=adapted), tmp_path / "out"
    kill_at(file, output, "0-sft", 3)
    kill_at(file, output, "1-rl", 5)
    done = (output / "0-sft" / "model" / "model.safetensors").stat().st_mtime_ns
    last = interrupt_at(file, output, "1-rl", 9)
    out = finish(file)
    assert "0-sft: done before" in out and f"resuming after step {last} of {STEPS}" in out
    assert (output / "0-sft" / "model" / "model.safetensors").stat().st_mtime_ns == done
    for stage in ("0-sft", "1-rl"):
        assert steps(output, stage) == list(range(1, STEPS + 1))
        assert weights(output, stage) == weights(whole, stage), stage
    told = ("reward", "nll", "eval/reward", "eval/nll", "sampling/staleness/mean")
    numbers = [
        [(line["step"], *(line.get(name) for name in told)) for line in lines(folder)] for folder in (output, whole)
    ]
    assert numbers[0] == numbers[1]
    assert adapted == any(line[3] is not None for line in numbers[0])
    assert adapted == any(line[5] for line in numbers[0]), "samples of earlier weights"


IN_THIS_PROCESS = [{"fn": "rewards_of_test.py:low", "isolate": "thread"}]
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


@pytest.mark.thorough
def test_adapters_interrupted_and_resumed(tmp_path: Path) -> None:
    """With LoRA, in this process and on eight devices; held-out evaluations are not repeated."""

    def adapted(folder: Path, at: int) -> Path:
        model = {"init": INIT, "tokenizer": "bytes", "lora": {"rank": 2}}
        held_out = {"path": "rows.jsonl", "chat": False, "limit": 3}
        algorithm = {"kind": "grpo", "kl_coef": 0.1}
        rl = rl_stage(
            rewards=IN_THIS_PROCESS, checkpoint_every=3, algorithm=algorithm, eval_dataset=held_out, eval_every=3
        )
        file = write_run(folder, rl, model=model)
        (folder / "rewards_of_test.py").write_text(SIGNALLING.format(at=at))
        return file

    whole, halves = adapted(tmp_path / "whole", 0), adapted(tmp_path / "halves", 3)
    assert posttrain("run", whole, devices=8).code == 0
    # The first call scores the evaluation before, the third is step 2.
    stopped = posttrain("run", halves, devices=8)
    # A slow evaluation leaves a line before this one.
    assert stopped.code == 130 and stopped.err.splitlines()[-1] == (
        "stopped after step 2 of 4; run the same command again to resume"
    )
    assert posttrain("run", halves, devices=8).code == 0
    outputs = [folder.parent / "out" for folder in (whole, halves)]
    assert weights(outputs[0], "0-rl") == weights(outputs[1], "0-rl")
    told = [[(line["step"], "eval/reward" in line) for line in lines(output, "0-rl")] for output in outputs]
    assert told[0] == told[1] == [(0, True), (1, False), (2, False), (3, False), (3, True), (4, False), (4, True)]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that trained an adapter over the model in `base`, with evaluations."""
    folder = tmp_path_factory.mktemp("adapted")
    base = tiny_model(num_layers=1, windows=(None,), vocab_size=261)
    save_model(base, folder / "base", tokenizer=load_tokenizer("bytes"))
    held_out = {"path": "rows.jsonl", "chat": False, "limit": 3}
    stage = sft_stage(num_steps=2, eval_dataset=held_out)
    file = write_run(folder, stage, model={"path": "base", "lora": {"rank": 2}, "remat": "auto"})
    assert posttrain("run", file).code == 0
    assert json.loads((folder / "out" / "0-sft" / "remat.json").read_text()) == "none"
    return file


def unfinished(file: Path, folder: Path, *without: str) -> tuple[Path, Path]:
    """A copy of the run as a kill leaves it before its model is saved; its configuration and the stage's folder."""
    shutil.copytree(file.parent, folder, dirs_exist_ok=True)
    stage = folder / "out" / "0-sft"
    shutil.rmtree(stage / "model")
    for name in ("result.json", *without):
        (stage / name).unlink()
    for text in (folder / file.name, folder / "out" / "config.yaml"):
        text.write_text(text.read_text().replace(str(file.parent), str(folder)))
    return folder / file.name, stage


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("written", "remembered"),
    often([(True, True), (True, False), (False, True), (False, False)], (True, True), (False, False)),
)
def test_killed_after_the_last_evaluation_says_it_once(
    tmp_path: Path, adapted: Path, remembered: bool, written: bool
) -> None:
    told = [{**line, "time": 0} for line in lines(adapted.parent / "out")]
    file, stage = unfinished(adapted, tmp_path, *([] if remembered else ["after.json"]))
    if not written:
        metrics = stage.parent / "metrics.jsonl"
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    before = (stage / "after.json").stat().st_mtime_ns if remembered else None
    (stage / "remat.json").write_text('{"save": ["gate"], "offload": []}')
    again = posttrain("run", file)
    assert again.code == 0 and "resuming after step 2 of 2" in again.out, again.err
    assert "remat auto: save gate, as when the stage began" in again.out
    assert [{**line, "time": 0} for line in lines(tmp_path / "out")] == told
    assert remembered == ((stage / "after.json").stat().st_mtime_ns == before)
    assert weights(tmp_path / "out", "0-sft") == weights(adapted.parent / "out", "0-sft")


@pytest.mark.thorough
def test_an_adapter_goes_on_only_over_its_base(tmp_path: Path, adapted: Path) -> None:
    file, stage = unfinished(adapted, tmp_path)
    base = tmp_path / "base" / "model.safetensors"
    before, tensors = base.read_bytes(), load_file(base)
    (base.parent / "digests.json").unlink()  # another model on purpose
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + 1e-3}, base, {"format": "pt"})
    error = posttrain("run", file).error
    assert error.startswith(f"{stage}: the initial model differs: in ")
    assert f"{tmp_path / 'base'} model.safetensors has changed since it was written; use another output" in error
    (stage / "checkpoints").rename(tmp_path / "checkpoints")  # as if killed before the first
    assert posttrain("run", file).error == error
    (tmp_path / "checkpoints").rename(stage / "checkpoints")
    base.write_bytes(before)
    assert posttrain("run", file).code == 0


@pytest.mark.thorough
def test_stop_between_stages(tmp_path: Path) -> None:
    """A signal during the last step of a stage ends the run before the next stage."""
    stage = rl_stage(num_steps=1, rewards=IN_THIS_PROCESS)
    file = write_run(tmp_path, stage, stage)
    (tmp_path / "rewards_of_test.py").write_text(SIGNALLING.format(at=1))
    stopped = posttrain("run", file)
    assert stopped.code == 130 and stopped.err.splitlines()[-1].startswith("stopped before 1-rl")
    assert (tmp_path / "out" / "0-rl" / "model").is_dir() and not steps(tmp_path / "out", "1-rl")
    assert posttrain("run", file).code == 0


@pytest.mark.thorough
def test_a_moved_project_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, rewards and output of the configuration are relative to its folder."""
    write_run(tmp_path / "old", sft_stage(num_steps=1), output="out")
    monkeypatch.chdir(tmp_path / "old")
    assert posttrain("run", "run.yaml").code == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path / "new")
    again = posttrain("run", "run.yaml", "stages.sft.num_steps=2")
    assert again.code == 0 and "resuming after step 1 of 2" in again.out, again.err
