"""Several processes of one run: the losses of one, files written once, and one end for all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from posttrain.config.yaml_file import load_config
from posttrain.errors import ConfigError
from posttrain.plan.machine import machine
from posttrain.runtime import join
from posttrain.stages.table import check_processes
from tests.stages.runs import ROOT, lines, posttrain, rl_stage, sft_stage, start, steps, write_run
from tests.stages.test_preference import PAIRS, preference_stage

TIMEOUT_S = 300.0
LOSS = """
import os
from posttrain.losses.sft import SFTLoss

class Loss(SFTLoss):
    def __call__(self, stats, batch):
        # 16 tokens are a row of the run: the proof of a loss before it has others
        if os.environ.get("JAX_PROCESS_ID") == "1" and stats.logps.shape[1] == 16:
            raise RuntimeError("one process alone has this fault")
        return super().__call__(stats, batch)
"""


def two_stages(folder: Path) -> Path:
    held_out = {"chat": False, "limit": 3}
    sft = sft_stage(num_steps=3, checkpoint_every=3, eval_dataset={"path": "rows.jsonl", **held_out})
    pairs = preference_stage(num_steps=6, checkpoint_every=1, eval_dataset={"path": "pairs.jsonl", **held_out})
    file = write_run(folder, sft, pairs, mesh={"fsdp": 2, "data": -1})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return file


@contextlib.contextmanager
def launched(file: Path, *, processes: int = 2, devices: int = 2) -> Iterator[subprocess.Popen[str]]:
    """`posttrain launch` on the file, ended with all that it started."""
    words = ["launch", f"--processes={processes}", f"--cpu-devices={devices}", "run", str(file)]
    launcher = start(*words)
    try:
        yield launcher
    finally:
        left = children(launcher)
        launcher.terminate()
        for child in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        launcher.communicate()


def children(launcher: subprocess.Popen[str]) -> list[int]:
    """Processes of the run, in order."""
    with contextlib.suppress(FileNotFoundError):
        return [*map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split())]
    return []


def wait_for(launcher: subprocess.Popen[str], output: Path, stage: str, step: int) -> None:
    end = time.monotonic() + TIMEOUT_S
    while step not in steps(output, stage):
        assert launcher.poll() is None, launcher.communicate()[0]
        assert time.monotonic() < end, lines(output)
        time.sleep(0.01)


def values(output: Path) -> list[tuple[Any, ...]]:
    """Stage, step and losses of every line."""
    return [(line["stage"], line["step"], line.get("loss"), line.get("eval/loss")) for line in lines(output)]


def files(output: Path) -> set[str]:
    """Files of a run, but for the shards of checkpoints and the cache that other runs share."""
    found = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    others = "/reference/", "hosts/"
    return {re.sub(r"(checkpoints/\d+)/.*", r"\1", name) for name in found if not any(o in name for o in others)}


def check_same_run(output: Path, one: Path) -> None:
    assert [found[:2] for found in values(output)] == [found[:2] for found in values(one)]
    for found, expected in zip(values(output), values(one), strict=True):
        pairs = zip(found[2:], expected[2:], strict=True)
        np.testing.assert_allclose(*zip(*((a, b) for a, b in pairs if b is not None), strict=True), rtol=0, atol=1e-5)
    assert files(output) == files(one)
    for stage in ("0-sft", "1-preference"):
        tensors, expected = (load_file(folder / stage / "model" / "model.safetensors") for folder in (output, one))
        assert tensors.keys() == expected.keys()
        for name in tensors:
            np.testing.assert_allclose(tensors[name], expected[name], rtol=0, atol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        done = posttrain("run", two_stages(folder), devices=4)
    assert done.code == 0, done.err
    return folder / "out"


@pytest.mark.thorough
@pytest.mark.parametrize("whom", [0, 1])
def test_killed_and_resumed_as_one_process(tmp_path: Path, one_process: Path, whom: int) -> None:
    """A process that dies, also the one with the store of all, ends the other, which says so; the same command does
    the rest, from a checkpoint: that of step 1 is whole before step 3 begins, since the one of step 2 waits for it."""
    file, output = two_stages(tmp_path), tmp_path / "out"
    with launched(file) as launcher:
        wait_for(launcher, output, "1-preference", 3)
        os.kill(children(launcher)[whom], signal.SIGKILL)
        started = time.monotonic()
        told, _ = launcher.communicate(timeout=TIMEOUT_S)
        assert time.monotonic() - started < 60
    assert launcher.returncode == 128 + signal.SIGKILL, told
    how = r"(vanished \(.*; the same command resumes after step \d|ended by signal 9.*resumes$)"
    line = rf"^(\[1\] )?error: process {whom} of 2 has {how}"
    assert len(re.findall(line, told, re.M)) == 1, told
    check_finished(file, one_process)


def check_finished(file: Path, one: Path) -> None:
    with launched(file) as launcher:
        told, _ = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 0, told
    assert "0-sft: done before" in told and "resuming after step" in told
    check_same_run(file.parent / "out", one)


@pytest.mark.thorough
@pytest.mark.parametrize("whom", ["launcher", 0, 1])
def test_stopped_and_resumed_as_one_process(tmp_path: Path, one_process: Path, whom: str | int) -> None:
    """A signal to all, or to any of them, stops them after the same step."""
    file, output = two_stages(tmp_path), tmp_path / "out"
    with launched(file) as launcher:
        wait_for(launcher, output, "1-preference", 2)
        os.kill(launcher.pid if isinstance(whom, str) else children(launcher)[whom], signal.SIGTERM)
        told, _ = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 143, told
    assert re.search(r"^stopped after step \d of 6; run the same command again to resume", told, re.M), told
    assert "Traceback" not in told and "FATAL" not in told
    for index in range(2):
        log = (output / f"hosts/{index}.log").read_text()
        assert "Traceback" not in log and log.endswith(" ended by Interrupted\n")
    check_finished(file, one_process)


@pytest.mark.thorough
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_uninterrupted(tmp_path: Path, one_process: Path, processes: int, devices: int) -> None:
    with launched(two_stages(tmp_path), processes=processes, devices=devices) as launcher:
        told, _ = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 0, told
    check_same_run(tmp_path / "out", one_process)
    check_hosts(tmp_path / "out", processes)
    assert not (one_process / "hosts").exists()


def check_hosts(output: Path, number: int) -> None:
    """Metrics and a log of each process: a line for each of the run's that has times, none with a loss."""
    wanted = [(line["stage"], line["step"]) for line in lines(output) if "step_time" in line]
    for index in range(number):
        found = [json.loads(text) for text in (output / f"hosts/{index}.jsonl").read_text().splitlines()]
        assert [(line["stage"], line["step"]) for line in found if "step_time" in line] == wanted
        assert all(line["host/resident_mib"] > 50 and line["host/wait_s"] >= 0 and "loss" not in line for line in found)
        assert sum(line["host/wait_s"] for line in found) > 0
        log = (output / f"hosts/{index}.log").read_text().splitlines()
        assert f"begun: process {index} of {number}" in log[0] and log[-1].endswith(" ended")
    assert {path.name for path in (output / "hosts").iterdir()} == {
        f"{index}.{end}" for index in range(number) for end in ("jsonl", "log")
    }


