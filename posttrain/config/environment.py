"""Environments, agents and tools: who answers the model within a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from posttrain.config.base import Flag, FunctionArguments, ListOf, PositiveInt, Section, Text
from posttrain.config.locator import located
from posttrain.config.secrets import SHOWN, names_secret, secret_in_command

SHOWN_COMMAND = "config.yaml, trackers and the list of processes would show this secret"


class EnvSection(Section):
    """Environment: conversations of several turns, one object for each sample."""

    fn: Annotated[Any, AfterValidator(located)] = None
    """Maker of environments: `envs/guess.py:Guess`, `package.module:make`, or in Python the class or function itself.
    It is called with the keywords that it names: dataset columns, `row`, `args`, `tools` and `seed`, an integer that is
    the same for all samples of a group. By default, with `tools`, the environment that answers their calls, until a
    turn has none."""
    args: FunctionArguments = {}
    """Additional keyword arguments of `fn`. A secret is `NAME_env: VARIABLE`: `{api_key_env: JUDGE_KEY}` is the
    argument `api_key` with the value of that environment variable, which is written nowhere."""
    max_turns: PositiveInt = 8
    """Maximum number of turns of the policy."""
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Deadline in seconds of each call of the environment. A sample whose environment fails or exceeds it ends there
    and has no reward, see `on_error`."""
    concurrency: PositiveInt = 64
    """Maximum number of concurrent calls."""
    weight: float = 1.0
    """Weight of the reward `env`, the sum of the rewards of a sample's turns, beside `rewards`."""
    on_error: Literal["drop"] | float = "drop"
    """Value of the reward `env` of samples whose environment fails. `drop`: the sample has no reward and is excluded
    from its group."""
    unfinished: Literal["drop"] | float = 0.0
    """Reward of a conversation that ends before the environment is done, added to those that its turns have: a turn cut
    at `sampling.max_tokens`, `max_turns`, or `row_tokens`. `drop`: it has no reward `env`, and without other rewards is
    excluded from its group."""
    keep_thinking: Flag = False
    """Keep the thinking of earlier turns in the conversation where the chat template drops it."""
    split_turns: Flag = False
    """One training row for each turn, whose prompt is the template's rendering of all messages before, for templates
    that change earlier turns. By default a conversation is one row. Weights and returns of a sample are the same."""


class AgentSection(Section):
    """Agent with a loop of its own, run once for each sample, which talks to the policy through an OpenAI-compatible
    endpoint on this machine."""

    fn: Annotated[Any, AfterValidator(located)] = None
    """Function `agents/mine.py:play`, or in Python the function itself, sync or async. It is called with the keywords
    that it names: `base_url`, `api_key`, `model`, `messages` (the row's prompt), dataset columns, `row`, `args` and
    `seed`, an integer that is the same for all samples of a group. It returns the reward, None, or a mapping with
    `reward` and metrics."""
    command: ListOf[Text] = ()
    """Command in place of `fn`, run in a child process: `[python, agent.py]`. It finds `OPENAI_BASE_URL`,
    `OPENAI_API_KEY`, and the keywords as JSON in the file `POSTTRAIN_ROW_FILE`, and in `POSTTRAIN_ROW` up to 100 KiB;
    the reward is in the last line that it prints, such as `{"reward": 1}`."""
    args: FunctionArguments = {}
    """Additional keywords. `NAME_env: VARIABLE` gives the keyword `NAME`, a secret, from the environment; a command
    finds the variable in its own."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Deadline of a sample in seconds, after which a command is killed and the sample has no reward, see `on_error`."""
    concurrency: PositiveInt = 64
    """Maximum number of agents that run at once."""
    max_turns: PositiveInt = 16
    """Maximum number of requests of a sample."""
    max_rows: PositiveInt | None = None
    """Maximum number of histories of a sample, each a training row of its own: a request that goes on from an earlier
    turn than the last, or from none, begins another. By default as many as `max_turns`, for agents that rewrite their
    history at every step."""
    host: Text = "127.0.0.1"
    """Address of this machine on which the policy is served to agents; one that containers reach, such as that of
    docker's bridge, 172.17.0.1. Requests from outside this machine need the session's key, `api_key`."""
    weight: float = 1.0
    """Weight of the reward `env`, which the agent returns, beside `rewards`."""
    on_error: Literal["drop"] | float = "drop"
    """Value of the reward `env` of samples whose agent fails. `drop`: the sample has no reward and is excluded from its
    group."""
    unfinished: Literal["drop"] | float = 0.0
    """Reward of a sample whose agent gives none after its last answer was cut at `sampling.max_tokens` or `row_tokens`,
    or its last request was refused for `max_turns`, `max_rows` or `row_tokens`: it returns None, or fails with that
    refusal. `drop`: it has no reward `env`, and without other rewards is excluded from its group."""
    keep_thinking: Flag = False
    """Keep the thinking of earlier turns in the conversation where the chat template drops it."""
    split_turns: Flag = False
    """One training row for each request, rendered by the template, for templates that change earlier turns; `max_rows`
    must then allow them."""

    @property
    def rows(self) -> int:
        """Maximum number of training rows of a sample."""
        return self.max_turns if self.max_rows is None else self.max_rows

    def _mistakes(self) -> Iterator[str]:
        if (self.fn is None) == (not self.command):
            yield "an agent is a function (fn) or a command; set one of them"
        if option := secret_in_command(self.command):
            yield f"command: {option}: {SHOWN_COMMAND}; its environment is the run's, from which it can read it"
        if self.host in ("0.0.0.0", "::", ""):
            yield (
                f"host={self.host!r}: agents need an address that they can reach; give one of this machine's, such as "
                "172.17.0.1 of docker's bridge"
            )


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

    def _mistakes(self) -> Iterator[str]:
        if both := self.env.keys() & self.env_from.keys():
            yield f"{min(both)} is in env and in env_from; remove one of them"
        if secrets := [name for name in self.env if names_secret(name)]:
            yield (
                f"env.{secrets[0]}: {SHOWN}; set it in the run's environment, "
                f"and give env_from: {{{secrets[0]}: {secrets[0]}}}"
            )
        if option := secret_in_command(self.command):
            yield f"command: {option}: {SHOWN_COMMAND}; give it by env_from"


class ToolSection(Section):
    """Tool that the policy can call: a function, or all tools of an MCP server."""

    fn: Annotated[Any, AfterValidator(located)] = None
    """Function: `envs/food.py:lookup_nutrition`, `package.module:function`, or in Python the function itself. Its
    schema is made of its types and its docstring, with a line for each parameter under `Args:`."""
    args: FunctionArguments = {}
    """Keyword arguments of `fn` that the policy does not see and cannot set. `NAME_env: VARIABLE` gives `NAME`, a
    secret, from the environment."""
    mcp: McpSection | None = None
    """Server in place of `fn`."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Deadline in seconds of each call, after which the policy is told so."""
    max_chars: PositiveInt = 4000
    """Maximum length of a result in characters; longer ones are cut, and say so."""

    def _mistakes(self) -> Iterator[str]:
        if (self.fn is None) == (self.mcp is None):
            yield "a tool is a function (fn) or an MCP server (mcp); set one of them"
        elif self.mcp is not None and self.args:
            yield "args are for functions; put settings of an MCP server into its command or env"


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
    without_env = isinstance(data, dict) and data.get("tools") and all(data.get(name) is None for name in others)
    return {**data, "env": {}} if without_env else data
