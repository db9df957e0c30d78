"""Tools of RL stages: from the configuration to the prompts and conversations of a run."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.api import _stage
from posttrain.config.yaml_file import load_config
from posttrain.environments.conversation import Environments
from posttrain.environments.tool_env import ToolEnv
from posttrain.errors import ConfigError
from posttrain.runs.prepare import prepare
from posttrain.stages.prompts import RLInputs
from posttrain.tools.types import FailedCall
from tests.stages.runs import ROOT, rl_stage, write_run

TOOLS = '''
from pathlib import Path

from posttrain.environments.tool_env import ToolEnv


def add(first: int, second: int, table: Path, bias: int = 0) -> int:
    """Add two numbers.

    Args:
        first: One number.
        second: The other.
    """
    return first + second + bias + len(table.read_text())


def silent(first: int) -> int:
    return first


class Own(ToolEnv):
    def __init__(self, tools, answer):
        super().__init__(tools)
        self.answer = answer


class Without:
    def reply(self, message):
        raise NotImplementedError
'''
ADD = {"fn": "tools_of_test.py:add", "args": {"table": "table.txt", "bias": 100}, "timeout_s": 5.0, "max_chars": 2}
MCP = {"mcp": {"command": [sys.executable, str(ROOT / "tests/tools/server.py")], "env_from": {"FOOD": "FOOD_OF_TEST"}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path)
    (tmp_path / "tools_of_test.py").write_text(TOOLS)
    (tmp_path / "table.txt").write_text("ten chars.")
    return tmp_path


def inputs(folder: Path, **changes: Any) -> RLInputs:
    stage = rl_stage(
        dataset={"path": "rows.jsonl"}, tools=[ADD], tool_format="hermes", row_tokens=2048, sampling={"max_tokens": 32}
    )
    init = yaml.safe_load((folder / "run.yaml").read_text())["model"]["init"] | {"max_position_embeddings": 2048}
    file = write_run(folder, stage | changes, model={"init": init, "tokenizer": "bytes"})
    (made,) = prepare(load_config(file, []), offline_ok=False).stages
    assert isinstance(made, RLInputs)
    return made


def environments(made: RLInputs) -> Environments:
    assert isinstance(made.conversations, Environments)
    return made.conversations


def test_a_function_is_a_tool_with_arguments_that_the_policy_does_not_see(folder: Path) -> None:
    made = inputs(folder, env={"max_turns": 3})
    found = environments(made)
    (tool,) = found.tools
    assert found.make is ToolEnv and found.max_turns == 3
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["first", "second"]
    assert asyncio.run(tool({"first": 1, "second": 2})) == "11\n[cut: 2 of 3 characters]", "1 + 2 + 100 + 10"
    assert isinstance(asyncio.run(tool({"first": 1, "second": 2, "bias": 3})), FailedCall)
    prompt = made.renderer.tokenizer.decode(made.examples[0].prompt_tokens)
    assert '"name": "add"' in prompt and "<tool_call>" in prompt, "the byte tokenizer's template knows no tools"


@pytest.mark.thorough
def test_tools_of_a_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp", reason="needs the extra mcp")
    monkeypatch.setenv("FOOD_OF_TEST", "kale")
    made = environments(inputs(folder, tools=[ADD, MCP]))
    tools = {tool.name: tool for tool in made.tools}
    assert set(tools) == {"add", "echo", "process", "fail", "crash", "hang"}
    assert asyncio.run(tools["echo"]({"text": "a"})) == "a", "the server starts again after the check"
    made.close()


def test_an_environment_of_the_user_is_given_the_tools(folder: Path) -> None:
    made = environments(inputs(folder, env={"fn": "tools_of_test.py:Own", "weight": 0.5}))
    env = made.make(**made.given({"answer": "3", "tools": "a column"}, 0))
    assert (env.answer, env.tools) == ("3", made.tools)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tools": [{"fn": "tools_of_test.py:silent"}]}, "tools: silent has no schema: "),
        ({"tools": [{"fn": "tools_of_test.py:ad"}]}, "tools_of_test.py has no 'ad'; did you mean 'add'?"),
        ({"tools": [ADD, ADD]}, "tools: two tools are named add"),
        (
            {"tools": [{**ADD, "args": {"tabel": "x"}}]},
            "tools.args: add takes no argument 'tabel'; did you mean 'table'?",
        ),
        ({"tools": [{**ADD, "args": {"table": "no.txt"}}]}, "no.txt: no such file or folder"),
        ({"tools": [{}]}, "a tool is a function (fn) or an MCP server (mcp)"),
        ({"tools": [{**MCP, "args": {"a": 1}}]}, "args are for functions"),
        (
            {"tools": [{"mcp": {"command": ["x"], "env": {"SEARCH_API_KEY": "s"}}}]},
            "give env_from: {SEARCH_API_KEY: SEA",
        ),
        (
            {"tools": [{"mcp": {"command": ["x"], "env_from": {"A": "NOT_SET"}}}]},
            "no environment variable NOT_SET is set",
        ),
        ({"tools": [{"mcp": {"command": ["no_such_program"]}}]}, "the MCP server `no_such_program` does not start"),
        ({"tools": [{**ADD, "timeout_s": 30.0}]}, "env.timeout_s=30 must be above the deadline of a tool's call, 30"),
        ({"env": {"fn": "tools_of_test.py:Without"}}, "tools: env.fn takes no argument 'tools'"),
        ({"env": {"weight": 2.0}}, "env.args and env.weight have no effect without env.fn"),
        ({"rewards": []}, "tools have no rewards of their own; set rewards, or env.fn"),
        ({"tools": [], "env": {}}, "env needs a maker of environments (fn), or tools beside it"),
        ({"tools": []}, "tool_format=hermes has no effect without tools, env or agent"),
        ({"tool_format": "auto"}, "tool_format=auto: the chat template of bytes has no known form"),
        ({"tool_format": "hermis"}, "tool_format=hermis: no such format; did you mean 'hermes'?"),
        (
            {"dataset": {"path": "rows.jsonl", "chat": False}},
            "tools: there is no place for them without a chat template",
        ),
        ({"agent": {"fn": "tools_of_test.py:add"}}, "tools and agent: an agent has tools of its own"),
    ],
)
def test_what_is_refused(folder: Path, changes: dict[str, Any], reason: str) -> None:
    if "mcp" in str(changes):
        pytest.importorskip("mcp", reason="needs the extra mcp")
    with pytest.raises(ConfigError) as error:
        inputs(folder, **changes)
    assert reason in str(error.value)


def test_functions_in_python() -> None:
    def add(first: int) -> int:
        """Add."""
        return first

    assert _stage({"tools": [add, {"fn": add, "timeout_s": 1.0}]})["tools"] == [
        {"fn": add},
        {"fn": add, "timeout_s": 1.0},
    ]
    assert _stage({"tools": add})["tools"] == [{"fn": add}]
