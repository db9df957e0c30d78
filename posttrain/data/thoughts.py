"""Thoughts before the content of a turn: their marks in each family, whether a prompt has opened one, and the rules of
grammars that let them stand there. The only place that tells what may come before the content."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from posttrain.data.templates import THINK, THINK_END
from posttrain.data.tokenizer import Tokenizer

CONTEXT = 2048
"""Tokens at the end of a prompt in which the beginning of its turn is looked for."""


class ThoughtMarks(NamedTuple):
    """Marks and texts around a thought, each a token of its own where the tokenizer has it."""

    begin: tuple[str, ...]
    end: tuple[str, ...]
    content: tuple[str, ...] = ()
    """Text that a turn writes before its content, behind a thought or without one."""
    never: str = ""
    """Regular expression of what no thought holds; empty: the first mark of its end."""


THINK_MARKS = ThoughtMarks((THINK,), (THINK_END,))
GEMMA4_MARKS = ThoughtMarks(("<|channel>",), ("<channel|>",))
HARMONY_START = "<|start|>"
HARMONY = r"<\|(message|channel|start|end|call|return)\|>"
HARMONY_MARKS = ThoughtMarks(
    begin=("<|channel|>", "analysis", "<|message|>"),
    end=("<|end|>", HARMONY_START, "assistant"),
    content=("<|channel|>", "final", "<|message|>"),
    never=HARMONY,
)
"""GPT-OSS: messages of one turn in channels."""
SPACES = r"/\s{1,4}/"
"""Space between a thought and the content."""


class Place(Enum):
    """Where the end of a prompt leaves the turn that is sampled."""

    BEGINNING = "beginning"
    THOUGHT = "thought"
    """The prompt has opened a thought."""
    CONTENT = "content"
    """The prompt has closed a thought, as where thinking is switched off, or has begun the content."""


def marks_of(tokenizer: Tokenizer) -> ThoughtMarks:
    """Marks of thoughts in the tokenizer's chat template; those of most families without a template."""
    text = _template(tokenizer)
    if all(mark in text for mark in ("<|channel|>", "<|message|>")):
        return HARMONY_MARKS
    return GEMMA4_MARKS if GEMMA4_MARKS.begin[0] in text else THINK_MARKS


def thinks(tokenizer: Tokenizer) -> bool:
    """Tell whether turns in the chat template's form may begin with a thought: it names a mark of theirs."""
    marks, text = marks_of(tokenizer), _template(tokenizer)
    return marks.begin[0] in text or marks.end[0] in text


def _template(tokenizer: Tokenizer) -> str:
    template = tokenizer.hf.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def in_thought(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Return whether a prompt ends within a thought."""
    return place_of(tokenizer, prompt, marks_of(tokenizer)) is Place.THOUGHT


def place_of(tokenizer: Tokenizer, prompt: Sequence[int], marks: ThoughtMarks) -> Place:
    """Tell where a prompt leaves its turn. Marks in messages tell nothing: only those behind the token that begins the
    turn count, or without such tokens those at the very end."""
    turn, is_bounded = _begun_turn(tokenizer, prompt, marks)
    begin, end, content = "".join(marks.begin), "".join(marks.end), "".join(marks.content)
    if content and content in turn:
        return Place.CONTENT
    opened, closed = turn.rfind(begin), turn.rfind(end)
    last = turn[opened + len(begin) :] if opened > closed else turn[closed + len(end) :]
    if max(opened, closed) < 0 or not (is_bounded or not last.strip()):
        return Place.BEGINNING
    return Place.THOUGHT if opened > closed else Place.CONTENT


def _begun_turn(tokenizer: Tokenizer, prompt: Sequence[int], marks: ThoughtMarks) -> tuple[str, bool]:
    """Text at the end of a prompt that belongs to the turn, and whether a token that begins turns bounds it."""
    inside = {*marks.begin, *marks.end, *marks.content} - {HARMONY_START}
    bounds = {
        number
        for number, token in tokenizer.hf.added_tokens_decoder.items()
        if token.content.startswith(("<", "[")) and token.content not in inside
    }
    tail = prompt[-CONTEXT:]
    start = next((place for place in reversed(range(len(tail))) if tail[place] in bounds), None)
    if start is None and marks.content:
        text = tokenizer.decode(tail, False)
        return text.rpartition(HARMONY_START)[2], HARMONY_START in text
    text = tokenizer.decode(tail if start is None else tail[start + 1 :], False)
    return text, start is not None and tail[start] != tokenizer.hf.bos_token_id


@dataclass(frozen=True)
class Thought:
    """Rules, in llguidance's form of Lark, of what a turn may be before its content."""

    marks: ThoughtMarks
    rules: str
    """Rules `thought`, `thought_end` of one that the prompt has opened, and `content_head`, if there is one."""
    may_begin: bool
    """A turn may begin with a thought; one that the prompt has opened is ended in any case."""
    is_open: bool | None = None
    """The prompt has opened a thought; None: as `place_of` tells."""

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, marks: ThoughtMarks, *, may_begin: bool, head: bool, is_open: bool | None = None
    ) -> Thought:
        """Make the rules for a tokenizer. `head`: the content stands behind what `marks` say."""
        control = tokenizer.control_ids

        def written(texts: Sequence[str]) -> str:
            return " ".join(mark_rule(tokenizer, text) for text in texts)

        lines = [f"THOUGHT: {without(marks.never or literal(marks.end[0]))}"]
        after = "" if marks.never else " SPACES?"
        lines += [] if marks.never else [f"SPACES: {SPACES}"]
        inner = f"THOUGHT? {written(marks.end)}{after}"
        if marks.end[0] not in control:
            # One terminal: the lexer goes on while a text may be longer, and never back to where a mark began.
            lines.append(f"THOUGHT_AND_MARK: THOUGHT {json.dumps(marks.end[0])}")
            inner = f"THOUGHT_AND_MARK {written(marks.end[1:])}{after}"
        lines += [f"thought_end: {inner}", f"thought: {written(marks.begin)} {inner}"]
        if head and marks.content:
            lines.append(f"content_head: {written(marks.content)}")
        return cls(marks, "".join(f"{line}\n" for line in lines), may_begin, is_open)

    def place(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> Place:
        """Tell where a prompt leaves the turn."""
        if self.is_open is None:
            return place_of(tokenizer, prompt, self.marks)
        return Place.THOUGHT if self.is_open else Place.BEGINNING

    def before(self, place: Place) -> str:
        """Right side of what stands before the content."""
        head = "content_head" if "content_head:" in self.rules else ""
        match place:
            case Place.CONTENT:
                return ""
            case Place.THOUGHT:
                return f"(thought | thought_end) {head}"
            case Place.BEGINNING:
                # Outside of a chat a prompt is as the user wrote it.
                return f"thought? {head}" if self.may_begin else ""


def mark_rule(tokenizer: Tokenizer, text: str) -> str:
    """Terminal of a mark: its control token, or its text where there is none."""
    token = tokenizer.control_ids.get(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def without(pattern: str) -> str:
    """Terminal of texts in which nothing matches a regular expression."""
    return f"/(?s:.*)/ & ~/(?s:.*({pattern}).*)/"


def literal(text: str) -> str:
    """Regular expression of a text."""
    return re.escape(text).replace("/", r"\/")
