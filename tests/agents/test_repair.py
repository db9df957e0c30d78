"""The software-engineering environment: an agent's tools, its sandbox, and a reward that edited tests do not move."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from envs.repair import MODULES, Repository, solve, tasks
from posttrain.agents.runner import Agents
from posttrain.agents.server import Sessions
from posttrain.data.chat import Renderer
from posttrain.reward.function import env_rewards
from posttrain.rollout.trajectory import Example
from posttrain.rollout.types import Completion, SamplingParams
from posttrain.runtime.user_calls import UserCalls
from posttrain.tools.formats import make_format
from tests.environments.helpers import completion, with_template


@pytest.mark.thorough
def test_every_bug_fails_its_test_and_every_fix_passes(tmp_path: Path) -> None:
    for name, (source, check, bugs) in MODULES.items():
        test = f"from {name} import {name}\n{check}\n"
        for number, (right, wrong) in enumerate([("", ""), *bugs]):
            folder = tmp_path / f"{name}{number}"
            folder.mkdir()
            assert right in source
            files = {f"{name}.py": source.replace(right, wrong) if right else source, f"test_{name}.py": test}
            assert Repository(folder, files).passes() == (number == 0), (name, wrong)


def test_tools_of_the_repository(tmp_path: Path) -> None:
    (row,) = tasks(count=1, seed=3)
    repository, name = Repository(tmp_path, json.loads(row["files"])), row["module"]
    assert f"{name}.py" in repository.call("list_files", "{}")
    assert "exit code 1" in repository.call("run_tests", "{}") and not repository.passes()
    for path, reason in (("../x", "outside"), (".git/config", "outside"), ("none.py", "No such file")):
        assert reason in repository.call("read_file", json.dumps({"path": path}))
    assert "occurs 0 times" in repository.call("edit_file", json.dumps({"path": f"{name}.py", "old": "zzz", "new": ""}))
    assert "no tool 'rm'" in repository.call("rm", "{}") and "Error" in repository.call("read_file", "{}")
    # Leaving with success is no success, nor is an object that equals everything.
    before = repository.read_file(f"{name}.py")
    for text in ("raise SystemExit(0)\n", "import os; os._exit(0)\n", EQUAL.replace("NAME", name)):
        repository.edit_file(f"{name}.py", repository.read_file(f"{name}.py"), text)
        assert not repository.passes()
    repository.edit_file(f"{name}.py", repository.read_file(f"{name}.py"), before)
    # Tests that are edited do not count.
    test = repository.read_file(f"test_{name}.py")
    repository.edit_file(f"test_{name}.py", test[test.index("assert") :], "pass\n")
    assert "exit code 0" in repository.run_tests() and not repository.passes()
    broken = repository.read_file(f"{name}.py")
    diff = repository.edit_file(f"{name}.py", broken, row["fixed"])
    assert diff.startswith("diff --git") and repository.passes() and repository.edits == 6


EQUAL = "class NAME:\n    __new__ = lambda *a: object.__new__(NAME)\n    __eq__ = __lt__ = lambda *a: True\n"


class Repairer:
    """Engine that writes the calls of somebody who knows the bug, in the format of Qwen."""

    def __init__(self, renderer: Renderer, row: dict[str, Any]):
        name = row["module"]
        broken = json.loads(row["files"])[f"{name}.py"]
        calls: list[tuple[str, dict[str, str]]] = [
            ("read_file", {"path": f"{name}.py"}),
            ("edit_file", {"path": f"{name}.py", "old": broken, "new": row["fixed"]}),
            ("run_tests", {}),
        ]
        self.texts = [f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls]
        self.texts.append("DONE")
        self.renderer, self.asked = renderer, list[list[int]]()

    async def __call__(self, tokens: Sequence[int], params: SamplingParams, images: Any = None) -> Completion:
        self.asked.append(list(tokens))
        text = self.texts[len(self.asked) - 1]
        return completion([*self.renderer.tokenizer.encode(text), self.renderer.tokenizer.stop_ids[0]])


@pytest.mark.thorough
def test_a_repair_through_the_sessions(shared: Path) -> None:
    (row,) = tasks(count=1, seed=8)
    renderer = Renderer(with_template(shared, "Qwen-Qwen2.5-7B-Instruct"), True)
    engine, sessions = Repairer(renderer, row), Sessions()
    agents = Agents(
        run=solve, args={}, sessions=sessions, unfinished=0.0,
        calls=UserCalls("env.fn", timeout_s=60.0, concurrency=4), max_turns=8, max_rows=1,
        row_tokens=4096, split_turns=False,
        forces_calls=False,
        tool_format=lambda tools: make_format("auto", renderer.tokenizer, tools),
    )  # fmt: skip
    example = Example(
        index=0, row=row, messages=row["prompt"], prompt_tokens=renderer.prompt(row["prompt"]), plain=False
    )
    params = SamplingParams(max_tokens=512, temperature=1.0, stop_token_ids=renderer.tokenizer.stop_ids, key=(0, 0))
    made = asyncio.run(
        agents.converse(
            example, group=0, sample=0, seed=0, renderer=renderer, params_of=lambda _: params, generate=engine
        )
    )
    agents.close()
    assert (made.error, env_rewards([made]), made.metrics["edits"]) == (None, [1.0], 1.0)
    assert len(made.turns) == 4 and made.more == [] and made.text == "DONE"
    roles = [message["role"] for message in made.completion_messages]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant", "tool", "assistant"]
    sampled = [token for token, own in zip(made.tokens, made.sampled, strict=True) if own]
    end = renderer.tokenizer.stop_ids[0]
    assert sampled == [token for text in engine.texts for token in [*renderer.tokenizer.encode(text), end]]
    # The prompt of the last turn is the template's rendering of all messages.
    expected = renderer.tokenizer.decode(engine.asked[-1], skip_special_tokens=False)
    assert "run_tests" in expected and expected.count("<tool_response>") == 3
