"""Bodies of requests: fields are read one by one with their rules, and what nobody has read is refused by its name."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.data.grammar import Grammar
from posttrain.data.messages import Message, checked_tools, from_wire
from posttrain.data.pictures import RowPictures
from posttrain.errors import ConfigError
from posttrain.rollout.types import MAX_LOGIT_BIAS, MAX_TOP_LOGPS

MAX_VALUES = 1 << 20
"""Maximum commas and brackets of a request, in texts too: each value in it takes up to a hundred bytes of memory."""
MAX_DEPTH = 100
"""Maximum nesting of a request, and of the arguments of calls in it."""
MAX_STOPS = 16
"""Maximum stop strings, and stop tokens: each is looked for at every token."""
MAX_STOP_CHARACTERS = 256
"""Maximum length of a stop string: so much text is read again at every token."""
MAX_GRAMMAR_BYTES = 256 << 10
"""Maximum bytes of a schema or choices, and of all tools whose calls are in a grammar."""
MAX_PATTERN = 8 << 10
"""Maximum characters of a regular expression, whose compilation may take the square of them."""
MAX_TEMPLATE_BYTES = 16 << 10
"""Maximum bytes of `chat_template_kwargs`."""
MAX_TOKEN_IDS = 1 << 18
"""Maximum ids of a list of tokens but a prompt: as many as a vocabulary may have."""
MAX_MESSAGE = 2000
"""Characters of a refusal that are told: what is wrong may be megabytes."""
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape of half a character, of which two make one."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Fields that say who asks, and ask for nothing."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "functions": ([],),
    "background": (False,),
    "truncation": ("disabled",),
    "reasoning": ({},),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Fields without effect here, by the values that ask for none."""


FORMATS = "text, json_object, json_schema with its schema, or regex with its pattern"


class Refused(Exception):
    """Request that is not answered; the message is one line, `code` and `param` are those of the OpenAI API."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None):
        line = " ".join(message[: 2 * MAX_MESSAGE].split())
        super().__init__(line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}...")
        self.status, self.code, self.param = status, code, param

    @property
    def wire(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def wrong(param: str, message: str) -> Refused:
    """Refusal of a field's value."""
    return Refused(400, "invalid_value", f"{param}: {message}", param)


