"""Text of a sample while it grows: what is handed out is never changed or cut by tokens that come later."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from posttrain.data.chat import Renderer
from posttrain.data.messages import squeezed
from posttrain.data.thoughts import in_thought, marks_of
from posttrain.data.tokenizer import Tokenizer
from posttrain.rollout.types import NOT_A_CHARACTER, Decode, SamplingParams, before_stop
from posttrain.tools.formats import ENDINGS, OPENINGS, Format
from posttrain.tools.types import ToolCall

CONTEXT = 32
"""Tokens before others that their text may depend on, special ones among them."""


class TextStream:
    """Text of a sample's tokens, without its stop token, cut before the first stop string.

    Characters whose bytes are not all there, and the beginning of what may become a stop string, are held back.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int], params: SamplingParams):
        self._decode, self._params = decode, params
        self._window = [*prompt[-CONTEXT:]]
        """Tokens of which those from `_start` on are not all decoded."""
        self._start = len(self._window)
        self._shown = 0
        """Characters of the undecoded tokens that are in `text`."""
        self.text = ""
        """Text of whole characters so far, which may hold a stop string."""
        self._rest = ""

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens; the last of a sample may be a stop token."""
        if tokens and tokens[-1] in self._params.ends:
            tokens = tokens[:-1]
        if not tokens:
            return
        self._window += tokens
        after, new = self._window[: self._start], self._window[self._start :]
        found = self._decode(new, self._params.skip_special_tokens, after=after)
        whole = found.rstrip(NOT_A_CHARACTER)
        self.text += whole[self._shown :]
        self._shown, self._rest = len(whole), found[len(whole) :]
        if not self._rest:
            self._window, self._shown = self._window[-CONTEXT:], 0
            self._start = len(self._window)

    def safe(self, marks: Sequence[str]) -> int:
        """Number of characters of `text` that cannot belong to a stop string or a mark, whatever comes."""
        text = before_stop(self.text, self._params.stop)
        return len(text) if len(text) < len(self.text) else len(text) - held_back(text, (*self._params.stop, *marks))

    @property
    def final(self) -> str:
        """Text of the finished sample."""
        return before_stop(self.text + self._rest, self._params.stop)


def held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of a text with which one of the marks begins.

    >>> held_back("one <to", ("<tool_call>", "\\n\\n")), held_back("one <to ", ("<tool_call>",))
    (3, 0)
    """
    return max((_begun(text, mark) for mark in marks if mark), default=0)


def _begun(text: str, mark: str) -> int:
    """Length of the longest end of a text with which a mark begins, but for the whole mark."""
    place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while place >= 0 and not mark.startswith(text[place:]):
        place = text.find(mark[0], place + 1)
    return len(text) - place if place >= 0 else 0


class TurnPiece(NamedTuple):
    """New part of a turn."""

    content: str
    calls: list[ToolCall]
    thought: str
    """Thought before a structured content, without its marks."""


