"""Environment of tools: every call of a turn gets its answer, in order, and failures are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.chat import Renderer
from posttrain.data.messages import Message
from posttrain.environments.conversation import Environments
from posttrain.environments.tool_env import MAX_CALLS, ToolEnv
from posttrain.environments.types import Reply
from posttrain.errors import ConfigError
from posttrain.rollout.trajectory import Example
from posttrain.rollout.types import SamplingParams
from posttrain.runtime.user_calls import UserCalls
from posttrain.tools.formats import make_format, write_calls
from posttrain.tools.function import FunctionTool
from posttrain.tools.prompts import ToolText
from posttrain.tools.readers import WrittenCall
from tests.environments.helpers import Script, with_template
from tests.often import often


def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


TOOL = FunctionTool(double, timeout_s=20.0, max_chars=100)


def message(*calls: tuple[str, Mapping[str, Any]], malformed: tuple[str, ...] = ()) -> Message:
    made = [
        {"type": "function", "id": f"call0000{i}", "function": {"name": name, "arguments": dict(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made, "malformed_calls": list(malformed)}


def reply(given: Message) -> Reply:
    return asyncio.run(ToolEnv([TOOL]).reply(given))


def test_every_call_is_answered() -> None:
    calls = ("double", {"number": 4}), ("double", {"number": "4"}), ("duble", {})
    made = reply(message(*calls, malformed=("not JSON: {",)))
    assert [(m["tool_call_id"], m["name"], m["content"]) for m in made.messages[:3]] == [
        ("call00000", "double", "8"),
        ("call00001", "double", 'Error: number must be of type integer, got "4"'),
        ("call00002", "duble", "Error: no tool 'duble'; did you mean 'double'?; tools are double"),
    ]
    last = made.messages[3]
    assert (last["role"], last["content"], len(last["tool_call_id"])) == ("tool", "Error: not JSON: {", 9)
    assert not made.done
    assert made.metrics == {"tool_calls": 3, "tool_failures": 2, "malformed_calls": 1}


def test_a_turn_without_calls_is_the_last() -> None:
    made = reply({"role": "assistant", "content": "Eight."})
    assert (made.done, list(made.messages)) == (True, [])


def test_calls_of_a_turn_are_bounded() -> None:
    made = reply(message(*[("double", {"number": 1})] * (MAX_CALLS + 1)))
    assert [m["content"] for m in made.messages[-2:]] == [
        "2",
        f"Error: not called; a turn has at most {MAX_CALLS} calls",
    ]


def test_names_of_tools_are_distinct() -> None:
    with pytest.raises(ConfigError, match="tools: two tools are named double; rename one of them"):
        ToolEnv([TOOL, TOOL])


CONVERSATIONS = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen_coder",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "openai-gpt-oss-120b": "gpt_oss",
    "microsoft-Phi-3.5-mini-instruct": "phi",
    "HuggingFaceTB-SmolLM3-3B": "gemma",
}
"""Format of each template; the last two know no tools."""
BROKEN = {"gemma": "```tool_code\ndouble(\n```", "qwen_coder": "<tool_call>\n<function=double>\n</tool_call>"}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", often(CONVERSATIONS, *list(CONVERSATIONS)[::3]))
def test_conversations_with_tools_over_real_templates(shared: Path, name: str) -> None:
    """A turn with calls, one with a broken call, and an answer, from tokens to tokens.

    Red if special tokens are left out of what is parsed, or if a template gets messages that it refuses.
    """
    kind = CONVERSATIONS[name]
    tokenizer = with_template(shared, name)
    renderer, end = Renderer(tokenizer, True, ToolText(tokenizer, kind)), tokenizer.stop_ids[-1]
    calls = [WrittenCall("double", {"number": 4}), WrittenCall("double", {"number": 5})][
        : 1 if kind == "gpt_oss" else 2
    ]
    written = write_calls(kind, calls)
    broken = BROKEN.get(kind, write_calls(kind, calls[:1]).replace('"number"', '"number').replace('": 4', "4"))
    final = "<|channel|>final<|message|>Eight." if kind == "gpt_oss" else "Eight."
    script = Script([[*tokenizer.encode(text), end] for text in (written, broken, final)])
    asked: list[Message] = [{"role": "user", "content": "Double 4."}]
    tokens = renderer.prompt(asked, [dict(TOOL.schema)])
    environments = Environments(
        make=ToolEnv,
        args={},
        max_turns=4,
        row_tokens=4096,
        split_turns=False,
        unfinished=0.0,
        calls=UserCalls("env.fn", timeout_s=20.0, concurrency=4),
        tool_format=partial(make_format, kind, tokenizer),
        tools=[TOOL],
    )
    params = SamplingParams(max_tokens=512, temperature=1.0, stop_token_ids=tokenizer.stop_ids, key=(0, 0))
    held = environments.converse(
        Example(index=0, row={}, messages=asked, prompt_tokens=tokens, plain=False),
        group=0,
        sample=0,
        seed=0,
        renderer=renderer,
        params_of=lambda _: params,
        generate=script,
    )
    made = asyncio.run(held)
    environments.close()
    assert (made.error, made.stop) == (None, "stop")
    said = made.completion_messages
    first = [call["function"] for call in said[0]["tool_calls"]]
    assert first == [{"name": call.name, "arguments": call.arguments} for call in calls]
    assert [m["content"] for m in said if m["role"] == "tool"][: len(calls)] == ["8", "10"][: len(calls)]
    assert said[-3].get("malformed_calls") and said[-2]["content"] == f"Error: {said[-3]['malformed_calls'][0]}"
    assert (said[-1]["content"], "tool_calls" in said[-1]) == ("Eight.", False)
    assert made.metrics == {"tool_calls": len(calls), "tool_failures": 0.0, "malformed_calls": 1.0}
    read = tokenizer.decode(script.prompts[-1], skip_special_tokens=False)
    assert "double" in tokenizer.decode(tokens), "the prompt names the tools"
    assert said[-2]["content"].split(":")[1].strip() in read, "the model sees what was wrong"
