"""Conversations between policy and environment, token by token, and the environments of a stage."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from posttrain.config import RLSection, ToolSection
from posttrain.config.locator import callable_of
from posttrain.config.secrets import with_secrets
from posttrain.data.chat import Renderer
from posttrain.data.messages import Message, checked_messages
from posttrain.data.prompt_images import PromptImages
from posttrain.data.tokenizer import Tokenizer
from posttrain.data.turns import ReplyRole, check_turns
from posttrain.environments.tool_env import ToolEnv, by_name
from posttrain.environments.types import Env, EnvFactory, Reply
from posttrain.errors import ConfigError, RunError, did_you_mean
from posttrain.rollout.trajectory import Example, Limit, SampleEnd, Stop, Trajectory, is_cut, sample_end
from posttrain.rollout.types import Completion, Requests, SamplingParams, Transcript, reply_of
from posttrain.runtime.event_loop import run_async
from posttrain.runtime.user_calls import CallTimeout, UserCalls
from posttrain.tools.formats import make_format
from posttrain.tools.function import FunctionTool
from posttrain.tools.mcp_server import McpServer
from posttrain.tools.types import FormatMaker, Tool, ToolFormat
from posttrain.user_code import describe_error, number_of

MAX_SHAPES = 8
"""Maximum number of sequences of roles among the prompts that the chat template is checked on."""
Generate = Callable[[Sequence[int], SamplingParams, PromptImages | None], Awaitable[Completion]]
"""Sampler of one turn: a completion of the tokens so far, and of their pictures."""


class EnvError(Exception):
    """Failure of an environment; the message is one line."""

    def __init__(self, stop: Stop, message: str):
        super().__init__(message)
        self.stop: Stop = stop


NEEDS_CHAT = (
    "the prompt of each turn is a rendering of all messages before it, whose roles and borders plain text lacks; give "
    "prompts as messages with a chat template (model.chat_template), or leave split_turns out"
)
"""Rule for `split_turns`."""


@dataclass(frozen=True, kw_only=True)
class Environments:
    """Environments of a stage, one for each sample, and how conversations with them are held."""

    make: EnvFactory
    args: Mapping[str, Any]
    """Keyword arguments of `make` beside dataset columns and `seed`."""
    max_turns: int
    row_tokens: int
    """Maximum number of tokens of a conversation."""
    split_turns: bool
    """A training row for each turn, after the template's rendering of all messages before it; else one of all."""
    unfinished: float | None
    """Reward, beside those of the turns, of a conversation that ends before the environment is done; None: it has no
    reward at all."""
    calls: UserCalls
    tool_format: FormatMaker | None
    """Format of tool calls, for environments with tools."""
    tools: Sequence[Tool] = ()
    """Tools of the stage, the keyword `tools` of `make`."""
    names: frozenset[str] | None = field(init=False)
    """Keywords that `make` takes; None: all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", accepted_keywords(self.make))

    @classmethod
    def of(cls, section: RLSection, tokenizer: Tokenizer, tools: Sequence[Tool]) -> Environments:
        """Make the environments of a stage with `env`. ConfigError for a maker that cannot be imported."""
        env = section.env
        assert env is not None
        # Tools give no rewards, and 0 beside none would be one.
        drops = env.unfinished == "drop" or (env.fn is None and env.unfinished == 0)
        return cls(
            make=ToolEnv if env.fn is None else callable_of(env.fn, "env.fn"),
            args=with_secrets(env.args),
            max_turns=env.max_turns,
            row_tokens=section.sequence_tokens,
            split_turns=env.split_turns,
            unfinished=None if drops else float(env.unfinished),
            calls=UserCalls("env.fn", timeout_s=env.timeout_s, concurrency=env.concurrency),
            tool_format=partial(make_format, section.tool_format, tokenizer),
            tools=tools,
        )

    def check(self, renderer: Renderer, examples: Sequence[Example], *, keep_thinking: bool) -> None:
        """Make an environment of the first row, and check that the chat template allows conversations with it.

        ConfigError for columns that are missing, an environment that cannot be made, a template that changes earlier
        turns, and turns that are rendered anew without one.
        """
        provided = ("seed", "row", "tools") if self.tools else ("seed", "row")
        check_keywords(self.make, self.args, list(examples[0].row), provided, "env")
        if self.tools and self.names is not None and "tools" not in self.names:
            raise ConfigError(
                "tools: env.fn takes no argument 'tools', so they have no effect; add it, or remove tools"
            )
        env, prompt = run_async(self._tried(examples[0]))
        schemas = [dict(tool.schema) for tool in getattr(env, "tools", ())] or None
        if schemas:
            if not renderer.chat:
                raise ConfigError("tools need messages, but dataset.chat is off; give the prompts as messages")
            assert self.tool_format is not None
            self.tool_format(schemas)
        own_roles: tuple[ReplyRole, ...] | None = getattr(env, "reply_roles", None)
        roles: tuple[ReplyRole, ...] = own_roles or (("tool",) if schemas else ("user",))
        prompts = [prompt] if prompt is not None else role_patterns(examples)
        if not self.split_turns:
            check_turns(renderer, prompts, roles, tools=schemas, keep_thinking=keep_thinking)
        elif not renderer.chat:
            raise ConfigError(f"env.split_turns: {NEEDS_CHAT}")

    async def _tried(self, example: Example) -> tuple[Env, Sequence[Message] | None]:
        """Environment of an example, and its own prompt where it has one. ConfigError if it fails."""
        at = "env.fn"
        try:
            env = await self.calls.call(self.make, **self.given(example.row, 0))
            if not isinstance(env, Env):
                raise ConfigError(f"env.fn makes a {type(env).__name__} without a method reply(message)")
            at = "env.start"
            prompt = await self.calls.call(env.start) if hasattr(env, "start") else None
            if hasattr(env, "close"):
                at = "env.close"
                await self.calls.call(env.close)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{at}: failed on the first row: {describe_error(error)}") from error
        return env, prompt

    @property
    def answers_tools(self) -> bool:
        """True if environments only answer calls of the stage's tools, which the prompts of examples describe."""
        return self.make is ToolEnv

    def given(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Keyword arguments of `make` for a dataset row."""
        tools = {"tools": self.tools} if self.tools else {}
        keywords = {"seed": seed, "row": row, **row, **tools, **self.args}
        return named_keywords(self.names, keywords)

    def close(self) -> None:
        """End the threads and tools that conversations leave."""
        self.calls.close()
        for tool in self.tools:
            tool.close()

    async def converse(
        self,
        example: Example,
        *,
        group: int,
        sample: int,
        seed: int,
        renderer: Renderer,
        params_of: Callable[[int], SamplingParams],
        generate: Generate,
    ) -> Trajectory:
        """Hold the conversation of one sample. A failure of the environment ends it with that `stop`; one of the engine
        is raised."""
        talk = EnvConversation(self, example, renderer=renderer, params_of=params_of, generate=generate)
        error: str | None = None
        try:
            end = await talk.hold(seed)
        except EnvError as failure:
            end = sample_end("stop", reached=None, finished=False, failure=failure.stop)
            error = str(failure)
        finally:
            await talk.close()
        return talk.trajectory(group, sample, end=end, error=error)


class EnvConversation:
    """One conversation under way."""

    def __init__(
        self,
        environments: Environments,
        example: Example,
        *,
        renderer: Renderer,
        params_of: Callable[[int], SamplingParams],
        generate: Generate,
    ):
        self._all, self._renderer, self._generate = environments, renderer, generate
        self._params, self._requests = params_of(0), Requests(params_of)
        self._example = example
        self._env: Env | None = None
        self._tools: Sequence[Tool] = ()
        self._format: ToolFormat | None = None
        self._messages: list[Message] = list(example.messages)
        self._rows = [Transcript(example.prompt_tokens, example.images)]
        self._text = ""
        self._metrics: dict[str, float] = {}

    async def hold(self, seed: int) -> SampleEnd:
        """Sample turns until the environment is done, or a limit is reached."""
        await self._start(seed)
        last: Stop = "stop"
        while True:
            row, time = self._rows[-1], sum(len(one.turns) for one in self._rows)
            room = min(self._params.max_tokens, self._all.row_tokens - len(row))
            if room < 1:
                return self._end(last, "row_tokens", finished=False)
            params = replace(self._requests(row.tokens, row.images), max_tokens=room)
            completion = await self._generate(row.tokens, params, row.images)
            row.add_turn(completion, time)
            message = self._message(row.tokens[: row.turns[-1].start], completion)
            reply = await self._reply(message)
            row.reward(reply.reward)
            last = completion.stop
            # A turn that is cut is the last one, whether the environment is done or not.
            reached: Limit | None = None
            if is_cut(last):
                reached = "max_tokens" if room == self._params.max_tokens else "row_tokens"
            elif not reply.done and time + 1 >= self._all.max_turns:
                reached = "max_turns"
            elif not reply.done and not self._go_on(reply.messages, completion):
                reached = "row_tokens"
            if reply.done or reached is not None:
                return self._end(last, reached, finished=reply.done)

    def _end(self, last: Stop, reached: Limit | None, *, finished: bool) -> SampleEnd:
        """End the conversation, and pay `unfinished` where a limit ended it before the environment was done."""
        end = sample_end(last, reached=reached, finished=finished, failure=None)
        if end.limit is not None:
            pay_unfinished(self._rows, self._all.unfinished)
        return end

    async def close(self) -> None:
        """Call the environment's `close`, if it has one; what it raises is counted in `close_errors`."""
        close = getattr(self._env, "close", None)
        try:
            if close is not None:
                await self._all.calls.call(close)
        except RunError:
            raise
        except Exception:
            self._count({"close_errors": 1.0})
        finally:
            self._all.calls.release(self._env)

    def trajectory(self, group: int, sample: int, *, end: SampleEnd, error: str | None) -> Trajectory:
        """Trajectory of what was said."""
        rows = [
            Trajectory(
                group=group,
                example=self._example,
                sample=sample,
                messages=self._messages,
                text=self._text,
                stop=end.stop,
                limit=end.limit,
                error=error,
                **row.columns(),
            )
            for row in self._rows
            if row.turns or row is self._rows[0]
        ]
        return replace(rows[0], metrics=self._metrics, more=rows[1:])

    async def _start(self, seed: int) -> None:
        """Make the environment, and its prompt where it has one of its own."""
        self._env = await self._called("make", self._all.make, **self._all.given(self._example.row, seed))
        if not isinstance(self._env, Env):
            raise EnvError("env_error", f"it made a {type(self._env).__name__} without a method reply(message)")
        self._tools = tuple(getattr(self._env, "tools", ()))
        start = getattr(self._env, "start", None)
        messages = None if start is None else await self._called("start", start)
        if self._tools and self._all.tool_format is not None:
            self._format = self._all.tool_format(self._schemas or [])
        if messages is None and (not self._tools or self._all.answers_tools):
            return
        if messages is not None:
            self._messages = self._checked("start", messages)
        try:
            tokens, images = self._renderer.prompt_with_images(self._messages, self._schemas)
        except ConfigError as failure:
            raise EnvError("env_error", f"start: {failure}") from failure
        self._example = replace(self._example, messages=list(self._messages), prompt_tokens=tokens, images=images)
        self._rows = [Transcript(tokens, images)]

    async def _reply(self, message: Message) -> Reply:
        assert self._env is not None
        self._messages.append(message)
        reply = await self._called("reply", self._env.reply, message)
        if not isinstance(reply, Reply):
            raise EnvError("env_error", f"reply returned a {type(reply).__name__}, not a Reply")
        reward = number_of(reply.reward)
        if reply.reward is not None and (reward is None or not math.isfinite(reward)):
            raise EnvError("env_error", f"reply gave the reward {reply.reward}; give a finite number or None")
        if not reply.done and not reply.messages:
            raise EnvError("env_error", "reply gave no messages and is not done")
        self._count(reply.metrics)
        return replace(reply, reward=reward, messages=self._checked("reply", reply.messages) if reply.messages else ())

    def _message(self, prompt: Sequence[int], completion: Completion) -> Message:
        """Assistant message of a turn, with its tool calls where the environment has tools."""
        message, self._text = message_of(prompt, completion, self._renderer, self._params, self._format)
        return message

    def _go_on(self, messages: Sequence[Message], completion: Completion) -> bool:
        """Add the reply before the next turn, unless no room is left for one."""
        before = self._messages[:-1]
        self._messages += messages
        try:
            if self._all.split_turns:
                row = Transcript(*self._renderer.prompt_with_images(self._messages, self._schemas))
                fits = len(row) < self._all.row_tokens
                self._rows += [row] if fits else []
                return fits
            last = completion.tokens[-1]
            delta = self._renderer.between_with_images(before, messages, self._schemas, last=last)
        except ConfigError as failure:
            raise EnvError("env_error", f"reply: {failure}") from failure
        fits = len(self._rows[-1]) + len(delta.tokens) < self._all.row_tokens
        if fits:
            self._rows[-1].add(*delta)
        return fits

    @property
    def _schemas(self) -> list[dict[str, Any]] | None:
        return [dict(tool.schema) for tool in self._tools] or None

    async def _called(self, name: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        try:
            return await self._all.calls.call(function, *args, **keywords)
        except RunError:
            raise
        except CallTimeout as failure:
            raise EnvError("env_timeout", f"{name}: {failure}") from failure
        except Exception as failure:
            raise EnvError("env_error", f"{name}: {describe_error(failure)}") from failure

    def _checked(self, name: str, messages: Any) -> list[Message]:
        try:
            return checked_messages(messages, f"{name}: messages", self._renderer.tokenizer.picture_reader())
        except ConfigError as failure:
            raise EnvError("env_error", str(failure)) from failure

    def _count(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            number = number_of(value)
            if number is None:
                raise EnvError("env_error", f"reply gave the metric {name}={value}; give a number")
            self._metrics[name] = self._metrics.get(name, 0.0) + number


def tools_of(sections: Sequence[ToolSection], *, servers: bool) -> list[Tool]:
    """Make the tools of a stage; `servers`: with those of MCP servers, which start to list them and end again.

    ConfigError for functions that cannot be tools, servers that do not start, and two tools of one name.
    """
    tools: list[Tool] = []
    for section in sections:
        if section.mcp is None:
            tools.append(FunctionTool.of(section))
        elif servers:
            with closing(McpServer.of(section)) as server:
                tools += server.tools()
    by_name(tools)
    return tools


def message_of(
    prompt: Sequence[int],
    completion: Completion,
    renderer: Renderer,
    params: SamplingParams,
    tool_format: ToolFormat | None,
) -> tuple[Message, str]:
    """Message of a turn, with its tool calls where a format is given, and its text. `prompt`: all tokens before."""
    text = reply_of(renderer, prompt, completion.tokens, params)
    if tool_format is None:
        return {"role": "assistant", "content": text}, text
    raw = reply_of(renderer, prompt, completion.tokens, replace(params, skip_special_tokens=False))
    turn = tool_format.parse(raw)
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in turn.calls
        ]
    if turn.malformed:
        message["malformed_calls"] = list(turn.malformed)
    return message, text


def pay_unfinished(rows: Sequence[Transcript], reward: float | None) -> None:
    """Add the reward of an unfinished conversation to its last turn; None: remove those of all turns."""
    taken = [row for row in rows if row.turns]
    if reward is not None and taken:
        taken[-1].reward((taken[-1].turns[-1].reward or 0.0) + reward)
    elif reward is None:
        for row in taken:
            row.turns = [turn._replace(reward=None) for turn in row.turns]


def accepted_keywords(make: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the keywords that a function takes; None: any."""
    parameters = inspect.signature(make).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY)


def check_keywords(
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


def named_keywords(names: frozenset[str] | None, keywords: dict[str, Any]) -> dict[str, Any]:
    """Keywords with these names; all of them for None."""
    return keywords if names is None else {name: value for name, value in keywords.items() if name in names}


def role_patterns(examples: Sequence[Example]) -> list[Sequence[Message]]:
    """One prompt for each sequence of roles."""
    prompts: dict[tuple[str, ...], Sequence[Message]] = {}
    for example in examples:
        if len(prompts) < MAX_SHAPES:
            prompts.setdefault(tuple(message["role"] for message in example.messages), example.messages)
    return list(prompts.values())
