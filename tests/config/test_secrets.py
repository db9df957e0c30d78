"""Secrets: refused in every section with arguments, and taken from the environment when a function is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from posttrain.config.environment import AgentSection, EnvSection, McpSection, ToolSection
from posttrain.config.locator import Locator
from posttrain.config.reward import RewardSection
from posttrain.config.secrets import with_secrets
from posttrain.config.train import DatasetSection
from posttrain.data.sources import load_rows
from posttrain.errors import ConfigError
from posttrain.reward.function import rewards_of
from posttrain.reward.rubric import Rubric
from posttrain.runtime.event_loop import run_async
from posttrain.tools.function import FunctionTool
from tests.rl.helpers import trajectory
from tests.tiny import tiny_model

KEY = "sk-1234"


def judge(completions: list[str], api_key: str, **_: Any) -> list[float]:
    return [float(api_key == KEY)] * len(completions)


def look(word: str, api_key: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return f"{word} {api_key}"


SECTIONS = [
    lambda args: RewardSection(fn=judge, args=args),
    lambda args: EnvSection(fn=judge, args=args),
    lambda args: AgentSection(fn=judge, args=args),
    lambda args: ToolSection(fn=look, args=args),
    lambda args: DatasetSection(path=Locator("rows.py:rows"), args=args),
]


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("args", "place"),
    [
        ({"api_key": KEY}, "api_key"),
        ({"judgeToken": KEY}, "judgeToken"),
        ({"client": {"headers": {"X-Api-Key": KEY}}}, "client.headers.X-Api-Key"),
        ({"clients": [{"password": KEY}]}, r"clients\[0\].password"),
        ({"api_keys": [KEY]}, "api_keys"),
    ],
)
def test_a_secret_among_arguments_is_refused(section: Any, args: dict[str, Any], place: str) -> None:
    name = place.rpartition(".")[2]
    with pytest.raises(
        ConfigError, match=f"{place}: config.yaml and trackers would show .*{name}_env: VARIABLE"
    ) as said:
        section(args)
    assert KEY not in str(said.value)


@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_no_secret_is_taken(section: Any) -> None:
    args = {"max_tokens": 7, "monkey": "x", "api_key": None, "token": 3, "api_key_env": "JUDGE_KEY", "path_env": "x y"}
    assert section({key: value for key, value in args.items() if key != "api_key"}).args["api_key_env"] == "JUDGE_KEY"
    with pytest.raises(ConfigError, match="api_key_env gives the argument that api_key gives; remove one"):
        section(args)
    with pytest.raises(ConfigError, match="api_key_env must be the name of an environment variable"):
        section({"api_key_env": "sk-1234"})


@pytest.mark.parametrize("command", [("serve", f"--api-key={KEY}"), ("serve", "--token", KEY), ("env", f"A_KEY={KEY}")])
def test_a_secret_in_a_command_is_refused(command: tuple[str, ...]) -> None:
    for section in (McpSection, AgentSection):
        with pytest.raises(ConfigError, match="the list of processes would show this secret") as said:
            section(command=command)
        assert KEY not in str(said.value)
        section(command=("serve", "--max-tokens", "7", "--token", "--port=1", "key"))


def test_values_come_from_the_environment_at_the_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    given = {"api_key_env": "JUDGE_KEY", "deeper": [{"db_password_env": "JUDGE_KEY"}], "home_env": "HOME"}
    assert with_secrets(given) == {"api_key": KEY, "deeper": [{"db_password": KEY}], "home_env": "HOME"}
    args = {"api_key_env": "JUDGE_KEY"}
    tool = FunctionTool.of(ToolSection(fn=look, args=args))
    assert "api_key" not in json.dumps(tool.schema) and run_async(tool({"word": "a"})) == f"a {KEY}"
    (tmp_path / "rows.py").write_text("def rows(api_key):\n    return [{'prompt': api_key}]\n")
    section = DatasetSection(path=Locator(f"{tmp_path}/rows.py:rows"), args=args)
    assert load_rows(section)[0]["prompt"] == KEY
    (reward,) = rewards_of([RewardSection(fn=judge, args=args)])
    assert KEY not in repr(reward)
    rewards = pt.rl.score(Rubric([reward]), [[trajectory(tokens=range(3))]])
    assert rewards.total_PG.tolist() == [[1.0]]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="args.api_key_env=JUDGE_KEY: no such environment variable is set"):
        rewards_of([RewardSection(fn=judge, args=args)])


def test_no_file_of_a_run_holds_the_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run with a judge in a child process; its folder also has the versions that made it."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    code = "def judge(completions, api_key, **_):\n    return [float(len(text) % 2) for text in completions]\n"
    (tmp_path / "judge.py").write_text(code)
    pt.save_model(tiny_model(vocab_size=261), str(tmp_path / "model"), tokenizer=pt.load_tokenizer("bytes"))
    pt.RL(
        model=str(tmp_path / "model"),
        dataset=[{"prompt": f"{n}+1="} for n in range(4)],
        chat=False,
        num_steps=1,
        prompts_per_step=2,
        row_tokens=16,
        rewards=[{"fn": f"{tmp_path}/judge.py:judge", "args": {"api_key_env": "JUDGE_KEY"}}],
        sampling={"max_tokens": 4},
        output=str(tmp_path / "run"),
    ).fit()
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(files) > 5 and not [file for file in files if KEY.encode() in file.read_bytes()]
    assert "api_key_env: JUDGE_KEY" in (tmp_path / "run" / "config.yaml").read_text()
    (versions,) = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert versions["posttrain"] == pt.__version__ and {"python", "platform", "jax", "flax", "optax"} <= versions.keys()
