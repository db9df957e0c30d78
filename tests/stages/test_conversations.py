"""Runs with environments and agents: metrics, a resumed run, a replayed step, and configurations that are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from posttrain.environments.conversation import Environments
from posttrain.reward.rubric import Rubric
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.collector import Refill
from posttrain.rl.monitor import Monitor
from posttrain.rollout.engine import NativeEngine
from posttrain.runs.replay import MEASURED, replay
from tests.stages.runs import builds, few_devices, lines, posttrain, rl_stage, weights, write_run

ENV = '''
from posttrain.environments.types import Reply


class Talk:
    """Three turns, with a reward for each that depends on what was said."""

    def __init__(self, answer, seed, word="go"):
        self.answer, self.seed, self.word, self.count = answer, seed, word, 0

    def reply(self, message):
        self.count += 1
        if self.word == "fail" and self.seed % 2:
            raise OSError("the game is over")
        said = sum(map(ord, message["content"]))
        return Reply(
            messages=[{"role": "user", "content": self.word}],
            done=self.count == 3,
            reward=float(said % 5) if self.count != 2 else None,
            metrics={"said": float(len(message["content"]))},
        )


class Mute:
    def __init__(self, answer):
        pass


def needs(question):
    return Talk(question, 0)


def play(base_url, api_key, model, messages):
    import openai

    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        text = client.chat.completions.create(model=model, messages=messages).choices[0].message.content
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "and"}]
        again = client.chat.completions.create(model=model, messages=messages).choices[0].message.content
    return {"reward": float(sum(map(ord, text + again)) % 3), "length": float(len(text))}
'''
TALK: dict[str, Any] = {
    "env": {"fn": "envs_of_test.py:Talk", "timeout_s": 10.0},
    "rewards": [],
    "row_tokens": 48,
    "sampling": {"max_tokens": 6, "stop_token_ids": [*range(0, 260, 3)]},
    "checkpoint_every": 1,
    "num_steps": 3,
}


BY_TURN = {"kind": "grpo", "turn_advantages": True}


def write(folder: Path, **changes: Any) -> Path:
    file = write_run(folder, rl_stage(**{**TALK, **changes}))
    (folder / "envs_of_test.py").write_text(ENV, encoding="utf-8")
    return file


@pytest.mark.thorough
def test_a_run_with_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns and rewards are told; a resumed run ends as one that was never stopped; a step is replayed as logged.
    Nothing is built twice."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    built = builds(monkeypatch, Algorithm, Environments, Monitor, NativeEngine, Refill, Rubric)
    assert posttrain("run", write(whole, algorithm=BY_TURN)).code == 0
    assert len(built) == 11 and set(built.values()) == {1}, built
    told = [line for line in lines(whole / "out") if "grad_norm" in line]
    for line in told:
        assert 1.5 < line["env/turns"] <= 3 and line["env/errors"] == 0 and line["env/said"] > 1
        assert line["reward"] == line["rewards/env/mean"] and line["reward_std"] > 0
        assert line["sampling/logp_difference/mean"] < 1e-4 and line["rollout/late_compilations"] == 0
    for steps in (2, 3):
        assert posttrain("run", write(resumed, algorithm=BY_TURN, num_steps=steps)).code == 0
    assert weights(resumed / "out", "0-rl") == weights(whole / "out", "0-rl")
    with few_devices(1):
        found = replay(whole / "out" / "0-rl", 3)
    for name in (name for name in found.logged if not name.startswith(MEASURED)):
        assert math.isclose(found.metrics[name], found.logged[name], rel_tol=1e-5, abs_tol=1e-6), name


@pytest.mark.thorough
def test_rows_of_turns_and_a_critic(tmp_path: Path) -> None:
    """A row for each turn, rewards at their ends, and values by turn."""
    fields: dict[str, Any] = {
        "env": {**TALK["env"], "split_turns": True, "max_turns": 3},
        "algorithm": {"kind": "ppo", "gae_level": "turn", "kl_coef": 0.05},
        "num_steps": 2,
    }
    file = write(tmp_path, **fields)
    # Each turn is rendered anew, for which plain text has no form.
    assert "env.split_turns: the prompt of each turn" in posttrain("check", file).error
    file = write(tmp_path, **fields, dataset={"path": "chat.jsonl"}, row_tokens=64)
    chat = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": "2"} for n in range(6)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat), encoding="utf-8")
    assert posttrain("run", file).code == 0
    told = [line for line in lines(tmp_path / "out") if "grad_norm" in line]
    assert all(math.isfinite(line["critic/loss"]) and line["env/turns"] > 1.5 for line in told)


@pytest.mark.thorough
def test_samples_whose_environment_fails_are_left_out(tmp_path: Path) -> None:
    file = write(tmp_path, env={**TALK["env"], "args": {"word": "fail"}}, num_steps=2, prompts_per_step=4)
    assert posttrain("run", file).code == 0
    told = [line for line in lines(tmp_path / "out") if "grad_norm" in line]
    assert any(line["env/errors"] > 0 for line in told)
    for line in told:
        assert line["env/errors"] == line["rewards/errors"] == line["rewards/invalid"]


@pytest.mark.thorough
def test_a_run_with_an_agent(tmp_path: Path) -> None:
    chat = [{"prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(6)]
    file = write_run(
        tmp_path,
        rl_stage(
            **{
                **TALK,
                "env": None,
                "agent": {"fn": "envs_of_test.py:play", "timeout_s": 30.0, "max_rows": 1},
                "dataset": {"path": "chat.jsonl"},
                "row_tokens": 64,
                "num_steps": 2,
            }
        ),
    )
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat), encoding="utf-8")
    (tmp_path / "envs_of_test.py").write_text(ENV, encoding="utf-8")
    assert posttrain("run", file).code == 0
    told = [line for line in lines(tmp_path / "out") if "grad_norm" in line]
    assert all(line["env/errors"] == 0 and line["env/rows"] == 1 and line["env/turns"] > 1 for line in told)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": {"fn": "envs_of_test.py:Mute"}}, "env.fn makes a Mute without a method reply(message)"),
        ({"env": {"fn": "envs_of_test.py:needs"}}, "env.fn: no column 'question' in the dataset"),
        (
            {"env": {"fn": "envs_of_test.py:Talk", "args": {"wrod": "x"}}},
            "takes no argument 'wrod'; did you mean 'word'?",
        ),
        ({"env": {"fn": "envs_of_test.py:Tlak"}}, "did you mean 'Talk'?"),
        ({"agent": {"fn": "envs_of_test.py:play"}}, "env and agent: a conversation is held by one of them"),
        (
            {"env": None, "rewards": [{"fn": "rewards_of_test.py:low"}], "algorithm": BY_TURN},
            "has no effect without",
        ),
        (
            {"algorithm": {"kind": "grpo", "gae_level": "turn"}},
            "gae_level: unknown field; a field of 'ppo'",
        ),
        ({"env": None, "agent": {"command": ["no-such-program"]}}, "agent.command: there is no program"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    outcome = posttrain("check", write(tmp_path, **changes))
    assert outcome.code == 2 and message in " ".join((outcome.out + outcome.err).split())