class Body:
    """Fields of a request; null is as if it were not there."""

    def __init__(self, fields: Mapping[str, Any]):
        self._left = {name: value for name, value in fields.items() if value is not None and name not in LABELS}

    @classmethod
    def of(cls, text: bytes) -> Body:
        """Parse a body. Refused for anything but a JSON object of text and numbers."""
        fields = parse_json(text)
        if not isinstance(fields, dict):
            raise Refused(400, "invalid_json", "the body must be a JSON object")
        return cls(fields)

    def take(self, name: str) -> Any:
        """Value of a field of any type; None without one."""
        return self._left.pop(name, None)

    def with_fields(self, fields: Mapping[str, Any]) -> Body:
        """Copy of what is not read yet, with these fields."""
        return Body({**self._left, **fields})

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(name, f"{_shown(value)} must be true or false")
        return default if value is None else value

    def whole(self, name: str, low: int, high: int | None = None) -> int | None:
        """Whole number from `low` to `high`."""
        value = self.take(name)
        if value is None or (type(value) is int and value >= low and (high is None or value <= high)):
            return value
        raise wrong(name, f"{_shown(value)} must be a whole number {_range(low, high)}")

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if type(value) in (int, float) and low <= value <= high and math.isfinite(value):
            return float(value)
        raise wrong(name, f"{_shown(value)} must be a number {_range(low, high)}")

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is None or isinstance(value, str):
            return value
        raise wrong(name, f"{_shown(value)} must be text")

    def stops(self, name: str) -> tuple[str, ...]:
        """Stop string, or a list of them, none empty."""
        value = self.take(name)
        texts = () if value is None else (value,) if isinstance(value, str) else value
        if not isinstance(texts, tuple | list) or not all(isinstance(one, str) and one for one in texts):
            raise wrong(name, f"{_shown(value)} must be strings that are not empty")
        if len(texts) > MAX_STOPS:
            raise wrong(name, f"{len(texts)} strings; at most {MAX_STOPS}")
        if (longest := max(map(len, texts), default=0)) > MAX_STOP_CHARACTERS:
            raise wrong(name, f"a string of {longest} characters; at most {MAX_STOP_CHARACTERS}")
        return tuple(texts)

    def ids(self, name: str, vocab_size: int, most: int = MAX_TOKEN_IDS) -> tuple[int, ...] | None:
        """At most so many token ids of a vocabulary."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            raise wrong(name, f"{_shown(value)} must be a list of token ids")
        if len(value) > most:
            raise wrong(name, f"{len(value)} token ids; at most {most}")
        if value and not 0 <= min(value) <= max(value) < vocab_size:
            raise wrong(name, f"token ids must be from 0 to {vocab_size - 1}")
        return tuple(value)

    def biases(self, name: str) -> dict[int, float]:
        """Number by token id, which is text in JSON."""
        value = self.take(name)
        given = {} if value is None else value
        if not isinstance(given, Mapping):
            raise wrong(name, f"{_shown(value)} must map token ids to numbers")
        if len(given) > MAX_LOGIT_BIAS:
            raise wrong(name, f"{len(given)} token ids; at most {MAX_LOGIT_BIAS}")
        try:
            biases = {int(token): float(bias) for token, bias in given.items()}
        except (TypeError, ValueError, OverflowError) as error:
            raise wrong(name, f"{_shown(value)} must map token ids to numbers") from error
        if not all(-100 <= bias <= 100 for bias in biases.values()):
            raise wrong(name, "each bias must be a number from -100 to 100")
        return biases

    def template_args(self, name: str) -> str:
        """Variables of a chat template, an object, as JSON."""
        value = self.take(name)
        if value is not None and not isinstance(value, Mapping):
            raise wrong(name, f"{_shown(value)} must be an object")
        text = json.dumps(value or {}, sort_keys=True)
        if len(text) > MAX_TEMPLATE_BYTES:
            raise wrong(name, f"{len(text)} bytes; at most {MAX_TEMPLATE_BYTES}")
        return text

    def effort(self) -> tuple[str | None, str]:
        """Effort of reasoning, and the field that asks for it: `reasoning_effort` of a chat, `effort` in `reasoning` of
        a response."""
        asked, field, inside = self.take("reasoning_effort"), "reasoning_effort", self._left.get("reasoning")
        if isinstance(inside, Mapping) and inside.get("effort") is not None:
            asked, field = inside["effort"], "reasoning"
            self._left["reasoning"] = {name: value for name, value in inside.items() if name != "effort"}
        if asked is not None and asked not in EFFORTS:
            raise wrong(field, f"{_shown(asked)} must be one of {', '.join(EFFORTS)}")
        return asked, field

    def finish(self) -> None:
        """Refuse fields that nobody has read, unless they ask for nothing."""
        for name, value in self._left.items():
            if value not in NEUTRAL.get(name, ()):
                asks = f"{name}={_shown(value)}" if name in NEUTRAL else name
                raise Refused(400, "unsupported_parameter", f"{asks} is not supported here; leave it out", name)


def parse_json(text: bytes) -> Any:
    """Parse the body of a request, of any server. Refused for what is no JSON in UTF-8, for what any reader of JSON may
    take for something else (a key twice, NaN, half a character), and for too many or too deeply nested values."""
    count = sum(map(text.count, (b",", b"[", b"{")))
    if count > MAX_VALUES:
        raise Refused(413, "request_too_large", f"the body has {count} commas and brackets; at most {MAX_VALUES}")
    try:
        decoded = text.decode()
        value = json.loads(
            decoded, parse_constant=_no_number, parse_float=_finite_number, object_pairs_hook=_without_repeats
        )
        check_depth(value, "the body")
        if SURROGATE.search(decoded) is not None:
            for one in _texts_in(value):
                one.encode()
    except UnicodeEncodeError as error:
        raise Refused(400, "invalid_json", "the body has a lone surrogate, which is no text") from error
    except UnicodeDecodeError as error:
        raise Refused(400, "invalid_json", f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise Refused(400, "invalid_json", "the body is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise Refused(400, "invalid_json", f"the body is not JSON: {error}") from error
    except ValueError as error:
        raise Refused(400, "invalid_json", str(error)) from error
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"the body is not JSON: {text} is no number there")


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} of the body is too large")
    return number


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Object of its pairs. ValueError for a key that is there twice, of which each reader takes another."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the body has the key {_shown(twice)} twice in one object")
    return fields


def _texts_in(value: Any) -> Iterator[str]:
    """Texts of a value, keys too."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            yield from one
            left += one.values()
        elif isinstance(one, list):
            left += one


