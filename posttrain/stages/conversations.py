"""Environments, agents and tools of RL stages, made from the configuration and tried once before a run."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.agents.endpoint import Endpoint, check_installed
from posttrain.agents.runner import GIVEN, Agents
from posttrain.config import AgentSection, DatasetSection, EnvSection, Locator, OnlineSection, RLSection, ToolSection
from posttrain.config.locator import callable_of
from posttrain.data.chat import Renderer
from posttrain.data.messages import Message
from posttrain.data.sources import Rows, with_paths
from posttrain.data.tokenizer import Tokenizer
from posttrain.data.turns import ReplyRole, check_turns
from posttrain.environments.conversation import Environments, accepted_keywords
from posttrain.environments.tool_env import ToolEnv, by_name
from posttrain.environments.types import Conversations, Env
from posttrain.errors import ConfigError, did_you_mean
from posttrain.rollout.trajectory import Example
from posttrain.runtime.event_loop import run_async
from posttrain.runtime.user_calls import UserCalls
from posttrain.stages.inputs import rows_and_renderer
from posttrain.tools.formats import make_format
from posttrain.tools.function import FunctionTool
from posttrain.tools.mcp_server import McpServer
from posttrain.tools.prompts import ToolText
from posttrain.tools.types import FormatMaker, Tool
from posttrain.user_code import describe_error

MAX_SHAPES = 8
"""Maximum number of sequences of roles among the prompts that the chat template is checked on."""


def conversations_of(
    section: RLSection, prompts: Sequence[tuple[Renderer, Sequence[Example]]], tools: Sequence[Tool]
) -> Conversations | None:
    """Environments or agents of a stage, checked on its prompts; None without."""
    tool_format = format_maker(section, prompts[0][0].tokenizer)
    if section.env is not None:
        environments = _environments(section, section.env, tools, tool_format)
        for renderer, examples in prompts:
            check_env(environments, renderer, examples, section.env)
        return environments
    if section.agent is not None:
        agents = _agents(section, section.agent, tool_format)
        for renderer, examples in prompts:
            _check_agent(agents, renderer, examples, section.agent)
        return agents
    return None


def _environments(section: RLSection, env: EnvSection, tools: Sequence[Tool], tool_format: FormatMaker) -> Environments:
    return Environments(
        make=ToolEnv if env.fn is None else _function(env.fn, "env.fn"),
        args=env.args,
        max_turns=env.max_turns,
        row_tokens=section.sequence_tokens,
        split_turns=env.split_turns,
        unfinished=None if env.unfinished == "drop" else env.unfinished,
        calls=UserCalls("env.fn", timeout_s=env.timeout_s, concurrency=env.concurrency),
        tool_format=tool_format,
        tools=tools,
    )


def _agents(section: RLSection, agent: AgentSection, tool_format: FormatMaker) -> Agents:
    return Agents(
        run=_function(agent.fn, "agent.fn") if agent.fn is not None else _command(agent.command),
        args=agent.args,
        endpoint=Endpoint(),
        unfinished=None if agent.unfinished == "drop" else agent.unfinished,
        calls=UserCalls("agent", timeout_s=agent.timeout_s, concurrency=agent.concurrency),
        max_turns=agent.max_turns,
        max_rows=agent.max_rows,
        row_tokens=section.sequence_tokens,
        split_turns=agent.split_turns,
        tool_format=tool_format,
    )


def _function(given: Any, field: str) -> Callable[..., Any]:
    """Import a function or class of the user."""
    made = callable_of(given, field) if isinstance(given, Locator) else given
    if not callable(made):
        raise ConfigError(f"{field}={given!r} is not a class or function; set file.py:name")
    return made


def _command(command: Sequence[str]) -> Sequence[str]:
    if shutil.which(command[0]) is None:
        raise ConfigError(f"agent.command: there is no program {command[0]!r}")
    return tuple(command)


def _check_agent(agents: Agents, renderer: Renderer, examples: Sequence[Example], section: AgentSection) -> None:
    """ConfigError for columns that are missing, and for a template that changes earlier turns."""
    check_installed()
    if callable(agents.run):
        _check_keywords(agents.run, agents.args, list(examples[0].row), GIVEN, "agent")
    if not agents.split_turns:
        check_turns(renderer, _shapes(examples), ("user",), tools=None, keep_thinking=section.keep_thinking)


def check_env(environments: Environments, renderer: Renderer, examples: Sequence[Example], section: EnvSection) -> None:
    """Make an environment of the first row, and check that the chat template allows conversations with it.

    ConfigError for columns that are missing, an environment that cannot be made, and a template that changes earlier
    turns.
    """
    provided = ("seed", "row", "tools") if environments.tools else ("seed", "row")
    _check_keywords(environments.make, environments.args, list(examples[0].row), provided, "env")
    if environments.tools and environments.names is not None and "tools" not in environments.names:
        raise ConfigError("tools: env.fn takes no argument 'tools', so they have no effect; add it, or remove tools")
    env, prompt = run_async(_tried(environments, examples[0]))
    tools = [dict(tool.schema) for tool in getattr(env, "tools", ())] or None
    if tools:
        if not renderer.chat:
            raise ConfigError("tools need messages, but dataset.chat is off; give the prompts as messages")
        assert environments.tool_format is not None
        environments.tool_format(tools)
    given: tuple[ReplyRole, ...] | None = getattr(env, "reply_roles", None)
    roles: tuple[ReplyRole, ...] = given or (("tool",) if tools else ("user",))
    prompts = [prompt] if prompt is not None else _shapes(examples)
    if not environments.split_turns:
        check_turns(renderer, prompts, roles, tools=tools, keep_thinking=section.keep_thinking)


def _check_keywords(
    function: Callable[..., Any], args: Mapping[str, Any], columns: Sequence[str], given: Sequence[str], field: str
) -> None:
    """ConfigError for a keyword that nothing provides, and for one of `args` that the function does not take."""
    known = [*columns, *args, *given]
    parameters = inspect.signature(function).parameters
    for name, p in parameters.items():
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty and name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(f"{field}.fn: no column {name!r} in the dataset ({', '.join(columns)}){near}")
    names = accepted_keywords(function)
    for name in args:
        if names is not None and name not in names:
            raise ConfigError(
                f"{field}.args: {field}.fn takes no argument {name!r}{did_you_mean(name, list(parameters))}"
            )


async def _tried(environments: Environments, example: Example) -> tuple[Env, Sequence[Message] | None]:
    """Environment of an example, and its own prompt where it has one."""
    calls, at = environments.calls, "env.fn"
    try:
        env = await calls.call(environments.make, **environments.given(example.row, 0))
        if not isinstance(env, Env):
            raise ConfigError(f"env.fn makes a {type(env).__name__} without a method reply(message)")
        at = "env.start"
        prompt = await calls.call(env.start) if hasattr(env, "start") else None
        if hasattr(env, "close"):
            at = "env.close"
            await calls.call(env.close)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{at}: failed on the first row: {describe_error(error)}") from error
    return env, prompt


def _shapes(examples: Sequence[Example]) -> list[Sequence[Message]]:
    """One prompt for each sequence of roles."""
    found: dict[tuple[str, ...], Sequence[Message]] = {}
    for example in examples:
        if len(found) < MAX_SHAPES:
            found.setdefault(tuple(message["role"] for message in example.messages), example.messages)
    return list(found.values())


def tools_of(section: RLSection, *, servers: bool) -> list[Tool]:
    """Make the tools of a stage; `servers`: with those of MCP servers, which start to list them and end again.

    ConfigError for functions that cannot be tools, servers that do not start, and two tools of one name.
    """
    found = [tool for item in section.tools if servers or item.mcp is None for tool in _tools(item)]
    by_name(found)
    return found


def tools_and_schemas(section: OnlineSection) -> tuple[list[Tool], list[dict[str, Any]] | None]:
    """Tools of a stage, and the schemas that the prompts of all rows describe; None where each environment has tools of
    its own."""
    if not isinstance(section, RLSection):
        return [], None
    tools = tools_of(section, servers=True)
    answered = section.env is not None and section.env.fn is None
    return tools, [dict(tool.schema) for tool in tools] if answered else None


def format_maker(section: RLSection, tokenizer: Tokenizer) -> FormatMaker:
    """Maker of the format of tool calls of a stage."""
    return partial(make_format, section.tool_format, tokenizer)


def rows_with_tools(section: OnlineSection, dataset: DatasetSection, tokenizer: Tokenizer) -> tuple[Rows, Renderer]:
    """Rows and renderer of a dataset; it describes the tools of conversations where the chat template does not."""
    rows, renderer = rows_and_renderer(dataset, tokenizer)
    if isinstance(section, RLSection) and section.converses and renderer.chat:
        renderer = Renderer(tokenizer, True, ToolText(tokenizer, section.tool_format), rows.remarks)
    return rows, renderer


def _tools(item: ToolSection) -> Sequence[Tool]:
    if item.mcp is None:
        function = callable_of(item.fn, "tools.fn") if isinstance(item.fn, Locator) else item.fn
        if not callable(function):
            raise ConfigError(f"tools.fn={item.fn!r} is not a function; set file.py:function")
        at = item.fn if isinstance(item.fn, Locator) else Locator("tools")
        args = with_paths(function, at, item.args)
        return [FunctionTool(function, timeout_s=item.timeout_s, max_chars=item.max_chars, args=args)]
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError("tools.mcp needs the package mcp; run: pip install 'posttrain[mcp]'")
    given = item.mcp
    if unset := [name for name in given.env_from.values() if name not in os.environ]:
        raise ConfigError(f"tools.mcp.env_from: no environment variable {unset[0]} is set; set it where the run starts")
    env = given.env | {name: os.environ[source] for name, source in given.env_from.items()}
    server = McpServer(given.command, env, Path.cwd(), timeout_s=item.timeout_s, max_chars=item.max_chars)
    try:
        return server.tools()
    finally:
        server.close()
