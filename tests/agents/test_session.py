"""Sessions of agents: requests that go on from a turn keep its tokens, other histories are rows of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from posttrain.agents.session import Session, same_history
from posttrain.data.chat import Renderer
from posttrain.data.grammar import Grammar
from posttrain.data.messages import Message, from_wire, to_wire
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError
from posttrain.rollout.types import Completion, SamplingParams
from posttrain.serve.body import Body, ChatAsk, Refused, SentPictures
from posttrain.tools.formats import make_format
from posttrain.tools.grammar import tool_grammar
from posttrain.tools.prompts import ToolText
from tests.environments.helpers import completion

USER: Message = {"role": "user", "content": "?"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


class Counting:
    """Engine that says 1, 2, 3, ... in the order of requests; what it was asked."""

    def __init__(self, tokenizer: Tokenizer, wait: float = 0.0):
        self.tokenizer, self.wait = tokenizer, wait
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def __call__(self, tokens: Sequence[int], params: SamplingParams, images: Any = None) -> Completion:
        self.asked.append((list(tokens), params))
        said = [*self.tokenizer.encode(str(len(self.asked))), self.tokenizer.stop_ids[-1]]
        await asyncio.sleep(self.wait)
        return completion(said[: params.max_tokens], stop="stop" if len(said) <= params.max_tokens else "length")


def session(tokenizer: Tokenizer, engine: Counting, **changes: Any) -> Session:
    params = SamplingParams(max_tokens=8, temperature=1.0, stop_token_ids=tokenizer.stop_ids, key=(0, 0))
    plain: dict[str, Any] = {
        "params_of": lambda request: SamplingParams(**{**vars(params), "key": (7, request)}),
        "row_tokens": 400,
        "max_turns": 9,
        "max_rows": 4,
        "split_turns": False,
        "tool_format": None,
        "forces_calls": False,
        "renderer": Renderer(tokenizer, True),
    }
    return Session(generate=engine, **plain | changes)


def asked(*messages: Message, **fields: Any) -> ChatAsk:
    """Request of a session."""
    plain: dict[str, Any] = {"tools": None, "forced": None, "max_tokens": None, "stop": (), "n": 1}
    unused: dict[str, Any] = {"model": None, "field": "messages", "strict": False, "parallel": True, "body": Body({})}
    return ChatAsk(messages=list(messages), logprobs=False, top_logprobs=0, **unused, **plain | fields)


def ask(one: Session, *messages: Message, **fields: Any) -> Message:
    (turn,) = asyncio.run(one.complete(asked(*messages, **fields)))
    return turn.message


def test_stops_of_a_request(tokenizer: Tokenizer) -> None:
    """A special token in `stop` is a stop token; a string with one inside is refused before anything is sampled."""
    engine = Counting(tokenizer)
    one = session(tokenizer, engine)
    ask(one, USER, stop=("<|im_start|>", "x"))
    params = engine.asked[0][1]
    assert (params.stop, params.stop_token_ids[-1:]) == (("x",), tuple(tokenizer.encode("<|im_start|>")))
    with pytest.raises(Refused, match=r"^stop='a<eos>': contains the special token <eos>"):
        ask(one, USER, stop=("a<eos>",))
    assert len(one.branches) == 1


def test_a_history_that_goes_on_is_one_row(tokenizer: Tokenizer) -> None:
    engine = Counting(tokenizer)
    one = session(tokenizer, engine)
    first = ask(one, USER)
    second = ask(one, USER, first, USER)
    assert (first["content"], second["content"]) == ("1", "2") and len(one.branches) == 1
    (branch,) = one.branches
    assert engine.asked[1][0] == list(branch.transcript.tokens[: len(engine.asked[1][0])])
    assert engine.asked[1][0][: len(engine.asked[0][0]) + 2] == [*engine.asked[0][0], ord("1"), tokenizer.stop_ids[-1]]
    assert engine.asked[1][0] == one.renderer.prompt([USER, first, USER])
    assert [turn.end - turn.start for turn in branch.transcript.turns] == [2, 2]


def test_a_fork_is_a_row_in_which_earlier_turns_have_no_loss(tokenizer: Tokenizer) -> None:
    engine = Counting(tokenizer)
    one = session(tokenizer, engine)
    first = ask(one, USER)
    ask(one, USER, first, USER)
    other = ask(one, USER, first, {"role": "user", "content": "else"})
    assert other["content"] == "3" and len(one.branches) == 2
    fork = one.branches[1].transcript
    assert len(fork.turns) == 1 and sum(fork.sampled) == 2, "the first turn is learned from in its own row"
    assert list(fork.tokens) == [
        *one.renderer.prompt([USER, first, {"role": "user", "content": "else"}]),
        ord("3"),
        tokenizer.stop_ids[-1],
    ]
    # A history that nobody has sampled is rendered; so is one with another first message.
    ask(one, USER, {"role": "assistant", "content": "made up"}, USER)
    assert len(one.branches) == 3 and len(one.branches[2].transcript.turns) == 1


def test_every_request_draws_for_itself(tokenizer: Tokenizer) -> None:
    """The same request again, or another of equal length, has a random key of its own, whatever came between; all keep
    that of their sample."""

    def keys(*prompts: str) -> dict[str, list[tuple[int, int]]]:
        engine, found = Counting(tokenizer), dict[str, list[tuple[int, int]]]()
        one = session(tokenizer, engine)
        for prompt in prompts:
            ask(one, {"role": "user", "content": prompt})
            found.setdefault(prompt, []).append(engine.asked[-1][1].key)
        assert {params.sample_key for _, params in engine.asked} == {(7, 0)} and len(one.branches) == len(prompts)
        return found

    found = keys("part 1", "part 2", "part 1")
    assert len({key for of_prompt in found.values() for key in of_prompt}) == 3
    assert found == keys("part 1", "part 1", "part 2")


def test_requests_at_once(tokenizer: Tokenizer) -> None:
    """Two requests that go on from one turn at once: the second becomes a row of its own."""
    engine = Counting(tokenizer, wait=0.01)
    one = session(tokenizer, engine)
    first = ask(one, USER)

    async def both() -> None:
        await asyncio.gather(*(one.complete(asked(USER, first, USER)) for _ in range(2)))

    asyncio.run(both())
    assert [sum(branch.transcript.sampled) for branch in one.branches] == [4, 2]


def test_a_request_that_is_cancelled_is_no_turn(tokenizer: Tokenizer) -> None:
    """Its history goes on as it was, token by token; a new one is gone."""
    engine = Counting(tokenizer, wait=0.02)
    one = session(tokenizer, engine)
    first = ask(one, USER)

    async def hang_up(*messages: Message) -> None:
        task = asyncio.create_task(one.complete(asked(*messages)))
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(hang_up(USER, first, USER))
    asyncio.run(hang_up({"role": "user", "content": "new"}))
    (branch,) = one.branches
    second = ask(one, USER, first, USER)
    assert one.branches == [branch] and list(engine.asked[-1][0]) == one.renderer.prompt([USER, first, USER])
    assert len(branch.messages) == 4 and second["content"] == "4" and len(branch.transcript.turns) == 2


def test_limits(tokenizer: Tokenizer) -> None:
    engine = Counting(tokenizer)
    one = session(tokenizer, engine, max_rows=2, max_turns=4, row_tokens=60)
    assert ask(one, USER, max_tokens=1)["content"] == "1" and engine.asked[0][1].max_tokens == 1
    ask(one, {"role": "user", "content": "b"})
    for messages, code in (
        ([{"role": "user", "content": "c"}], "max_rows"),
        ([{"role": "user", "content": "c" * 60}], "context_length_exceeded"),
    ):
        with pytest.raises(Refused) as refused:
            ask(one, *messages)
        assert refused.value.code == code
    one.close()
    with pytest.raises(Refused) as refused:
        ask(one, USER)
    assert refused.value.code == "session_closed" and one.refusals["max_rows"] == 1
    with pytest.raises(Refused, match=r"agent\.max_turns"):
        ask(session(tokenizer, engine, max_turns=0), USER)


def test_choices_are_sampled_all_or_none(tokenizer: Tokenizer) -> None:
    """A request of several choices of which one is beyond a limit leaves neither a turn nor a row behind."""
    engine = Counting(tokenizer)
    one = session(tokenizer, engine, max_rows=2, max_turns=4)
    for n, code in ((3, "max_rows"), (5, "invalid_value")):
        with pytest.raises(Refused) as refused:
            asyncio.run(one.complete(asked(USER, n=n)))
        assert refused.value.code == code and (one.branches, one.num_turns, engine.asked) == ([], 0, [])
    first, second = asyncio.run(one.complete(asked(USER, n=2)))
    assert [first.message["content"], second.message["content"]] == ["1", "2"]
    assert len({params.key for _, params in engine.asked}) == 2
    before = [list(branch.transcript.tokens) for branch in one.branches]
    with pytest.raises(Refused) as refused:
        asyncio.run(one.complete(asked(USER, first.message, USER, n=2)))
    assert refused.value.code == "max_rows"
    assert [list(branch.transcript.tokens) for branch in one.branches] == before and one.num_turns == 2
    assert not [branch for branch in one.branches if branch.busy]
    with pytest.raises(Refused) as refused:
        asyncio.run(one.complete(asked(USER, n=3)))
    assert refused.value.code == "max_turns" and one.refused_last is not None
    assert ask(one, USER, first.message, USER)["content"] == "3"


def test_a_row_for_each_request(tokenizer: Tokenizer) -> None:
    engine = Counting(tokenizer)
    one = session(tokenizer, engine, split_turns=True)
    first = ask(one, USER)
    ask(one, USER, first, USER)
    assert len(one.branches) == 2 and engine.asked[1][0] == one.renderer.prompt([USER, first, USER])


def test_messages_of_the_api() -> None:
    call: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "é"]}}}
    sampled: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    wire = to_wire(sampled)
    assert wire["content"] is None and wire["tool_calls"][0]["function"]["arguments"] == '{"x": [1, "é"]}'
    tool = {
        "role": "tool",
        "tool_call_id": "a",
        "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
    }
    back = from_wire([USER, wire, tool], SentPictures())
    assert same_history(back[1:2], [sampled]) and back[2]["content"] == "12"
    assert not same_history(back[1:2], [{**sampled, "content": "x"}])
    for wrong, reason in (
        ({}, "must be a list"),
        ([{"role": "judge", "content": "?"}], "role='judge'"),
        ([USER, wire], "end before the assistant turn"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a picture is sent as"),
        (
            [{**wire, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, USER],
            "arguments is text, but no JSON",
        ),
    ):
        with pytest.raises(ConfigError, match=reason):
            from_wire(wrong, SentPictures())


def test_calls_of_tools_are_parsed(tokenizer: Tokenizer) -> None:
    async def say(tokens: Sequence[int], params: SamplingParams, images: Any) -> Completion:
        call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        return completion([*tokenizer.encode(call), tokenizer.stop_ids[-1]])

    def request(tool_format: str, tool: dict[str, Any]) -> Message:
        told = Renderer(tokenizer, True, ToolText(tokenizer, tool_format))
        parse = partial(make_format, tool_format, tokenizer)
        made = session(tokenizer, say, tool_format=parse, renderer=told, row_tokens=999)  # type: ignore[arg-type]
        return ask(made, USER, tools=[tool])

    add = {"type": "function", "function": {"name": "add"}}
    (call,) = request("hermes", add)["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 1}}
    for tool_format, tool, reason in (
        ("auto", add, "tool_format=auto: .* no known form"),
        ("hermes", {"name": "add"}, "tools: each must have a function with a name"),
    ):
        with pytest.raises(Refused, match=reason):
            request(tool_format, tool)


def test_forced_calls_are_sampled_in_their_grammar(tokenizer: Tokenizer) -> None:
    """Only where the trainer weighs what the grammar has left out; a refused request is no turn."""
    engine, tool = Counting(tokenizer), {"type": "function", "function": {"name": "add"}}
    parts: dict[str, Any] = {
        "tool_format": partial(make_format, "hermes", tokenizer),
        "renderer": Renderer(tokenizer, True, ToolText(tokenizer, "hermes")),
        "row_tokens": 999,
    }

    def request(one: Session, forced: str | None) -> Grammar | None:
        ask(one, USER, tools=[tool], forced=forced)
        return engine.asked[-1][1].grammar

    forcing = session(tokenizer, engine, forces_calls=True, **parts)
    wanted = tool_grammar(make_format("hermes", tokenizer, [tool]), tokenizer)
    for forced in ("", "add"):
        grammar = request(forcing, forced)
        assert grammar is not None and (grammar.start, grammar.rules) == (wanted.start, wanted.rules)
    assert request(forcing, None) is None
    plain = SamplingParams(max_tokens=8, temperature=1.0, stop_token_ids=tokenizer.stop_ids, key=(0, 0))
    choice = replace(plain, grammar=Grammar.choice(["a"]))
    endless = session(
        tokenizer, engine, forces_calls=True, params_of=lambda _: replace(plain, ignore_eos=True), **parts
    )
    beside = session(tokenizer, engine, forces_calls=True, params_of=lambda _: choice, **parts)
    assert request(beside, None) == choice.grammar
    refusing = session(tokenizer, engine, **parts)
    for one, reason in (
        (refusing, "importance_sampling: {apply: always}"),
        (beside, "beside sampling.grammar"),
        (endless, "beside sampling.ignore_eos"),
    ):
        turns = one.num_turns
        with pytest.raises(Refused, match=reason):
            request(one, "")
        assert one.num_turns == turns and not [branch for branch in one.branches if branch.busy]
