"""Chats: answers are those of the whole conversation, they stream, stop and call tools; the terminal, its commands."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from posttrain.chat import Chat, ChatStopped, Listener, Terminal, tools_from
from posttrain.config import Locator, ToolSection
from posttrain.data.chat import Renderer
from posttrain.data.messages import Message
from posttrain.data.tokenizer import PromptForm
from posttrain.errors import ConfigError
from posttrain.rollout.types import Completion, NewTokens, SamplingParams
from posttrain.runs.finished import Generator
from tests.rollout.engines import NaiveEngine
from tests.tiny import tiny_model

MODEL = tiny_model(vocab_size=262, num_layers=1, max_positions=1024)
NUM_NEW = 20
SYSTEM = "Add the numbers, and say nothing but the sum of them; of others say that you cannot."


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(name="tiny", model=MODEL, tokenizer=pt.load_tokenizer("bytes"))


@pytest.fixture(scope="module")
def talk(generator: Generator) -> Iterator[Chat]:
    """Greedy, over the only engine of this file."""
    with closing(Chat(generator, max_new_tokens=NUM_NEW, max_length=256)) as talk:
        yield talk


@pytest.fixture(scope="module")
def expected(generator: Generator) -> Callable[[list[Any]], str]:
    """Answer to a conversation by whole forward passes."""
    model = tiny_model(vocab_size=262, num_layers=1, max_positions=1024)
    model.config = replace(model.config, num_tokens=generator.tokenizer.num_ids)
    naive, renderer = NaiveEngine(model, length=256), Renderer(generator.tokenizer, chat=True)
    ends = generator.tokenizer.stop_ids
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, stop_token_ids=ends, key=(0, 0))

    def answer(messages: list[Any]) -> str:
        tokens = naive.generate(renderer.prompt(messages), params).tokens
        return generator.tokenizer.decode([one for one in tokens if one not in ends])

    return answer


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_answers_stream_and_share_the_cache(talk: Chat, expected: Callable[[list[Any]], str]) -> None:
    talk.begin(SYSTEM)
    pieces: list[str] = []
    first = talk.ask("12+", Listener(text=pieces.append, note=lambda _: None))
    system: Message = {"role": "system", "content": SYSTEM}
    assert first == expected([system, user("12+")]) == "".join(pieces) and len(pieces) > 1
    assert talk.shared_tokens == 0
    second = talk.ask("ab")
    whole = [system, user("12+"), assistant(first), user("ab")]
    assert second == expected(whole) and talk.shared_tokens > len(SYSTEM)
    assert talk.messages == [*whole, assistant(second)]
    assert talk.complete(whole) == second
    with pytest.raises(ConfigError, match="ends with an assistant message"):
        talk.complete(talk.messages)
    with pytest.raises(ConfigError, match=r"at temperature 0 \(greedy\) the answer would be the same"):
        talk.again()


def test_an_interrupt_keeps_what_was_said(talk: Chat, expected: Callable[[list[Any]], str]) -> None:
    """Red if the slot stayed taken, or the chat went on with a message that nobody answered."""
    talk.begin(None)
    said: list[str] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    def stop(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        talk.ask("12+", Listener(text=stop, note=lambda _: None))
    assert talk.messages[0] == user("12+") and talk.messages[1:] == [assistant(talk.messages[1]["content"])]
    assert expected([user("12+")]).startswith(talk.messages[1]["content"])
    before = list(talk.messages)
    assert talk.ask("ab") == expected([*before, user("ab")])
    with pytest.raises(ConfigError, match="the conversation has .* tokens, and max_length is 256"):
        talk.ask("long" * 100)
    assert len(talk.messages) == 4, "a message that failed is gone"
    assert talk._engine.num_used_blocks == 0


def test_a_stopped_answer_keeps_what_was_said(talk: Chat, expected: Callable[[list[Any]], str]) -> None:
    talk.begin(None)
    with pytest.raises(ChatStopped, match="the answer was stopped"):
        talk.ask("12+", Listener(text=lambda _: talk.stop(), note=lambda _: None))
    assert expected([user("12+")]).startswith(talk.messages[1]["content"]) and talk.said == ""
    before = list(talk.messages)
    assert talk.ask("ab") == expected([*before, user("ab")])
    assert talk._engine.num_used_blocks == 0


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_pipe(
    talk: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers alone are on standard output; lines, blocks and commands are read as typed."""
    talk.begin(None)
    file = tmp_path / "history.jsonl"
    lines = ["/system Add.", "12+", "", "/system", '"""one', 'two"""', "a\\", "b", "//x", f"/save {tmp_path / 'saved'}"]
    typed(monkeypatch, "\n".join([*lines, "/exit", "never"]))
    last = Terminal(talk, history=file).run()
    asked = [message["content"] for message in talk.messages if message["role"] == "user"]
    assert asked == ["12+", "one\ntwo", "a\nb", "/x"] and talk.messages[0]["content"] == "Add."
    out, err = capsys.readouterr()
    answers = [message["content"] for message in talk.messages if message["role"] == "assistant"]
    assert (
        out == "".join(answer if answer.endswith("\n") else f"{answer}\n" for answer in answers) and last == answers[-1]
    )
    assert err.startswith("cut after 20 tokens\nAdd.\n")
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert written == talk.messages and (tmp_path / "saved").read_text() == file.read_text()
    talk.begin(None)
    typed(monkeypatch, "/reset\n/load nowhere\n")
    with pytest.raises(ConfigError, match="no file .*nowhere"):
        Terminal(talk, history=file).run()
    assert talk.messages == [{"role": "system", "content": "Add."}], "read at the start, then begun anew"


