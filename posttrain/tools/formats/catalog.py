"""Formats by name, and their detection from a tokenizer's chat template."""

from __future__ import annotations

import hashlib
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
ID_CHARACTERS = 9
"""Length of identifiers, which Mistral's templates prescribe."""


@dataclass(frozen=True)
class Format:
    """Format in which a family of models writes tool calls, for a set of tools."""

    name: str
    schemas: Schemas

    def parse(self, text: str) -> ParsedTurn:
        """Parse an assistant turn, decoded with its special tokens but without its stop token. Never raises.

        Calls that are considered inside <think>...</think> are not made. Identifiers are those of the model, or
        digests of the turn.
        """
        thought, end, rest = text.partition(THINK_END)
        if not end:
            thought, rest = "", text
            if text.lstrip().startswith("<think>"):
                return ParsedTurn(content=text)
        pieces = list(FORMATS[self.name](rest, self.schemas))
        calls = [piece for piece in pieces if isinstance(piece, Call)]
        malformed = [piece.line for piece in pieces if isinstance(piece, Malformed)]
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        if calls or malformed:
            content = content.strip()
        return ParsedTurn(
            content=f"{thought}{end}{content}",
            calls=[
                ToolCall(id=_identifier(call, i, text), name=call.name, arguments=call.arguments)
                for i, call in enumerate(calls)
            ],
            malformed=malformed,
        )


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


def _identifier(call: Call, index: int, text: str) -> str:
    if call.id is not None and len(call.id) == ID_CHARACTERS and call.id.isalnum():
        return call.id
    return hashlib.sha256(f"{index} {text}".encode("utf-8", "replace")).hexdigest()[:ID_CHARACTERS]
