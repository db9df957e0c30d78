"""Text that streams: what was handed out is the beginning of the whole, whatever comes and however it is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.rollout.types import SamplingParams, text_of
from posttrain.serve.text import TextStream, TurnStream, held_back
from posttrain.tools.formats import FORMATS, OPENINGS, Format, make_format, write_calls
from posttrain.tools.readers import WrittenCall
from tests.environments.helpers import TOOLS


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


def params_of(tokenizer: Tokenizer, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=99, temperature=1.0, stop_token_ids=tokenizer.stop_ids, key=(0, 0), **changes)


def cuts(tokens: Sequence[int], seed: int) -> list[list[int]]:
    """Tokens in pieces of one to four."""
    draw, left, pieces = np.random.default_rng(seed), list(tokens), []
    while left:
        size = int(draw.integers(1, 5))
        pieces.append(left[:size])
        left = left[size:]
    return pieces


def streamed(stream: TextStream, pieces: Sequence[Sequence[int]]) -> tuple[list[str], str]:
    """Texts that could be handed out after each piece, and the last one."""
    shown = []
    for piece in pieces:
        stream.add(piece)
        shown.append(stream.text[: stream.safe(())])
    return shown, stream.final


@pytest.mark.parametrize("stop", [(), ("é!", "xx"), ("\n\n",), ("ab", "abc")])
def test_what_was_shown_is_never_changed(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    texts = ["héllo wörld 日本語", "xé!", "axx", "a\n\nb", "xabc", "x", "🙂🙂x"]
    odd = [[0xE6, 0x97], [0xFF, 0xFE, ord("a"), 0xE6], [0xE6, ord("b"), 0x97, 0xA5]]  # bytes that are no characters
    for number, tokens in enumerate([*map(tokenizer.encode, texts), *odd]):
        params = params_of(tokenizer, stop=stop)
        whole = text_of(tokenizer.decode, [65, 66], tokens, params)
        for seed in range(4):
            stream = TextStream(tokenizer.decode, [65, 66], params)
            shown, final = streamed(stream, cuts([*tokens, tokenizer.stop_ids[0]], seed))
            assert final == whole, (number, seed)
            for before in shown:
                if not any(one in before for one in stop):
                    assert whole.startswith(before), (number, seed, before, whole)
                assert "\ufffd" not in before or number >= len(texts)


def test_sentence_pieces_and_byte_fallback(shared: Path) -> None:
    """Spaces between words are in the tokens, and of the first one in the context."""
    tokenizer = load_tokenizer(shared / "models" / "stories260k")
    tokens = tokenizer.encode("Once upon a time, é and 日本 met.")
    params = params_of(tokenizer)
    whole = text_of(tokenizer.decode, tokens[:3], tokens[3:], params)
    for seed in range(6):
        shown, final = streamed(TextStream(tokenizer.decode, tokens[:3], params), cuts(tokens[3:], seed))
        assert final == whole and all(whole.startswith(text) for text in shown)


def test_what_is_held_back_is_the_longest_beginning_of_a_mark() -> None:
    """Of all ends of random texts of two letters, with marks that repeat themselves."""
    draw = random.Random(0)
    for _ in range(300):
        text, *marks = ("".join(draw.choices("ab", k=draw.randrange(1, 9))) for _ in range(3))
        sizes = [n for n in range(1, len(text) + 1) for m in marks if n < len(m) and m.startswith(text[-n:])]
        assert held_back(text, marks) == max(sizes, default=0), (text, marks)


def test_the_beginning_of_a_mark_is_held_back() -> None:
    assert [held_back(text, ("<tool_call>", "ab")) for text in ("x<tool", "x<a", "", "xa", "<tool_call>")] == [
        5, 1, 0, 1, 0,
    ]  # fmt: skip


CALLS = [WrittenCall("lookup", {"text": "é </tool_call> [x"}), WrittenCall("lookup", {"text": "two"})]


def turn(
    renderer: Renderer, text: str, tool_format: Format | None, seed: int, *, parallel: bool = True, prompt: str = "?"
) -> tuple[str, list[tuple[str, Any]], list[int]]:
    """Content and calls of a streamed turn, and the number of calls after each piece."""
    tokenizer = renderer.tokenizer
    given = renderer, tokenizer.encode(prompt), params_of(tokenizer), tool_format
    stream = TurnStream(*given, parallel=parallel, structured=False)
    content, calls, counts = "", [], []
    for piece in cuts([*tokenizer.encode(text), tokenizer.stop_ids[0]], seed):
        new, more, _ = stream.add(piece)
        content, calls = content + new, calls + more
        counts.append(len(calls))
    new, more, _ = stream.end()
    found = [(call.name, dict(call.arguments)) for call in calls + more]
    assert len({call.id for call in calls + more}) == len(found) and all(len(call.id) == 9 for call in calls + more)
    return content + new, found, counts


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_streamed_calls_are_those_of_the_whole_turn(tokenizer: Tokenizer, name: str) -> None:
    """In every format: content before calls streams, calls are those that the format reads, and text that only looks
    like one is content."""
    renderer, tool_format = Renderer(tokenizer, True), make_format(name, tokenizer, TOOLS)
    several = CALLS[:1] if name == "gpt_oss" else CALLS
    written = write_calls(name, several)
    texts = ["just text <tool, [no", written]
    texts += [] if name in ("gpt_oss", "llama3", "pythonic") else [f"so: {written}"]
    for text in texts:
        parsed = tool_format.parse(text)
        for seed in range(3):
            content, calls, _ = turn(renderer, text, tool_format, seed)
            assert content.split() == parsed.content.split(), (text, seed)
            assert calls == [(call.name, dict(call.arguments)) for call in parsed.calls]
        assert len(parsed.calls) == (len(several) if written in text else 0)
        if written in text:
            assert turn(renderer, text, tool_format, 0, parallel=False)[1] == calls[:1]
    assert set(OPENINGS) == set(FORMATS) - {"gpt_oss"}


def test_calls_come_at_their_end_and_never_from_a_thought(tokenizer: Tokenizer) -> None:
    renderer, tool_format = Renderer(tokenizer, True), make_format("hermes", tokenizer, TOOLS)
    plain = [WrittenCall("lookup", {"text": str(number)}) for number in range(3)]
    text = write_calls("hermes", plain)
    assert {1, 2} <= set(turn(renderer, text, tool_format, 1)[2])
    thought = f"{text} no</think>yes"
    content, calls, counts = turn(renderer, thought, tool_format, 1, prompt="<think>")
    assert calls == [] and max(counts) == 0 and content == thought
    content, calls, _ = turn(renderer, f"<think>{text}</think>{text}", tool_format, 1)
    assert len(calls) == 3 and json.dumps(calls[0][1]) == '{"text": "0"}'


def test_a_call_that_cannot_be_read_is_text(tokenizer: Tokenizer) -> None:
    renderer, tool_format = Renderer(tokenizer, True), make_format("hermes", tokenizer, TOOLS)
    broken = 'well <tool_call>{"name": "lookup", </tool_call>'
    assert turn(renderer, broken, tool_format, 2)[:2] == (broken, [])


THINKING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think> #}"


@pytest.mark.parametrize(
    ("prompt", "text", "thought", "content"),
    [
        ("<|im_start|>assistant\n", '{"a": "<think>é</think>"}', "", '{"a": "<think>é</think>"}'),
        ("<|im_start|>assistant\n", '<think>\nIs it {"?\n</think>\n\n{"a": 1}', 'Is it {"?\n', '{"a": 1}'),
        ("<|im_start|>assistant\n<think>\n", 'It é.</think>\n{"a": 1}', "It é.", '{"a": 1}'),
        ("<|im_start|>assistant\n<think>\n", "It is cut <", "It is cut <", ""),
        ("<|im_start|>assistant\n", "<thi", "", "<thi"),
    ],
)
def test_a_thought_before_structured_content_is_apart(prompt: str, text: str, thought: str, content: str) -> None:
    """Content is what the client parses, however the tokens come; nothing that was handed out is taken back."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.hf.chat_template = THINKING
    renderer, tokens = Renderer(tokenizer, True), [*tokenizer.encode(text), tokenizer.stop_ids[0]]
    for seed in range(8):
        given = renderer, tokenizer.encode(prompt), params_of(tokenizer), None
        stream = TurnStream(*given, parallel=True, structured=True)
        pieces = [*[stream.add(piece) for piece in cuts(tokens, seed)], stream.end()]
        assert "".join(piece.thought for piece in pieces) == thought
        assert "".join(piece.content for piece in pieces) == content
