"""Session of an agent: its requests for one sample, recorded token by token."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from posttrain.data.chat import Prompt, Renderer
from posttrain.data.grammar import Grammar
from posttrain.data.messages import Message, said_calls
from posttrain.environments.conversation import Generate, message_of
from posttrain.errors import ConfigError
from posttrain.rollout.trajectory import Limit, is_cut
from posttrain.rollout.types import Completion, Requests, SamplingParams, StopReason, Transcript, grammar_of
from posttrain.serve.admission import RequestLimits, admit
from posttrain.serve.body import ChatAsk, Refused, wrong
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


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Request as it is sampled: its tokens, or those after a turn of a branch that it goes on from."""

    ask: ChatAsk
    tool_format: Format | None
    grammar: Grammar | None
    prompt: Prompt
    known: tuple[Branch, Mark] | None


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

    async def complete(self, ask: ChatAsk) -> list[SampledTurn]:
        """Sample the next turns of a chat, `ask.n` of them. Refused beyond the limits of the session and after its end.
        Cancelling it leaves the history as it was.

        Texts are rendered, encoded and read in threads: in the event loop are the other samples of the run.
        """
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            self._check_turns(ask.n)
            # What the history is at this moment, which goes on meanwhile.
            marks = [
                (branch, mark, branch.messages[: mark.messages]) for branch in self.branches for mark in branch.marks
            ]
            rendered = await asyncio.to_thread(self._render, ask, marks)
            branches = self._place_all(rendered)
            return list(await asyncio.gather(*(self._sample(branch, rendered) for branch in branches)))
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

    def _check_turns(self, count: int) -> None:
        """Refuse a request after the end, and beyond the turns that are left."""
        if self.closed:
            raise Refused(410, "session_closed", "the sample of this session has ended")
        if count > max(self.max_turns, 1):
            rule = f"{count} must be at most {self.max_turns}: each choice is a turn (agent.max_turns)"
            raise wrong("n", rule)
        if self.num_turns + count > self.max_turns:
            words = f"this session has had {self.num_turns} of its {self.max_turns} turns (agent.max_turns)"
            raise Refused(403, "max_turns", words)

    def _render(self, ask: ChatAsk, marks: Sequence[tuple[Branch, Mark, list[Message]]]) -> Rendered:
        """Render a request, in a thread. `marks`: turns of the session, each with the history up to it."""
        admit(ask, self.renderer.tokenizer, self.row_tokens, RequestLimits())
        tool_format = self._format(ask.tools)
        try:
            self.params_of(0).stopped_at(ask.stop, self.renderer.tokenizer)
        except ValueError as error:
            raise Refused(400, "invalid_value", str(error).removeprefix("sampling."), "stop") from error
        grammar = self._grammar(ask.forced, tool_format)
        known = None if self.split_turns else _known(marks, ask)
        try:
            if known is None:
                prompt = self.renderer.prompt_with_images(ask.messages, ask.tools)
            else:
                branch, mark = known
                last = branch.transcript.tokens[mark.tokens - 1]
                before, after = ask.messages[: mark.messages - 1], ask.messages[mark.messages :]
                prompt = self.renderer.between_with_images(before, after, ask.tools, last=last)
            if prompt.images is not None:
                # They are decoded here, and a damaged one is refused; keys of samples hold their digests.
                assert prompt.images.digests
        except ConfigError as error:
            raise Refused(400, "invalid_value", str(error), ask.field) from error
        return Rendered(ask=ask, tool_format=tool_format, grammar=grammar, prompt=prompt, known=known)

    def _place_all(self, rendered: Rendered) -> list[Branch]:
        """Branches of the choices of a request. One that is refused leaves no other behind."""
        # Others may have been placed since.
        self._check_turns(rendered.ask.n)
        branches: list[Branch] = []
        try:
            for _ in range(rendered.ask.n):
                branches.append(self._place(rendered))
        except Refused:
            for branch in branches:
                self._drop(branch)
            raise
        return branches

    def _drop(self, branch: Branch) -> None:
        """Leave a branch as it was before its turn, which is not sampled."""
        if branch.marks:
            branch.take_back()
        else:
            self.branches.remove(branch)
        branch.busy = False

    async def _sample(self, branch: Branch, rendered: Rendered) -> SampledTurn:
        """Sample the turn of a branch, and record it."""
        transcript, ask, tokenizer = branch.transcript, rendered.ask, self.renderer.tokenizer
        asked, before, images = tuple(transcript.tokens), len(transcript), transcript.images
        params_of_run, time = self._requests(asked, images), self.num_turns
        self.num_turns += 1
        room = min(params_of_run.max_tokens, self.row_tokens - before, ask.max_tokens or params_of_run.max_tokens)
        grammar = rendered.grammar or params_of_run.grammar
        params = replace(params_of_run.stopped_at(ask.stop, tokenizer), max_tokens=room, grammar=grammar)
        try:
            completion = await self.generate(asked, params, images)
            message, _ = await asyncio.to_thread(
                message_of, asked, completion, self.renderer, params, rendered.tool_format
            )
        except BaseException:
            self._drop(branch)
            raise
        transcript.add_turn(completion, time)
        branch.stop, branch.reached, branch.busy = completion.stop, None, False
        if is_cut(completion.stop) and room == params_of_run.max_tokens:
            branch.reached = "max_tokens"
        elif is_cut(completion.stop) and room == self.row_tokens - before:
            branch.reached = "row_tokens"
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
            raise Refused(400, "invalid_value", "tools: each must have a function with a name", "tools")
        try:
            return self.tool_format(tools)
        except ConfigError as error:
            raise Refused(400, "invalid_value", str(error), "tools") from error

    def _place(self, rendered: Rendered) -> Branch:
        """Branch whose next turn the request asks for, with the tokens before it."""
        ask, prompt = rendered.ask, rendered.prompt
        if rendered.known is None:
            return self._new(Transcript(*prompt), ask)
        branch, mark = rendered.known
        if branch.busy or mark != branch.marks[-1]:
            # The turns before were sampled for another row, which learns from them.
            images = branch.transcript.images
            fork = Transcript(branch.transcript.tokens[: mark.tokens], images and images.cut(mark.tokens))
            fork.add(*prompt)
            return self._new(fork, ask)
        self._check_room(len(branch.transcript) + len(prompt.tokens))
        branch.transcript.add(*prompt)
        branch.messages, branch.busy = list(ask.messages), True
        return branch

    def _new(self, transcript: Transcript, ask: ChatAsk) -> Branch:
        self._check_room(len(transcript))
        if len(self.branches) >= self.max_rows:
            raise Refused(403, "max_rows", f"this session has {self.max_rows} histories already (agent.max_rows)")
        self.branches.append(Branch(transcript=transcript, messages=list(ask.messages), tools=ask.tools))
        return self.branches[-1]

    def _check_room(self, num_tokens: int) -> None:
        if num_tokens >= self.row_tokens:
            raise Refused(
                400,
                "context_length_exceeded",
                f"this model's maximum context length is {self.row_tokens} tokens, the messages have {num_tokens}",
                "messages",
            )


