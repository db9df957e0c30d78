"""Distillation on the student's own samples: through the RL loop, and as a share of the batches of `kind: distill`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.data.tokenizer import load_tokenizer
from posttrain.rollout.engine import NativeEngine
from posttrain.stages.distill import MixedBatches
from posttrain.train.trainer import Trainer
from posttrain.weights.load import init_model
from posttrain.weights.save import save_model
from tests.stages.runs import INIT, lines, rl_stage, weights, write_run
from tests.stages.runs import posttrain as command

HELD_OUT = {"path": "rows.jsonl", "chat": False, "limit": 3}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teachers")
    for seed, name in enumerate(("teacher", "other")):
        fields = {**INIT, "vocab_size": 261, "hidden_size": 32, "initializer_range": 0.5}
        save_model(init_model(fields, dtype=jnp.float32, seed=seed), folder / name, tokenizer=load_tokenizer("bytes"))
    return folder


def taught(folder: Path, **changes: Any) -> dict[str, Any]:
    """Pure on-policy distillation."""
    stage = rl_stage(algorithm="distill", teachers=[{"path": str(folder / "teacher")}], eval_dataset=HELD_OUT)
    del stage["rewards"]
    return {**stage, **changes}


def interrupted(monkeypatch: pytest.MonkeyPatch, file: Path, step: int) -> None:
    """The run, asked to stop in the update of a step."""
    update = Trainer.step

    def stopping(self: Trainer, batch: Any, **options: Any) -> Any:
        if self.step_number + 1 == step:
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, batch, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stopping)
        assert command("run", file).code == 130


@pytest.mark.thorough
def test_without_rewards_interrupted_and_resumed(
    tmp_path: Path, teachers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter; the reverse KL on held-out prompts is in the evaluations and in the summary."""
    model = {"init": INIT, "tokenizer": "bytes", "lora": {"rank": 2}}
    stage = taught(teachers, num_steps=4, eval_every=2, checkpoint_every=2)
    whole, halves = (write_run(tmp_path / name, stage, model=model) for name in ("whole", "halves"))
    done = command("run", whole)
    assert done.code == 0, done.err
    assert "held-out reverse KL" in done.out
    interrupted(monkeypatch, halves, 3)
    assert command("run", halves).code == 0
    assert weights(tmp_path / "whole" / "out", "0-rl") == weights(tmp_path / "halves" / "out", "0-rl")
    for line in lines(tmp_path / "whole" / "out"):
        if "grad_norm" in line:
            assert line["distill/kl"] > 0.1 and "reward" not in line
            gap = np.log(line["distill/teacher_perplexity"] / line["distill/student_perplexity"])
            assert line["distill/kl"] == pytest.approx(gap, rel=1e-3)
        else:
            assert line["eval/distill/kl_low"] < line["eval/distill/kl"] < line["eval/distill/kl_high"]


