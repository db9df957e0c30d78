"""Formats by name, and their detection from a tokenizer's chat template."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError, did_you_mean
from posttrain.tools.formats.json_calls import read_deepseek, read_hermes, read_llama3, read_mistral, read_phi
from posttrain.tools.formats.marked_calls import read_gpt_oss, read_qwen_coder
from posttrain.tools.formats.pieces import Call, Malformed, Piece, Schemas
from posttrain.tools.formats.python_calls import read_gemma, read_pythonic
from posttrain.tools.types import ParsedTurn, ToolCall

Reader = Callable[[str, Schemas], Iterator[Piece]]

FORMATS: Mapping[str, Reader] = {
    "hermes": read_hermes,
    "qwen_coder": read_qwen_coder,
    "llama3": read_llama3,
    "mistral": read_mistral,
    "gemma": read_gemma,
    "deepseek": read_deepseek,
    "gpt_oss": read_gpt_oss,
    "phi": read_phi,
    "pythonic": read_pythonic,
}

MARKS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("gpt_oss", ("<|channel|>", "<|message|>")),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>", '"arguments"')),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
    ("phi", ("<|tool|>",)),
    ("gemma", ("<start_of_turn>",)),
)
"""Texts in the chat templates of each format, the first one whose texts are all there."""
THINK_END = "</think>"
PRIVATE_USE = range(0xE000, 0xF900)
"""Characters of which one stands for a </think> while calls are read."""
MAX_MALFORMED = 32
"""Maximum number of malformed calls of a turn; after them nothing is read."""
ID_CHARACTERS = 9
"""Length of identifiers, which Mistral's templates prescribe."""


@dataclass(frozen=True)
class Format:
    """Format in which a family of models writes tool calls, for a set of tools."""

    name: str
    schemas: Schemas

    def parse(self, text: str) -> ParsedTurn:
        """Parse an assistant turn, decoded with its special tokens but without its stop token. Never raises.

        Calls that are considered inside <think>...</think>, whose beginning may be in the prompt, are not made. Time is
        linear in the text. Identifiers are those of the model, or
        digests of the turn.
        """
        thought = self._thought(text)
        pieces = self._pieces(text[len(thought) :])
        calls = [piece for piece in pieces if isinstance(piece, Call)]
        malformed = [piece.line for piece in pieces if isinstance(piece, Malformed)]
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        if calls or malformed:
            content = content.strip()
        of_turn = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        return ParsedTurn(
            content=f"{thought}{content}",
            calls=[
                ToolCall(id=_identifier(call, i, of_turn), name=call.name, arguments=call.arguments)
                for i, call in enumerate(calls)
            ],
            malformed=malformed,
        )

    def _pieces(self, text: str) -> list[Piece]:
        """Pieces of a text. Each malformed call may search all of it for its end, so that only so many are read."""
        pieces: list[Piece] = []
        left = MAX_MALFORMED
        for piece in FORMATS[self.name](text, self.schemas):
            pieces.append(piece)
            left -= isinstance(piece, Malformed)
            if not left:
                return [*pieces, Malformed(f"nothing is read after {MAX_MALFORMED} calls that cannot be read")]
        return pieces

    def _thought(self, text: str) -> str:
        """Beginning of a turn up to the first </think> that is not in an argument; all of a <think> without an end."""
        parts = [] if self.name == "gpt_oss" else text.split(THINK_END)
        if len(parts) > 1:
            mark = next(character for character in map(chr, PRIVATE_USE) if character not in text)
            marked = "".join(f"{part}{mark}{number}{mark}" for number, part in enumerate(parts[:-1])) + parts[-1]
            calls = [json.dumps(one.arguments, ensure_ascii=False) for one in self._pieces(marked) if type(one) is Call]
            inside = set(map(int, re.findall(f"{mark}([0-9]+){mark}", "".join(calls))))
            for number in range(len(parts) - 1):
                if number not in inside:
                    return THINK_END.join([*parts[: number + 1], ""])
        return text if parts and text.lstrip().startswith("<think>") else ""


def make_format(name: str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> Format:
    """Make the format of that name, `auto` for the one of the tokenizer's chat template. `tools`: schemas of the tools.

    ConfigError for an unknown name, and for a template whose format is not known.
    """
    functions = [tool["function"] for tool in tools]
    return Format(format_name(name, tokenizer), {f["name"]: f.get("parameters", {}) for f in functions})


def format_name(name: str, tokenizer: Tokenizer) -> str:
    """Resolve `auto` to the format of the tokenizer's chat template. ConfigError as `make_format`."""
    if name != "auto" and name not in FORMATS:
        raise ConfigError(f"tool_format={name}: no such format{did_you_mean(name, FORMATS)}; use {_names()}")
    if name != "auto":
        return name
    template = tokenizer.hf.chat_template
    texts = list(template.values()) if isinstance(template, dict) else [template or ""]
    for found, marks in MARKS:
        if any(all(mark in _unescaped(text) for mark in marks) for text in texts):
            return found
    raise ConfigError(
        f"tool_format=auto: the chat template of {tokenizer.name} has no known form of tool calls; set tool_format to "
        f"{_names()}"
    )


def _names() -> str:
    return f"{', '.join(list(FORMATS)[:-1])} or {list(FORMATS)[-1]}"


def _unescaped(template: str) -> str:
    return template.replace('\\"', '"')


def _identifier(call: Call, index: int, of_turn: str) -> str:
    if call.id is not None and len(call.id) == ID_CHARACTERS and call.id.isalnum():
        return call.id
    return hashlib.sha256(f"{index} {of_turn}".encode()).hexdigest()[:ID_CHARACTERS]