def _wrong_choice(rule: str) -> Refused:
    return Refused(400, "invalid_value", f"tool_choice: must be {rule}", "tool_choice")


def _known(marks: Sequence[tuple[Branch, Mark, list[Message]]], ask: ChatAsk) -> tuple[Branch, Mark] | None:
    """Longest history, up to a turn of a branch, that a request goes on from."""
    candidates = [
        (branch, mark)
        for branch, mark, history in marks
        if branch.tools == ask.tools
        and mark.messages < len(ask.messages)
        and same_history(history, ask.messages[: mark.messages])
        and all(message["role"] != "assistant" for message in ask.messages[mark.messages :])
    ]
    # Of equal histories that which can go on as it is.
    return max(
        candidates, key=lambda one: (one[1].messages, not one[0].busy and one[1] == one[0].marks[-1]), default=None
    )


def same_history(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Tell whether two histories say the same."""
    return len(one) == len(other) and all(_said(a) == _said(b) for a, b in zip(one, other, strict=True))


def _said(message: Message) -> tuple[Any, ...]:
    content: Any = message.get("content") or ""
    if not isinstance(content, str):
        content = [{**part, "image": part["image"].key} if "image" in part else part for part in content]
    return message["role"], content, said_calls(message), message.get("tool_call_id")