def check_depth(value: Any, name: str) -> None:
    """ValueError for a value that is nested deeper than `MAX_DEPTH`."""
    left = [value]
    for _ in range(MAX_DEPTH):
        left = [item for one in left for item in (one.values() if isinstance(one, dict) else one)]
        left = [item for item in left if isinstance(item, dict | list | tuple)]
    if left:
        raise ValueError(f"{name} is nested too deeply; at most {MAX_DEPTH} levels")


def _range(low: float | int, high: float | int | None) -> str:
    return f"of at least {low:g}" if high is None else f"from {low:g} to {high:g}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


@dataclass(frozen=True, kw_only=True)
class ChatAsk:
    """Request for the next turns of a conversation."""

    model: str | None
    messages: list[Message]
    field: str
    """Field that they were in."""
    tools: list[dict[str, Any]] | None
    """Tools that the model may call."""
    forced: str | None
    """Name of the tool that it must call, or empty for any of them; None: it may call none."""
    strict: bool
    """Calls must fit the tools' schemas: one of the tools at least asks for it."""
    parallel: bool
    """The model may make several calls in a turn."""
    n: int
    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: bool
    top_logprobs: int
    body: Body
    """Fields that are not read yet: those of sampling."""


MAX_CHOICES = 128
MAX_MESSAGES = 4096
MAX_TOOLS = 1024


class SentPictures(RowPictures):
    """Pictures of a request: `data:` URLs alone, as nothing is fetched and a client names no file of this machine."""

    def __init__(self) -> None:
        super().__init__({}, Path())

    def part(self, fields: Mapping[str, Any], at: str) -> dict[str, Any]:
        sent = fields.get("image_url")
        held: Mapping[str, Any] = sent if isinstance(sent, Mapping) else {"url": sent}
        url = held.get("url")
        if fields["type"] != "image_url" or not isinstance(url, str) or not url.startswith("data:"):
            raise ConfigError(
                f'{at}: a picture is sent as {{"type": "image_url", "image_url": {{"url": "data:image/png;base64,"}}}} '
                "with its bytes; nothing is fetched, and no file is read"
            )
        others = {key: value for key, value in held.items() if key != "url" and (key, value) != ("detail", "auto")}
        if others:
            raise ConfigError(f"{at}: image_url has {others}, which is not supported; give its url alone")
        return super().part({"type": "image_url", "image_url": url}, at)


def read_messages(messages: Any, field: str) -> list[Message]:
    """Messages of a request's field. Refused for what is no conversation that ends before an assistant turn."""
    try:
        if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
            raise ConfigError(f"{field}: {len(messages)} messages; at most {MAX_MESSAGES}")
        read = from_wire(messages, SentPictures())
        # Arguments of calls are JSON in a text.
        check_depth(read, field)
    except (ConfigError, ValueError) as error:
        raise Refused(400, "invalid_value", str(error), field) from error
    return read


def chat_ask(body: Body) -> ChatAsk:
    """Read the fields of a chat completion that are not of sampling."""
    messages = read_messages(body.take("messages"), "messages")
    longest = body.whole("max_completion_tokens", 1), body.whole("max_tokens", 1)
    logprobs, top = body.flag("logprobs"), body.whole("top_logprobs", 0, MAX_TOP_LOGPS)
    if top is not None and not logprobs:
        raise wrong("top_logprobs", "needs logprobs: true")
    tools, forced, strict = chosen_tools(body.take("tools"), body.take("tool_choice"))
    return ChatAsk(
        model=body.text("model"),
        messages=messages,
        field="messages",
        tools=tools,
        forced=forced,
        strict=strict,
        parallel=body.flag("parallel_tool_calls", True),
        n=body.whole("n", 1, MAX_CHOICES) or 1,
        max_tokens=longest[0] or longest[1],
        stop=body.stops("stop"),
        logprobs=logprobs,
        top_logprobs=top or 0,
        body=body,
    )


