"""Session of an agent: its requests for one sample, recorded token by token."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from posttrain.data.chat import Renderer
from posttrain.data.grammar import Grammar
from posttrain.data.messages import Message, said_calls, text_of
from posttrain.environments.conversation import Generate, message_of
from posttrain.errors import ConfigError
from posttrain.rollout.trajectory import Limit, is_cut
from posttrain.rollout.types import Completion, Requests, SamplingParams, StopReason, Transcript, grammar_of
from posttrain.serve.body import Refused
from posttrain.serve.model import check_text
from posttrain.tools.formats import Format
from posttrain.tools.grammar import tool_grammar

Tools = Sequence[dict[str, Any]] | None
FormatOf = Callable[[Sequence[Mapping[str, Any]]], Format]
"""Maker of the format for tools of these schemas."""


REFUSED: Mapping[str, Limit] = {
    "max_turns": "max_turns",
    "max_rows": "max_rows",
    "context_length_exceeded": "row_tokens",
}
"""Codes of requests that a session refuses, with the limit that they are beyond."""


class Refusal(NamedTuple):
    """Request beyond a limit."""

    code: str
    num_turns: int
    """Number of turns that the session had begun."""


class Mark(NamedTuple):
    """Place after a sampled turn."""

    messages: int
    tokens: int


@dataclass(kw_only=True)
class Branch:
    """History that requests have followed, and its tokens."""

    transcript: Transcript
    messages: list[Message]
    tools: Tools
    marks: list[Mark] = field(default_factory=list)
    busy: bool = True
    """True while its next turn is sampled."""
    stop: StopReason = "stop"
    """Stop of its last turn."""
    reached: Limit | None = None
    """Limit of the run that cut its last turn; None: whole, or cut at a `max_tokens` of the request's own."""

    def take_back(self) -> None:
        """Drop what was added for a turn that was not sampled."""
        messages, tokens = self.marks[-1]
        self.transcript.cut(tokens)
        del self.messages[messages:]


class SampledTurn(NamedTuple):
    message: Message
    completion: Completion
    num_prompt_tokens: int


