"""Admission: limits of connections, and of what one request may ask for, which is checked by counts before the work
that it would be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.data.messages import THINKING, pictures_in, strings_in, text_of
from posttrain.data.pictures import Picture
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.serve.body import ChatAsk, Refused, wrong

MIN_RATE = 1024
"""Bytes per second that count as progress of a request, and of an answer that its client does not read."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of the connections of a server."""

    count: int = 2048
    """Connections at once; more are refused with 503."""
    read_s: float = 30.0
    """Seconds that a request may take until all of it has arrived, and one more for each `MIN_RATE` bytes; and that an
    answer may wait for a client which reads fewer."""


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Most that one request may ask for."""

    pixels: int = 128_000_000
    """Pixels of its pictures before they are resized, by their headers."""
    logprobs: int = 1 << 20
    """Log-probabilities of its answer: tokens, times one more than alternatives. Each takes some 300 bytes until it is
    sent."""


def admit(ask: ChatAsk, tokenizer: Tokenizer, max_tokens: int, limits: RequestLimits) -> None:
    """Refuse a chat that cannot fit into a context of `max_tokens`, before anything is rendered, encoded or decoded.
    For a thread: texts may have many megabytes."""
    check_logprobs(ask.n * (ask.max_tokens or max_tokens), ask.top_logprobs if ask.logprobs else None, limits)
    check_text(_written(ask), tokenizer, max_tokens, ask.field)
    pictures = pictures_in(ask.messages)
    if pictures and not tokenizer.sees:
        raise wrong(ask.field, "the model takes no pictures; send text alone")
    _check_pictures(pictures, ask.field, max_tokens, limits)


def _written(ask: ChatAsk) -> list[str]:
    """Texts that a template writes into the prompt: those of messages, but for thoughts, of which it drops some, and of
    tools."""
    apart = ("role", "content", *THINKING)
    others = [[item for key, item in message.items() if key not in apart] for message in ask.messages]
    return [*map(text_of, ask.messages), *strings_in(others), *strings_in(ask.tools)]


def check_text(texts: Sequence[str], tokenizer: Tokenizer, max_tokens: int, field: str) -> None:
    """Refuse texts that are longer than a context of `max_tokens` can be, before any of them is encoded."""
    most = max_tokens * tokenizer.max_token_bytes
    count = sum(map(len, texts))
    if count <= most:
        count = sum(len(text.encode(errors="replace")) for text in texts)
    if count > most:
        raise Refused(
            400,
            "context_length_exceeded",
            f"this model's maximum context length is {max_tokens} tokens, at most {most} bytes of text; {field} has "
            f"{count}",
            field,
        )


def _check_pictures(pictures: Sequence[Picture], field: str, max_tokens: int, limits: RequestLimits) -> None:
    """Refuse more pictures than the context has tokens, of which each takes one at least, and too many pixels."""
    if len(pictures) > max_tokens:
        raise wrong(field, f"{len(pictures)} pictures; the context has {max_tokens} tokens")
    count = 0
    for picture in pictures:
        try:
            width, height = picture.size
        except ConfigError as error:
            raise Refused(400, "invalid_value", str(error), field) from error
        count += width * height
        if count > limits.pixels:
            raise wrong(field, f"the pictures have more than {limits.pixels:,} pixels in all; make them smaller")


def check_logprobs(num_tokens: int, top: int | None, limits: RequestLimits) -> None:
    """Refuse the log-probabilities of so many tokens with `top` alternatives each, all of which an answer holds. `top`
    is None for an answer without any."""
    count = 0 if top is None else num_tokens * (1 + top)
    if count > limits.logprobs:
        rule = f"the answer may have {count} log-probabilities, at most {limits.logprobs}; lower n, max_tokens or them"
        raise wrong("logprobs", rule)
