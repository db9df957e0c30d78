"""Tools of RL stages: Python functions and MCP servers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from posttrain.config.base import Arguments, ListOf, PositiveInt, Section, Text
from posttrain.config.environment import AgentSection, EnvSection
from posttrain.config.locator import located

SECRET = re.compile(r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")
"""Ends of names of variables that hold secrets."""


class McpSection(Section):
    """Server of the Model Context Protocol that runs as a child process (stdio); needs `pip install posttrain[mcp]`."""

    command: Annotated[ListOf[Text], Field(min_length=1)]
    """Program and arguments. It starts in the current folder, again after a crash, and ends with the stage."""
    env: dict[str, str] = {}
    """Environment variables beside HOME, PATH and the like; others are not passed on. They are written to `config.yaml`
    and to trackers."""
    env_from: dict[str, Text] = {}
    """Environment variables with the names of those of the run from which they get their values, which are written
    nowhere: `{API_KEY: SEARCH_API_KEY}`."""

    @model_validator(mode="after")
    def _no_secrets(self) -> McpSection:
        if both := self.env.keys() & self.env_from.keys():
            raise ValueError(f"{min(both)} is in env and in env_from; remove one of them")
        if secrets := [name for name in self.env if SECRET.search(name.upper())]:
            raise ValueError(
                f"env.{secrets[0]}: config.yaml and trackers would show this secret; set it in the run's environment, "
                f"and give env_from: {{{secrets[0]}: {secrets[0]}}}"
            )
        return self


class ToolSection(Section):
    """Tool that the policy can call: a function, or all tools of an MCP server."""

    fn: Annotated[Any, AfterValidator(located)] = None
    """Function: `envs/food.py:lookup_nutrition`, `package.module:function`, or in Python the function itself. Its
    schema is made of its types and its docstring, with a line for each parameter under `Args:`."""
    args: Arguments = {}
    """Keyword arguments of `fn` that the policy does not see and cannot set."""
    mcp: McpSection | None = None
    """Server in place of `fn`."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Deadline in seconds of each call, after which the policy is told so."""
    max_chars: PositiveInt = 4000
    """Maximum length of a result in characters; longer ones are cut, and say so."""

    @model_validator(mode="after")
    def _one(self) -> ToolSection:
        if (self.fn is None) == (self.mcp is None):
            raise ValueError("a tool is a function (fn) or an MCP server (mcp); set one of them")
        if self.mcp is not None and self.args:
            raise ValueError("args are for functions; put settings of an MCP server into its command or env")
        return self


def check_tools(
    tools: Sequence[ToolSection],
    tool_format: str,
    env: EnvSection | None,
    agent: AgentSection | None,
    *,
    rewards: bool,
) -> None:
    """Check tools with the environment of their stage. ValueError for fields without effect or that are missing."""
    if agent is not None and tools:
        raise ValueError("tools and agent: an agent has tools of its own; remove one of the two")
    if env is None:
        if tool_format != "auto" and agent is None:
            raise ValueError(f"tool_format={tool_format} has no effect without tools, env or agent")
        return
    if env.fn is None and not tools:
        raise ValueError("env needs a maker of environments (fn), or tools beside it")
    if env.fn is None and not rewards:
        raise ValueError("tools have no rewards of their own; set rewards, or env.fn")
    if env.fn is None and (env.args or env.weight != 1.0):
        raise ValueError("env.args and env.weight have no effect without env.fn; remove them")
    late = max((tool.timeout_s for tool in tools), default=0.0)
    if env.fn is None and late >= env.timeout_s:
        raise ValueError(
            f"env.timeout_s={env.timeout_s:g} must be above the deadline of a tool's call, {late:g}; raise it to "
            f"{2 * late:g}, or lower timeout_s of the tool"
        )


def with_env(data: Any) -> Any:
    """Fields of a stage with the default environment, if it has tools and no environment."""
    others = ("env", "agent")
    given = isinstance(data, dict) and data.get("tools") and all(data.get(name) is None for name in others)
    return {**data, "env": {}} if given else data