class TurnStream:
    """Message of a turn while it is sampled: pieces of its content, and its tool calls, each once it is whole.

    Without a format all is content. With one, text that may begin a call waits until it is known to be none.
    `structured`: the content is in a grammar, so that the thought before it is a part of its own.
    """

    def __init__(
        self,
        renderer: Renderer,
        prompt: Sequence[int],
        params: SamplingParams,
        tool_format: Format | None,
        *,
        parallel: bool,
        structured: bool,
    ):
        self._structured = structured and tool_format is None
        with_marks = self._structured or tool_format is not None
        raw = replace(params, skip_special_tokens=False) if with_marks else params
        self._stream = TextStream(renderer.tokenizer.decode, prompt, raw)
        self._renderer, self._format, self._parallel = renderer, tool_format, parallel
        self._marks = () if tool_format is None else OPENINGS.get(tool_format.name, ("",))
        self._ending = None if tool_format is None else ENDINGS.get(tool_format.name)
        self._thought_marks = marks_of(renderer.tokenizer) if tool_format is None else tool_format.thought_marks
        self._thinks = in_thought(renderer.tokenizer, prompt)
        self._sent = ""
        """Content that was handed out."""
        self._thought_sent = ""
        self._read = 0
        """Characters of the text in which calls were read."""
        self._of_turn = secrets.token_hex(4)[:7]
        self.calls: list[ToolCall] = []

    def add(self, tokens: Sequence[int]) -> TurnPiece:
        """Append tokens, and return what is new."""
        self._stream.add(tokens)
        text = self._stream.text
        begun = min((place for mark in self._marks if (place := text.find(mark)) >= 0), default=None)
        safe = self._stream.safe(self._marks) if begun is None else begun
        thought, content = self._apart(self._renderer.reply(text[:safe]), is_whole=False)
        if self._format is not None or not content.strip():
            content = content.rstrip()  # a turn with calls has none there; the first may be the template's own
        new = content[len(self._sent) :]
        self._sent += new
        return TurnPiece(new, [] if begun is None else self._finished(text), self._new_thought(thought))

    def is_complete(self) -> bool:
        """Return whether nothing that is sampled further would be part of the turn."""
        return not self._parallel and bool(self.calls)

    def end(self) -> TurnPiece:
        """Return what is left when the sample is complete."""
        text = self._renderer.reply(self._stream.final)
        if self._format is None:
            thought, content = self._apart(text, is_whole=True)
            return TurnPiece(content[len(self._sent) :], [], self._new_thought(thought))
        turn = self._format.parse(text)
        calls = self._new_calls(turn.calls)
        # A call that cannot be read is shown as it was written.
        content = text if turn.malformed and not self.calls else turn.content
        return TurnPiece(_rest(content, self._sent), calls, "")

    def _apart(self, text: str, *, is_whole: bool) -> tuple[str, str]:
        """Thought and structured content of a text; what may belong to a mark waits until the text is whole."""
        if not self._structured:
            return "", text
        begin, end = "".join(self._thought_marks.begin), "".join(self._thought_marks.end)
        if not self._thinks and not text.lstrip().startswith(begin):
            waits = begin.startswith(text.lstrip()) and not is_whole
            return "", "" if waits else text
        thought, closing, rest = text.partition(end)
        if not closing and not is_whole:
            thought = thought[: len(thought) - held_back(thought, (begin, end))]
        return thought.lstrip().removeprefix(begin).lstrip(), rest.lstrip()

    def _new_thought(self, thought: str) -> str:
        new = thought[len(self._thought_sent) :]
        self._thought_sent += new
        return new

    def _finished(self, text: str) -> list[ToolCall]:
        """New calls of which the end is written. In a thought there are none, which the rest of the text may tell."""
        end = -1 if self._ending is None else text.rfind(self._ending, self._read)
        if self._format is None or end < 0 or self._is_thinking(text):
            return []
        self._read = end + len(self._ending or "")
        return self._new_calls(self._format.parse(self._renderer.reply(text)).calls)

    def _is_thinking(self, text: str) -> bool:
        """Tell whether a thought is open at the end of a text."""
        begin, end = "".join(self._thought_marks.begin), "".join(self._thought_marks.end)
        return (0 if self._thinks else text.rfind(begin)) > text.rfind(end)

    def _new_calls(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Calls that were not handed out yet, with identifiers that do not depend on the rest of the turn."""
        new = calls[len(self.calls) : None if self._parallel else 1]
        named = [
            replace(call, id=f"{self._of_turn}{number:02d}"[:9]) for number, call in enumerate(new, len(self.calls))
        ]
        self.calls += named
        return named


def _rest(content: str, sent: str) -> str:
    """Content after its beginning, of which white space may differ: a turn with calls is stripped of it."""
    if content.startswith(sent):
        return content[len(sent) :]
    ends = [match.end() for match in re.finditer(r"\S", content)]
    count = len(squeezed(sent))
    return content[ends[count - 1] :] if 0 < count <= len(ends) else content[len(content) :]


def token_texts(tokenizer: Tokenizer, pairs: Sequence[tuple[Sequence[int], int]]) -> list[tuple[str, list[int] | None]]:
    """Text of each token after those before it, special ones too, and its bytes; a token that is no whole character is
    `token_id:N`, without bytes."""
    recent = [(before[-CONTEXT:], [token]) for before, token in pairs]
    texts = tokenizer.decode_each(recent, skip_special_tokens=False)
    return [
        (f"token_id:{token}", None) if NOT_A_CHARACTER in text else (text, list(text.encode()))
        for (_, token), text in zip(pairs, texts, strict=True)
    ]