def test_drafts(generator: Generator) -> None:
    with closing(Chat(generator, max_length=256, speculative=pt.LookupDrafts(tokens=2))) as talk:
        drafter = talk._engine._runner.drafter
        assert drafter is not None and drafter.tokens == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/regenrate", r"/regenrate is no command; did you mean '/regenerate'\?; a message that begins with /"),
        ("/save", "/save needs a file"),
        ("/regenerate", "there is no message to answer"),
    ],
)
def test_wrong_commands(talk: Chat, monkeypatch: pytest.MonkeyPatch, line: str, message: str) -> None:
    talk.begin(None)
    typed(monkeypatch, f"{line}\n")
    with pytest.raises(ConfigError, match=message):
        Terminal(talk).run()


TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def _hidden():
    pass
'''


def test_tools_of_a_file_are_called(generator: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if calls were shown as text, or results did not reach the next prompt."""
    (tmp_path / "mine.py").write_text(TOOLS)
    (tmp_path / "empty.py").write_text("x = 1\n")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 3}}\n</tool_call>'
    turns, prompts = ["Let me see.\n" + call, "It is 15."], []
    tokenizer = generator.tokenizer

    async def scripted(
        prompt: Any, params: SamplingParams, *, images: None, on_tokens: Callable[[NewTokens], None]
    ) -> Completion:
        prompts.append(tokenizer.decode(prompt))
        tokens = (*tokenizer.encode(turns[len(prompts) - 1]), tokenizer.stop_ids[0])
        for start in range(0, len(tokens), 8):
            on_tokens(NewTokens(tokens[start : start + 8], (), None, 0))
        zeros = (0.0,) * len(tokens)
        return Completion(
            tokens=tokens,
            logps=zeros,
            kept_logps=zeros,
            truncation_logps=zeros,
            stop="stop",
            weights_versions=(0,) * len(tokens),
        )

    tools = tools_from([str(tmp_path / "mine.py")])
    assert [tool.name for tool in tools] == ["add"]
    section = ToolSection(fn=Locator(f"{tmp_path / 'mine.py'}:add"))
    assert tools_from(["none"]) == [] == Chat(replace(generator, tools=[section]), tools=[])._tools
    with closing(Chat(replace(generator, tools=[section], tool_format="hermes"))) as talk:  # those of a run
        monkeypatch.setattr(talk._engine, "generate", scripted)
        said: list[str] = []
        assert talk.ask("12+3?", Listener(text=said.append, note=lambda line: said.append(f"[{line}]"))) == "It is 15."
    assert "".join(said) == "Let me see.[add(a=12, b=3) -> 15]It is 15."
    assert "Add two numbers." in prompts[0] and "15" in prompts[1].partition("</tool_call>")[2]
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool", "assistant"]
    with pytest.raises(ConfigError, match="defines no public function"):
        tools_from([str(tmp_path / "empty.py")])
    plain = generator.tokenizer.with_form(PromptForm(chat=False))
    with pytest.raises(ConfigError, match="tools need a chat template, and tiny is used without one"):
        Chat(replace(generator, tokenizer=plain), tools=tools)