@dataclass(kw_only=True)
class Session:
    """Record of one agent's requests. Histories that go on from a turn keep its tokens; others are rows of their own,
    in which only what is sampled anew is learned from."""

    renderer: Renderer
    params_of: Callable[[int], SamplingParams]
    """Settings of the n-th request of the same tokens."""
    generate: Generate
    row_tokens: int
    max_turns: int
    max_rows: int
    split_turns: bool
    """Render every request anew, so that each is a row of its own."""
    tool_format: FormatOf | None
    forces_calls: bool
    """Calls may be forced by a grammar: the trainer weighs samples by the probability that it left to tokens."""
    branches: list[Branch] = field(default_factory=list)
    num_turns: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    last_refusal: Refusal | None = None
    """Last request beyond a limit."""
    closed: bool = False

    def __post_init__(self) -> None:
        self._requests = Requests(self.params_of)
        self._running: set[asyncio.Task[Any]] = set()

    async def complete(
        self,
        messages: list[Message],
        tools: Tools,
        max_tokens: int | None,
        stop: Sequence[str],
        forced: str | None = None,
    ) -> SampledTurn:
        """Sample the next turn. `forced`: see `ChatAsk`. Refused beyond the limits of the session and after its end.
        Cancelling it leaves the history as it was."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self._complete(messages, tools, max_tokens, stop, forced)
        except Refused as refused:
            self.refusals[refused.code] += 1
            if refused.code in REFUSED:
                self.last_refusal = Refusal(refused.code, self.num_turns)
            raise
        finally:
            self._running.discard(task)

    @property
    def answered(self) -> list[Branch]:
        """Branches with a turn, in the order of their last ones."""
        branches = [branch for branch in self.branches if branch.transcript.turns]
        return sorted(branches, key=lambda branch: branch.transcript.turns[-1].time)

    @property
    def refused_last(self) -> Refusal | None:
        """Refusal of a request beyond a limit after the last turn; one to which the agent reacted with another turn
        has ended nothing."""
        answered, refusal = self.answered, self.last_refusal
        if refusal is None or (answered and answered[-1].transcript.turns[-1].time >= refusal.num_turns):
            return None
        return refusal

    def close(self) -> None:
        """Refuse further requests, and cancel those under way."""
        self.closed = True
        for task in tuple(self._running):
            task.cancel()

    async def _complete(
        self, messages: list[Message], tools: Tools, max_tokens: int | None, stop: Sequence[str], forced: str | None
    ) -> SampledTurn:
        if self.closed:
            raise Refused(410, "session_closed", "the sample of this session has ended")
        if self.num_turns >= self.max_turns:
            raise Refused(403, "max_turns", f"this session has had its {self.max_turns} turns (agent.max_turns)")
        texts = [text_of(message) for message in messages]
        check_text(texts, self.renderer.tokenizer, self.row_tokens, "messages")
        tool_format = self._format(tools)
        try:
            self.params_of(0).stopped_at(stop, self.renderer.tokenizer)
        except ValueError as error:
            raise Refused(400, "invalid_request_error", str(error).removeprefix("sampling.")) from error
        self._grammar(forced, tool_format)
        branch = self._place(messages, tools)
        transcript = branch.transcript
        asked, before, images = tuple(transcript.tokens), len(transcript), transcript.images
        params_of_run, time = self._requests(asked, images), self.num_turns
        self.num_turns += 1
        room = min(params_of_run.max_tokens, self.row_tokens - before, max_tokens or params_of_run.max_tokens)
        grammar = self._grammar(forced, tool_format) or params_of_run.grammar
        params = replace(params_of_run.stopped_at(stop, self.renderer.tokenizer), max_tokens=room, grammar=grammar)
        try:
            completion = await self.generate(asked, params, images)
        except BaseException:
            if branch.marks:
                branch.take_back()
            else:
                self.branches.remove(branch)
            raise
        finally:
            branch.busy = False
        transcript.add_turn(completion, time)
        branch.stop, branch.reached = completion.stop, None
        if is_cut(completion.stop) and room == params_of_run.max_tokens:
            branch.reached = "max_tokens"
        elif is_cut(completion.stop) and room == self.row_tokens - before:
            branch.reached = "row_tokens"
        message, _ = message_of(asked, completion, self.renderer, params, tool_format)
        branch.messages.append(message)
        branch.marks.append(Mark(len(branch.messages), len(transcript)))
        return SampledTurn(message, completion, before)

    def _grammar(self, forced: str | None, tool_format: Format | None) -> Grammar | None:
        """Grammar of a turn that must call tools; None without. Refused where it would make the samples those of
        another policy than the trainer knows."""
        if forced is None:
            return None
        if not self.forces_calls or tool_format is None:
            raise _wrong_choice(
                "auto or none in this session, whose samples have no importance weights, by which alone a forced call "
                "counts as what it is: set algorithm.importance_sampling: {apply: always}, with the built-in engine, "
                "or let the agent ask with tool_choice auto"
            )
        params = self.params_of(0)
        if params.grammar is not None or not params.ends:
            other = "ignore_eos" if params.grammar is None else "grammar"
            raise _wrong_choice(f"auto or none beside sampling.{other}; remove that, or let the agent ask with auto")
        try:
            grammar = tool_grammar(tool_format, self.renderer.tokenizer, name=forced or None)
        except (ValueError, ConfigError) as error:
            text = str(error).removeprefix("sampling.grammar: ")
            raise Refused(400, "invalid_value", f"tools: {text}", "tools") from error
        return grammar_of(self.renderer, grammar)

    def _format(self, tools: Tools) -> Format | None:
        """Format of the calls of a request's tools; None without tools."""
        if self.tool_format is None or not tools:
            return None
        if not all(isinstance(tool.get("function"), dict) and "name" in tool["function"] for tool in tools):
            raise Refused(400, "invalid_request_error", "tools: each must have a function with a name")
        try:
            return self.tool_format(tools)
        except ConfigError as error:
            raise Refused(400, "invalid_request_error", str(error)) from error

    def _place(self, messages: list[Message], tools: Tools) -> Branch:
        """Branch whose next turn the request asks for, with the tokens before it."""
        known = None if self.split_turns else self._known(messages, tools)
        try:
            if known is None:
                return self._new(Transcript(*self.renderer.prompt_with_images(messages, tools)), messages, tools)
            branch, mark = known
            last = branch.transcript.tokens[mark.tokens - 1]
            before, after = messages[: mark.messages - 1], messages[mark.messages :]
            delta = self.renderer.between_with_images(before, after, tools, last=last)
        except ConfigError as error:
            raise Refused(400, "invalid_request_error", str(error)) from error
        if branch.busy or mark != branch.marks[-1]:
            # The turns before were sampled for another row, which learns from them.
            images = branch.transcript.images
            fork = Transcript(branch.transcript.tokens[: mark.tokens], images and images.cut(mark.tokens))
            fork.add(*delta)
            return self._new(fork, messages, tools)
        self._check_room(len(branch.transcript) + len(delta.tokens))
        branch.transcript.add(*delta)
        branch.messages, branch.busy = list(messages), True
        return branch

    def _known(self, messages: list[Message], tools: Tools) -> tuple[Branch, Mark] | None:
        """Longest history of a branch, up to one of its turns, that the request goes on from."""
        candidates = [
            (branch, mark)
            for branch in self.branches
            if branch.tools == tools
            for mark in branch.marks
            if mark.messages < len(messages)
            and same_history(branch.messages[: mark.messages], messages[: mark.messages])
            and all(message["role"] != "assistant" for message in messages[mark.messages :])
        ]
        # Of equal histories that which can go on as it is.
        return max(
            candidates, key=lambda one: (one[1].messages, not one[0].busy and one[1] == one[0].marks[-1]), default=None
        )

    def _new(self, transcript: Transcript, messages: list[Message], tools: Tools) -> Branch:
        self._check_room(len(transcript))
        if len(self.branches) >= self.max_rows:
            raise Refused(403, "max_rows", f"this session has {self.max_rows} histories already (agent.max_rows)")
        self.branches.append(Branch(transcript=transcript, messages=list(messages), tools=tools))
        return self.branches[-1]

    def _check_room(self, num_tokens: int) -> None:
        if num_tokens >= self.row_tokens:
            raise Refused(
                400,
                "context_length_exceeded",
                f"this model's maximum context length is {self.row_tokens} tokens, the messages have {num_tokens}",
            )


def _wrong_choice(rule: str) -> Refused:
    return Refused(400, "invalid_value", f"tool_choice: must be {rule}", "tool_choice")


def same_history(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Tell whether two histories say the same."""
    return len(one) == len(other) and all(_said(a) == _said(b) for a, b in zip(one, other, strict=True))


def _said(message: Message) -> tuple[Any, ...]:
    content: Any = message.get("content") or ""
    if not isinstance(content, str):
        content = [{**part, "image": part["image"].key} if "image" in part else part for part in content]
    return message["role"], content, said_calls(message), message.get("tool_call_id")