def asked_grammar(body: Body) -> Grammar | None:
    """Read the language that a request's text must be in: `response_format`, as in the OpenAI API and with `{type:
    regex, pattern: ...}`, or `structured_outputs`, as in vLLM's."""
    given, outputs = body.take("response_format"), body.take("structured_outputs")
    name = "response_format" if outputs is None else "structured_outputs"
    if given is not None and outputs is not None:
        raise wrong(name, "is not supported together with response_format; leave one out")
    _check_size(given if outputs is None else outputs, name)
    try:
        match outputs:
            case {"json": dict() as schema} if len(outputs) == 1:
                return Grammar.json_schema(schema)
            case {"json": str() as text} if len(outputs) == 1:
                schema = json.loads(text)
                check_depth([schema], name)
                _check_size(schema, name)
                return Grammar.json_schema(schema)
            case {"regex": str() as pattern} if len(outputs) == 1:
                _check_size({"pattern": pattern}, name)
                return Grammar.regex(pattern)
            case {"choice": list() as texts} if len(outputs) == 1:
                return Grammar.choice(texts)
            case {"json_object": True} if len(outputs) == 1:
                return Grammar.json_object()
        match given:
            case _ if outputs is not None:
                raise wrong(name, f"{_shown(outputs)} must hold one of json, regex, choice, or json_object: true")
            case None:
                return None
            case {"type": "text"} if len(given) == 1:
                return None
            case {"type": "json_object"} if len(given) == 1:
                return Grammar.json_object()
            case {"type": "json_schema", "json_schema": {"schema": dict() as schema}} if len(given) == 2:
                return Grammar.json_schema(schema)
            case {"type": "regex", "pattern": str() as pattern} if len(given) == 2:
                return Grammar.regex(pattern)
    except (ValueError, ConfigError, RecursionError) as error:
        raise wrong(name, str(error).removeprefix("sampling.grammar: ")) from error
    raise wrong(name, f"{_shown(given)} must be of type {FORMATS}")


def _check_size(grammar: Any, name: str) -> None:
    """Refuse a grammar that takes long to compile, by the bytes of all and the characters of each pattern."""
    size = len(json.dumps(grammar))
    if size > MAX_GRAMMAR_BYTES:
        raise wrong(name, f"{size} bytes; at most {MAX_GRAMMAR_BYTES}")
    left = [grammar]
    while left:
        one = left.pop()
        left += one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
        patterns: Any = []
        if isinstance(one, Mapping):
            named = one.get("patternProperties")
            patterns = [one.get("pattern"), *(named if isinstance(named, Mapping) else ())]
        longest = max((len(pattern) for pattern in patterns if isinstance(pattern, str)), default=0)
        if longest > MAX_PATTERN:
            raise wrong(name, f"a pattern of {longest} characters; at most {MAX_PATTERN}")


def chosen_tools(tools: Any, choice: Any) -> tuple[list[dict[str, Any]] | None, str | None, bool]:
    """Tools that a request lets the model call, `ChatAsk.forced` and `ChatAsk.strict`."""
    try:
        if isinstance(tools, list) and len(tools) > MAX_TOOLS:
            raise ConfigError(f"tools: {len(tools)} tools; at most {MAX_TOOLS}")
        checked = checked_tools(tools)
        check_depth(checked or (), "tools")
    except (ConfigError, ValueError) as error:
        raise Refused(400, "invalid_value", str(error), "tools") from error
    checked, strict = None if checked is None else [_lax(tool) for tool in checked], _are_strict(checked or ())
    if strict or choice not in (None, "auto", "none"):
        _check_size(tools, "tools")
    match choice:
        case None | "auto":
            return checked, None, strict
        case "none":
            return None, None, False
        case "required":
            forced = ""
        case {"type": "function", "function": {"name": str() as forced}} | {
            "type": "function",
            "name": str() as forced,
        }:
            pass
        case _:
            raise wrong("tool_choice", f"{_shown(choice)} must be auto, none, required, or a function with its name")
    names = [tool["function"]["name"] for tool in checked or ()]
    if forced not in ("", *names) or not names:
        raise wrong("tool_choice", f"{_shown(choice)}: there is no such tool; there are {', '.join(names) or 'none'}")
    return checked, forced, strict


def _lax(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Tool as templates take it, which is not told how its calls are sampled."""
    return {**tool, "function": {key: item for key, item in tool["function"].items() if key != "strict"}}


def _are_strict(tools: Sequence[Mapping[str, Any]]) -> bool:
    wanted = [tool["function"].get("strict") for tool in tools]
    if others := [one for one in wanted if one not in (None, True, False)]:
        raise wrong("tools", f"strict: {_shown(others[0])} must be true or false")
    return any(wanted)
