"""Tiny whole runs: one shape of everything, so that the compilation cache serves all tests."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest
import typer
import yaml

from posttrain import cli
from posttrain.config.yaml_file import load_config
from posttrain.mesh import single_device_mesh
from posttrain.runs.prepare import prepare
from posttrain.stages.context import RoleDevices, StageRun
from posttrain.train.loop import StopRequest
from tests.stages.children import Child

ROOT = Path(__file__).resolve().parents[2]

# Typer builds all commands anew for each call, which takes as long as most mistakes.
typer.main.get_command = functools.cache(typer.main.get_command)

INIT: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
ROWS = [{"prompt": f"{i}+1=", "completion": str(i + 1), "answer": str(i + 1)} for i in range(24)]

REWARDS = '''
def low(completion_tokens, **_):
    """Share of tokens below 128: about a half at random."""
    return [sum(t < 128 for t in c) / len(c) for c in completion_tokens]


def strict(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]


def misnamed(completions, anser):
    return [0.0 for _ in completions]
'''


def sft_stage(**changes: Any) -> dict[str, Any]:
    stage = {
        "kind": "sft",
        "dataset": {"path": "rows.jsonl", "chat": False},
        "num_steps": 4,
        "batch_rows": 4,
        "row_tokens": 16,
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    }
    return {**stage, **changes}


def rl_stage(**changes: Any) -> dict[str, Any]:
    stage = {
        "kind": "rl",
        "dataset": {"path": "rows.jsonl", "chat": False},
        "rewards": [{"fn": "rewards_of_test.py:low"}],
        "num_steps": 4,
        "prompts_per_step": 2,
        "group_size": 4,
        "micro_batch_rows": 4,
        "row_tokens": 16,
        "sampling": {"max_tokens": 6},
        "optimizer": {"learning_rate": 1e-2},
    }
    return {**stage, **changes}


def write_run(folder: Path, *stages: Mapping[str, Any], name: str = "run.yaml", **changes: Any) -> Path:
    """A configuration with its data and rewards in `folder`; the run goes to `folder/out`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "rewards_of_test.py").write_text(REWARDS)
    config = {
        "output": str(folder / "out"),
        "seed": 3,
        "tensorboard": False,
        "mesh": {"data": 1, "fsdp": -1},
        "model": {"init": INIT, "tokenizer": "bytes"},
        "stages": [dict(stage) for stage in stages],
        **changes,
    }
    file = folder / name
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    return file


class Outcome:
    """What a call of the command line did."""

    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err

    @property
    def error(self) -> str:
        """The only line on stderr, of a call that refused its input."""
        assert self.code == 2, (self.code, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), self.err
        return lines[0].removeprefix("error: ")


@contextlib.contextmanager
def few_devices(number: int) -> Iterator[None]:
    """Only the first `number` of the suite's virtual devices; two cores take several times as long for eight."""
    devices = jax.devices()[:number]
    with contextlib.ExitStack() as stack:
        for name, value in (("devices", devices), ("local_devices", devices), ("device_count", number)):
            stack.enter_context(mock.patch.object(jax, name, lambda *_, value=value, **__: value))
        yield


def posttrain(*arguments: str | Path, devices: int = 1) -> Outcome:
    """The command line, in this process. Runs use `devices` of the eight; what belongs to meshes gives 8."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before = sys.argv
    sys.argv = ["posttrain", *map(str, arguments)]
    limit = few_devices(devices) if arguments[0] in ("run", "distill", "replay") else contextlib.nullcontext()
    try:
        with limit, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = before
    return Outcome(code, out.getvalue(), err.getvalue())


def start_environment() -> dict[str, str]:
    """Environment of a process on one device."""
    environment = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    return environment | {"XLA_FLAGS": re.sub(r"(device_count=)\d+", r"\g<1>1", environment["XLA_FLAGS"])}


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """The command line in a process of its own, on one device."""
    command = [sys.executable, "-m", "posttrain", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=start_environment(), cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def fork(*arguments: str | Path) -> Child:
    """The command line in a process of its own, on one device, that begins with everything imported."""
    return Child([*map(str, arguments)], start_environment())


def lines(output: Path, stage: str | None = None) -> list[dict[str, Any]]:
    """Whole lines of `metrics.jsonl`; a running process may be writing the last."""
    file = output / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    read = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in read if stage is None or line["stage"] == stage]


def steps(output: Path, stage: str) -> list[int]:
    """Steps that the metrics of training name, in the order of the file."""
    return [line["step"] for line in lines(output, stage) if "grad_norm" in line]


def check_data_wait(output: Path) -> None:
    """Every step of an offline stage says how long it waited for its batch."""
    found = [line for line in lines(output) if "grad_norm" in line]
    for line in found:
        waited, share = line["timing_s/data"], line["perf/data_wait_share"]
        assert waited > 0 and abs(share - waited / line["step_time"]) < 1e-6 and share <= 1, line
    assert found


def weights(output: Path, stage: str) -> bytes:
    return (output / stage / "model" / "model.safetensors").read_bytes()


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """`folder` as the working directory."""
    with contextlib.chdir(folder):
        yield


def model_of(tmp_path: Path, **model: Any) -> Any:
    """The model of the configuration as a stage loads it."""
    loaded = load_config(write_run(tmp_path, sft_stage()), [f"model.{key}={value}" for key, value in model.items()])
    ready = prepare(loaded, offline_ok=False)
    fields: dict[str, Any] = {
        "name": "0-sft",
        "kind": "sft",
        "sampled": False,
        "folder": tmp_path,
        "output": tmp_path,
        "stop": StopRequest(),
    }
    fields |= {
        "source": None,
        "source_name": None,
        "adapter": None,
        "seed": loaded.seed,
        "mesh": single_device_mesh(),
        "devices": RoleDevices(),
    }
    fields |= {"tensorboard": False, "profile": None}
    return StageRun(model=loaded.model, tokenizer=ready.tokenizer, **fields).load_model()


def builds(monkeypatch: pytest.MonkeyPatch, *classes: type) -> Counter[str]:
    """Numbers of calls, from here on, of the constructor of each class and of its builder `of`, if it has one."""
    counts: Counter[str] = Counter()

    def count(cls: type, make: Callable[..., None]) -> None:
        def counting(self: Any, /, *args: Any, **keywords: Any) -> None:
            counts[cls.__name__] += 1
            make(self, *args, **keywords)

        monkeypatch.setattr(cls, "__init__", counting)

    def count_builder(cls: type, build: Callable[..., Any]) -> None:
        def counting(*args: Any, **keywords: Any) -> Any:
            counts[f"{cls.__name__}.of"] += 1
            return build(*args, **keywords)

        monkeypatch.setattr(cls, "of", staticmethod(counting))

    for cls in classes:
        count(cls, cls.__init__)
        if hasattr(cls, "of"):
            count_builder(cls, cls.of)
    return counts