@pytest.mark.thorough
def test_the_reverse_kl_falls_without_any_reward(tmp_path: Path, teachers: Path) -> None:
    """Pure on-policy distillation through the RL loop: on held-out prompts by no accident."""
    stage = taught(teachers, num_steps=80, group_size=8, prompts_per_step=4, optimizer={"learning_rate": 3e-2})
    for name, first in (("learned", 0), ("held_out", 1)):
        prompts = [{"prompt": f"{number}+1="} for number in range(first, 600, 2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
        stage["dataset" if name == "learned" else "eval_dataset"] = {"path": f"{name}.jsonl", "chat": False}
    file = write_run(tmp_path, stage)
    done = command("run", file)
    assert done.code == 0, done.err
    told = lines(tmp_path / "out")
    before, *steps, after = told
    kl = "eval/distill/kl"
    widths = [(line[f"{kl}_high"] - line[f"{kl}_low"]) / 2 for line in (before, after)]
    assert before[kl] - after[kl] > np.hypot(*widths), (before, after)
    first, last = (np.mean([line["distill/kl"] for line in part]) for part in (steps[:20], steps[-20:]))
    assert last < first - 0.2


@pytest.mark.thorough
def test_rows_with_teachers_of_their_own_beside_rewards(tmp_path: Path, teachers: Path) -> None:
    both = [{"path": str(teachers / name)} for name in ("teacher", "other")]
    stage = rl_stage(teachers=both, teacher_column="who", teacher_coef=0.5, num_steps=2)
    file = write_run(tmp_path, stage)
    assert "no column 'who'" in command("check", file).error
    (tmp_path / "rows_of_test.py").write_text(
        "def rows():\n    return [{'prompt': f'{i}+1=', 'who': ('teacher', 'other')[i % 2]} for i in range(24)]\n"
    )
    done = command("run", file, "stages.0.dataset={path: rows_of_test.py:rows, chat: false}")
    assert done.code == 0, done.err
    assert all(line["distill/kl"] > 0 and 0 < line["reward"] < 1 for line in lines(tmp_path / "out"))


def test_what_teachers_in_reinforcement_learning_need(tmp_path: Path, teachers: Path) -> None:
    cases = {
        "stages.0.algorithm=grpo": "algorithm=grpo needs rewards; without them use algorithm: distill",
        "stages.0.teachers=[]": "set rewards, env or agent, or teachers for on-policy distillation",
        "stages.0.eval_sampling={max_tokens: 4, temperature: 0}": "eval_sampling.temperature=0.0 must be that of",
        f"stages.0.teachers.0.path={tmp_path / 'none'}": "none",
    }
    file = write_run(tmp_path, taught(teachers, group_size=1))
    assert command("check", file).code == 0
    for override, text in cases.items():
        assert text in command("check", file, override).error
    rewarded = write_run(tmp_path, rl_stage(group_size=1))
    assert "group_size=1: rewards are compared within a group" in command("check", rewarded).error
    assert "teacher_coef need teachers" in command("check", write_run(tmp_path, rl_stage(teacher_coef=2))).error


def gkd(folder: Path, **changes: Any) -> dict[str, Any]:
    stage = {
        "kind": "distill",
        "dataset": {"path": "rows.jsonl", "chat": False},
        "eval_dataset": HELD_OUT,
        "teachers": [{"path": str(folder / "teacher")}],
        "beta": 1.0,
        "on_policy": 0.5,
        "sampling": {"max_tokens": 6},
        "num_steps": 6,
        "batch_rows": 4,
        "row_tokens": 16,
        "checkpoint_every": 2,
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    }
    return {**stage, **changes}


@pytest.mark.thorough
def test_some_steps_on_samples_interrupted_and_resumed(
    tmp_path: Path, teachers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same coins, rows and samples, with layers that are learned from; an evaluation has both the held-out rows and
    the student's own samples."""
    stage = gkd(teachers, features={"hidden": {}})
    whole, halves = (write_run(tmp_path / name, stage) for name in ("whole", "halves"))
    assert "50% of the steps on the student's own samples" in command("check", whole).out
    seen: list[bool] = []
    decide = MixedBatches.sampled

    def watched(self: MixedBatches, step: int) -> bool:
        seen.append(decide(self, step))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(MixedBatches, "sampled", watched)
        done = command("run", whole)
    assert done.code == 0, done.err
    assert len(seen) == 6 and len({*seen}) == 2
    interrupted(monkeypatch, halves, 4)
    assert command("run", halves).code == 0
    assert weights(tmp_path / "whole" / "out", "0-distill") == weights(tmp_path / "halves" / "out", "0-distill")
    of_steps = [line for line in lines(tmp_path / "whole" / "out") if "grad_norm" in line]
    for line, sampled in zip(of_steps, seen, strict=True):
        assert min(line["distill/divergence"], line["distill/hidden"]) > 0.01
        told = ("sampling/logp_difference/mean", "completions/mean_length", "rollout/prefix_hit_rate")
        assert {name in line for name in told} == {sampled}
        assert not sampled or (line["sampling/logp_difference/mean"] < 1e-4 and line["sampling/staleness/mean"] == 0)
    before, after = (line for line in lines(tmp_path / "whole" / "out") if "grad_norm" not in line)
    for line in (before, after):
        assert line["eval/distill/kl"] > 0
        assert line["eval/distill/reverse_kl_low"] < line["eval/distill/reverse_kl"]


@pytest.mark.thorough
def test_all_steps_on_samples_need_no_completions(
    tmp_path: Path, teachers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row by its own teacher. Sampled at a temperature that is not the divergence's, and compared at it. What the
    engine counts in evaluations is in no step."""
    forgotten, forget = list[NativeEngine](), NativeEngine.forget_prompts
    monkeypatch.setattr(NativeEngine, "forget_prompts", lambda self: (forgotten.append(self), forget(self)))
    (tmp_path / "rows_of_test.py").write_text(
        "def rows():\n    return [{'prompt': f'{i}+1=', 'who': ('teacher', 'other')[i % 2]} for i in range(24)]\n"
    )
    both = [{"path": str(teachers / name)} for name in ("teacher", "other")]
    rows = {"path": "rows_of_test.py:rows", "chat": False}
    stage = gkd(teachers, on_policy=1.0, num_steps=2, teachers=both, teacher_column="who", dataset=rows)
    stage |= {"sampling": {"max_tokens": 6, "temperature": 0.5}, "rollout": {"speculative": {"kind": "ngram"}}}
    done = command("run", write_run(tmp_path, {**stage, "eval_dataset": {**rows, "limit": 3}}))
    assert done.code == 0, done.err
    told = lines(tmp_path / "out")
    assert sum("eval/distill/reverse_kl" in line for line in told) == 2
    assert [line["sampling/logp_difference/mean"] < 1e-4 for line in told if "grad_norm" in line] == [True] * 2
    assert sum("rollout/speculative/share" in line for line in told) == 2 == len(forgotten)


def test_what_samples_need(tmp_path: Path, teachers: Path) -> None:
    cases = {
        "stages.0.sampling=null": "on_policy=0.5 needs sampling",
        "stages.0.on_policy=0": "sampling and rollout need on_policy",
        "stages.0.cache=said": "cache: it holds the teachers' top-k on the dataset",
        "stages.0.mix=[{path: rows.jsonl}]": "mix: prompts are sampled from one dataset",
        "stages.0.sampling.max_tokens=16": "sampling.max_tokens=16 must be less than row_tokens=16",
        "stages.0.rollout.engine=engine_of_test.py:Less": "Less has no method close",
        "stages.0.rollout={engine: 'engine_of_test.py:Less', slots: 2}": "slots: supported by the built-in engine",
    }
    file = write_run(tmp_path, gkd(teachers))
    (tmp_path / "engine_of_test.py").write_text(
        "class Less:\n    async def generate(self): ...\n    def update_weights(self): ...\n"
    )
    for override, text in cases.items():
        assert text in command("check", file, override).error, override


ENGINE = """
from posttrain.rollout.engine import NativeEngine

class Engine:
    versions = []

    def __init__(self, model, tokenizer, section):
        fixed = {"slots": 2, "max_length": 16, "decode_steps": 4, "version": 0}
        self.inner = NativeEngine(model, tokenizer_decode=tokenizer.decode, **fixed)

    async def generate(self, prompt, params):
        return await self.inner.generate(prompt, params)

    def update_weights(self, model, version):
        self.versions.append(version)
        self.inner.update_weights(model, version)

    def close(self):
        self.inner.close()
"""


@pytest.mark.thorough
def test_a_sampler_that_is_not_the_student_ends_the_run(tmp_path: Path, teachers: Path) -> None:
    """One that samples at another temperature than it is asked to."""
    stage = gkd(teachers, on_policy=1.0, eval_dataset=None, num_steps=2, rollout={"engine": "engine_of_test.py:Engine"})
    file = write_run(tmp_path, stage, model={"init": {**INIT, "initializer_range": 0.5}, "tokenizer": "bytes"})
    other = ENGINE.replace("generate(prompt, params)", "generate(prompt, dataclasses.replace(params, temperature=9.0))")
    assert other != ENGINE
    (tmp_path / "engine_of_test.py").write_text("import dataclasses\n" + other)
    done = command("run", file)
    assert done.code == 1 and "error: step 1: sampler and trainer disagree by" in done.err


@pytest.mark.thorough
def test_an_engine_of_ones_own(tmp_path: Path) -> None:
    """Samples do not depend on the engine: the run is the one with the built-in engine."""
    rewards = []
    for name, rollout in {"own": {"engine": "engine_of_test.py:Engine"}, "native": {}}.items():
        file = write_run(tmp_path / name, rl_stage(num_steps=2, rollout=rollout))
        (tmp_path / name / "engine_of_test.py").write_text(ENGINE)
        done = command("run", file)
        assert done.code == 0, done.err
        rewards.append([line["reward"] for line in lines(tmp_path / name / "out")])
    assert rewards[0] == rewards[1] and len(rewards[0]) == 2