def gathered_once(folder: Path) -> Path:
    """Two micro-batches an update, on data=2 and fsdp=4."""
    stage = sft_stage(num_steps=4, batch_rows=16, micro_batch_rows=8, checkpoint_every=1)
    return write_run(folder, stage, mesh={"fsdp": 4, "data": 2, "gather": "update"})


@pytest.mark.thorough
def test_gathered_once_as_in_one_process_also_killed_and_resumed(tmp_path: Path) -> None:
    """`data` lies between the processes, which add their sums of gradients up once an update."""
    one, file = gathered_once(tmp_path / "one"), gathered_once(tmp_path / "two")
    assert posttrain("run", one, devices=8).code == 0
    output = tmp_path / "two" / "out"
    with launched(file, devices=4) as launcher:
        wait_for(launcher, output, "0-sft", 3)
        os.kill(children(launcher)[1], signal.SIGKILL)
        launcher.communicate(timeout=TIMEOUT_S)
    with launched(file, devices=4) as launcher:
        told, _ = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 0 and json.loads((output / "0-sft" / "gather.json").read_text()) is True, told
    found, expected = (
        [line["loss"] for line in lines(folder) if "loss" in line] for folder in (output, one.parent / "out")
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    tensors, others = (load_file(x / "0-sft" / "model" / "model.safetensors") for x in (output, one.parent / "out"))
    for name in others:
        np.testing.assert_allclose(tensors[name], others[name], rtol=0, atol=1e-6, err_msg=name)


def rl_run(folder: Path, **changes: Any) -> Path:
    """Three groups a step, of which the processes have one and two, several updates, and a reference that follows."""
    held_out = {"path": "rows.jsonl", "chat": False, "limit": 3}
    stage = rl_stage(
        num_steps=6,
        prompts_per_step=3,
        updates=3,
        checkpoint_every=3,
        eval_dataset=held_out,
        reference={"refresh_every": 1, "mixup": 0.5},
        **changes,
    )
    return write_run(folder, stage, mesh={"fsdp": 2, "data": -1})


@pytest.mark.thorough
def test_grpo_as_in_one_process_also_killed_and_resumed(tmp_path: Path) -> None:
    """Each process drafts with a model of its own, and the one without: no sample depends on it."""
    one = rl_run(tmp_path / "one")
    assert posttrain("run", one, devices=4).code == 0
    drafts = {"kind": "draft", "path": str(one.parent / "out" / "0-rl" / "model"), "tokens": 2}
    file, output = rl_run(tmp_path / "two", rollout={"speculative": drafts}), tmp_path / "two" / "out"
    with launched(file) as launcher:
        wait_for(launcher, output, "0-rl", 3)
        os.kill(children(launcher)[1], signal.SIGKILL)
        started = time.monotonic()
        told, _ = launcher.communicate(timeout=TIMEOUT_S)
        assert time.monotonic() - started < 60
    assert launcher.returncode == 128 + signal.SIGKILL, told
    with launched(file) as launcher:
        told, _ = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 0, told
    found, expected = lines(output), lines(one.parent / "out")
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    assert sum(line.get("rollout/speculative/share", 0.0) for line in found) > 0
    for got, wanted in zip(found, expected, strict=True):
        assert got.get("completions/num_tokens") == wanted.get("completions/num_tokens"), "the same samples"
        for name in ("loss", "kl", "reward", "eval/reward"):
            assert got.get(name) == pytest.approx(wanted.get(name), abs=1e-5), (name, got["step"])


@pytest.mark.thorough
def test_an_error_of_one_ends_all(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(LOSS)
    file = write_run(tmp_path, sft_stage(loss="faulty.py:Loss"))
    with launched(file, devices=1) as launcher:
        told, _ = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 1, told
    assert told.count("RuntimeError: one process alone has this fault") == 2 and "process 1 of 2: Traceback" in told


def test_kinds_of_stages_and_rows(tmp_path: Path) -> None:
    file = write_run(tmp_path, sft_stage(), rl_stage(asynchronous={}))
    refused = posttrain("check", file, "--devices", "4", "--processes", "2").error
    assert "a stage of kind rl runs in one process, not in 2: asynchronous works in one process only" in refused
    assert posttrain("check", file, "--devices", "4").code == 0
    config = load_config(write_run(tmp_path, sft_stage()))
    check_processes(config, 2, 4)
    check_processes(config, 1, 8)
    with pytest.raises(ConfigError, match="batch_rows=4 leaves devices of 2 processes without a row"):
        check_processes(config, 2, 8)


@pytest.mark.parametrize(
    ("name", "hosts"), [("v5e-8", 1), ("v5e-16", 4), ("v6e-256", 64), ("v5p-8", 1), ("v5p-16", 2), ("h100-16", 2)]
)
def test_hosts_of_machines(name: str, hosts: int) -> None:
    assert machine(name).num_hosts == hosts


SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "node[001-004]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
}
BY_HAND = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
TPU = {"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_ID": "0"}


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*SLURM, *BY_HAND, *TPU}:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, join.ProcessLayout(count=1)),
        (BY_HAND, join.ProcessLayout(count=2, index=1, address="host:1234")),
        (SLURM, join.ProcessLayout(count=4)),
        (SLURM | {"SLURM_NTASKS": "1"}, join.ProcessLayout(count=1)),
        (SLURM | {"JAX_NUM_PROCESSES": "1"}, join.ProcessLayout(count=1)),
        (TPU, join.ProcessLayout(count=4)),
        (TPU | {"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "1"}, join.ProcessLayout(count=1)),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, join.ProcessLayout(count=1)),
    ],
)
def test_places(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], found: join.ProcessLayout) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "TPU_WORKER_HOSTNAMES" in environment:
        monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
        monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:1")
        for module in ("cloud_tpu_init", "clusters.cloud_tpu_cluster"):
            monkeypatch.setattr(f"jax._src.{module}.running_in_cloud_tpu_vm", True)
    assert join.process_layout() == found


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1"},
            "set JAX_NUM_PROCESSES, JAX_PROCESS_ID as well, or JAX_NUM_PROCESSES=1",
        ),
        (BY_HAND | {"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2 must be a number from 0 and below JAX_NUM_PROCESSES=2"),
        (SLURM | {"SLURM_NTASKS": "4(x2)"}, "SlurmCluster: cannot tell the number of processes"),
    ],
)
def test_places_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], words: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        join.process_layout()


def test_a_lone_process_does_not_hang() -> None:
    code = (
        "from posttrain import cli; from posttrain.runtime import join\njoin.JOIN_S = 2\n"
        "with join.joined(cli._failure): pass"
    )
    environment = {**os.environ, "JAX_COORDINATOR_ADDRESS": "localhost:1", "JAX_NUM_PROCESSES": "2"}
    environment["JAX_PROCESS_ID"] = "1"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 75 and "error: the run has 2 processes" in done.stderr, done.stderr


def test_only_runs_are_launched() -> None:
    assert "give run with its configuration" in posttrain("launch", "--processes", "2", "plan", "run.yaml").error
