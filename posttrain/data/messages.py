"""Messages of conversations: the one form that chat templates get, what a template makes of it, and checks that it
writes what messages hold."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Required, TypedDict, cast

import numpy as np

from posttrain.errors import ConfigError, did_you_mean
from posttrain.runtime.files import digest, typed_text

if TYPE_CHECKING:
    from posttrain.data.pictures import Picture, RowPictures

ROLES = ("system", "developer", "user", "assistant", "tool")
INSTRUCTING = ("system", "developer")
PICTURED = ("user", "tool")
"""Roles whose messages may hold pictures."""
SHAREGPT_ROLES = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
}
"""Roles of ShareGPT messages, `{from, value}`."""
THINKING = ("reasoning_content", "thinking")
"""Keys of thinking; a template knows one of them or none."""
OBEYED = ("role", "content", "tool_calls", "tool_call_id", "name", "malformed_calls", "weight", *THINKING)
IGNORED = ("id", "annotations", "timestamp", "cache_control")
"""Keys that say nothing which a model could read."""
FLAGS = ("weight", "train", "loss")
"""Keys by which OpenAI and Mistral, axolotl, and ms-swift leave a turn without loss."""
STAND_IN = "posttrain_stand_in"
PLAIN = (
    "without a chat template (or with dataset.chat: false) a row is one text of a user and one of an assistant: set "
    "model.chat_template, or write the whole prompt as one text (dataset.prompt)"
)
REMEDY = "change the messages, or use a template that writes them (model.chat_template)"


class Message(TypedDict, total=False):
    """Conversation turn in the format of chat templates: content is text, arguments of tool calls are mappings."""

    role: Required[str]
    content: str
    """Text; parts, a list of `{type: text}` and `{type: image}`, only in a message with pictures."""
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str
    reasoning_content: str
    malformed_calls: list[str]
    weight: int
    """0: an assistant turn without loss."""


Tools = Sequence[dict[str, Any]]


@dataclass
class Remarks:
    """First remark of each kind about the rows of a dataset, in the order of reading; `tell` hears each at once."""

    row: int | None = None
    """Number of the row that was read last."""
    texts: dict[str, str] = field(default_factory=dict)
    tell: Callable[[str], None] | None = None

    def add(self, kind: str, text: str) -> None:
        at = "" if self.row is None else f"row {self.row}: "
        if self.tell is not None and kind not in self.texts:
            self.tell(f"{at}{text}")
        self.texts.setdefault(kind, f"{at}{text}")


def checked_messages(value: Any, column: str, pictures: RowPictures | None = None) -> list[Message]:
    """Messages in the form of templates, from OpenAI's, ShareGPT's or JSON text. ConfigError for anything else.

    `pictures`: those of the row, for readers of messages with images; others refuse them.
    """
    listed = parse_json_list(value, column) if isinstance(value, str) else value
    if not isinstance(listed, list | tuple | np.ndarray) or len(listed) == 0:
        raise ConfigError(f"column {column!r} must hold a non-empty list of messages; it holds {str(value)[:60]!r}")
    return [_message(message, f"{column}[{index}]", pictures) for index, message in enumerate(listed)]


def parse_json_list(text: str, column: str) -> list[Any]:
    """List of messages that a column for them holds as JSON text. ConfigError for other text."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, list):
        raise ConfigError(f"column {column!r} must hold a non-empty list of messages; it holds {text[:60]!r}")
    return parsed


def looks_like_messages(text: str) -> bool:
    """Tell whether a text is a JSON list of messages with all that messages need, for a remark: it stays a text."""
    if not re.match(r"\s*\[\s*\{", text):
        return False
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return False

    def is_message(one: Any) -> bool:
        named = isinstance(one, dict) and "role" in one and bool({"content", "tool_calls"} & set(one))
        return named or (isinstance(one, dict) and {"from", "value"} <= set(one))

    return isinstance(parsed, list) and all(map(is_message, parsed))


def checked_tools(value: Any, at: str = "tools") -> list[dict[str, Any]] | None:
    """Tool descriptions as templates take them, from a list, JSON text or bare functions; None without any. `at`: their
    column, for errors."""
    value = _parsed(value, at) if isinstance(value, str) and value.strip() else value
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, list | tuple | np.ndarray):
        raise ConfigError(f"{at} must be a list of tool descriptions; it is {str(value)[:60]!r}")
    return None if len(value) == 0 else [_tool(tool, f"{at}[{index}]") for index, tool in enumerate(value)]


def is_same(one: Message, other: Message) -> bool:
    """Compare what two messages say, up to white space, and the pictures of two that have some."""
    pictures, others = ([picture.key for picture in pictures_in([message])] for message in (one, other))
    return _spoken(one) == _spoken(other) and (not pictures or not others or pictures == others)


def _spoken(message: Message) -> list[Any]:
    return [message["role"], " ".join(text_of(message).split()), said_calls(message)]


def text_of(message: Mapping[str, Any]) -> str:
    """Text of a message without its pictures."""
    content: str | list[dict[str, Any]] = message.get("content", "")
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def shown_text(message: Mapping[str, Any]) -> str:
    """Text of a message as people read it, with a mark in place of each picture."""
    parts = parts_of(message)
    return "".join("[image]" if part["type"] == "image" else part["text"] for part in parts) or text_of(message)


def said_calls(message: Message) -> list[tuple[Any, ...]]:
    """Identifier, name and arguments of each tool call."""
    calls = message.get("tool_calls", ())
    return [(call.get("id"), call["function"]["name"], call["function"]["arguments"]) for call in calls]


def squeezed(text: str) -> str:
    """Text without white space."""
    return "".join(text.split())


def _tool(tool: Any, at: str) -> dict[str, Any]:
    tool = _parsed(tool, at) if isinstance(tool, str) else tool
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConfigError(f"{at} must be a tool with a function and its name; it is {str(tool)[:80]!r}")
    if "function" in tool:
        return dict(tool)
    return {"type": "function", "function": {key: item for key, item in tool.items() if key != "type"}}


def _parsed(text: str, at: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{at} is text, but no JSON ({error}): {text[:60]!r}") from error


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _message(message: Any, at: str, pictures: RowPictures | None) -> Message:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{at} must be a message with role and content; it is {str(message)[:80]!r}")
    # Columns of a table hold every key for every message, and templates would take null for a value.
    fields = {key: value for key, value in message.items() if value is not None}
    fields = _from_sharegpt(fields, at) if "role" not in fields and {"from", "value"} <= set(fields) else fields
    if "role" not in fields:
        raise ConfigError(f"{at} must be a message with role and content; it is {str(message)[:80]!r}")
    role = fields["role"] = "tool" if fields["role"] == "function" else fields["role"]
    if role not in ROLES:
        raise ConfigError(f"{at}.role={role!r}: use one of {', '.join(ROLES)}{did_you_mean(str(role), ROLES)}")
    if "function_call" in fields:
        fields["tool_calls"] = [fields.pop("function_call")]
    calls = _calls(fields.pop("tool_calls", ()), f"{at}.tool_calls")
    if calls:
        fields["tool_calls"] = calls
    if "content" not in fields and not calls:
        raise ConfigError(f"{at} has neither content nor tool_calls; it has {', '.join(message)}")
    fields["content"] = _content(fields.get("content", ""), f"{at}.content", pictures if role in PICTURED else None)
    for key in THINKING:
        if not isinstance(fields.get(key, ""), str):
            raise ConfigError(f"{at}.{key} is {str(fields[key])[:40]!r}; it must be text")
    return cast(Message, {key: value for key, value in _flagged(fields, at).items() if key not in IGNORED})


def _from_sharegpt(fields: Mapping[str, Any], at: str) -> dict[str, Any]:
    name, value = fields["from"], fields["value"]
    if name not in SHAREGPT_ROLES:
        near = did_you_mean(str(name), SHAREGPT_ROLES)
        raise ConfigError(f"{at}.from={name!r}: use one of {', '.join(SHAREGPT_ROLES)}{near}")
    said = {"content": value}
    if name == "function_call":
        calls = _parsed(value, f"{at}.value") if isinstance(value, str) else value
        said = {"tool_calls": [calls] if isinstance(calls, Mapping) else calls}
    rest = {key: item for key, item in fields.items() if key not in ("from", "value")}
    return {"role": SHAREGPT_ROLES[name], **said, **rest}


def _content(content: Any, at: str, pictures: RowPictures | None) -> str | list[dict[str, Any]]:
    """Content as text, or as parts if there are pictures among them."""
    if isinstance(content, str):
        return content if pictures is None else pictures.parts(content, at)
    if isinstance(content, list | tuple | np.ndarray) and len(content):
        parts = [_part(part, f"{at}[{index}]", pictures) for index, part in enumerate(content)]
        if any(part["type"] == "image" for part in parts):
            return parts
        return "".join(part["text"] for part in parts)
    raise ConfigError(
        f"{at} is {str(content)[:40]} ({type(content).__name__}); it must be text, or a list of text parts; write "
        "other values as text in the data, for instance as JSON"
    )


def _part(part: Any, at: str, pictures: RowPictures | None) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    fields = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    fields = {key: value for key, value in fields.items() if key not in IGNORED}
    kind = fields.get("type", "text")
    if kind == "text" and isinstance(fields.get("text"), str) and set(fields) <= {"type", "text"}:
        return {"type": "text", "text": fields["text"]}
    if kind in ("image", "image_url") and pictures is not None:
        return pictures.part({key: value for key, value in fields.items() if key != "text"}, at)
    what = f"a part of type {kind!r}" if kind != "text" else f"{str(part)[:60]!r}"
    where = "images are for messages of users and tools, to a model with images" if "image" in kind else "no sound"
    raise ConfigError(f'{at} is {what}; only text is read, as {{"type": "text", "text": ...}}: {where}')


def _calls(value: Any, at: str) -> list[dict[str, Any]]:
    calls = _parsed(value, at) if isinstance(value, str) else value
    if not isinstance(calls, list | tuple | np.ndarray):
        raise ConfigError(f"{at} must be a list of calls; it is {str(calls)[:60]!r}")
    return [_call(call, f"{at}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, at: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConfigError(f"{at} must be a call with the name of a function; it is {str(call)[:80]!r}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{at}: arguments")
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{at}: arguments must be an object or its JSON text; they are {str(arguments)[:60]!r}")
    inner = ("type", "id") if function is call else ()
    outer = {key: call[key] for key in (inner or call) if key != "function" and call.get(key) is not None}
    own = {key: value for key, value in function.items() if value is not None and key not in inner}
    return {"type": "function", **outer, "function": {**own, "arguments": dict(arguments)}}


def _flagged(fields: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Fields with `weight: 0` in place of any of `FLAGS` for a turn without loss."""
    flags = {key: fields[key] for key in FLAGS if key in fields}
    for key, value in flags.items():
        if isinstance(value, str) or value not in (0, 1):
            raise ConfigError(f"{at}.{key}={value!r}: use 0 for a turn without loss, or 1")
        if value and fields["role"] != "assistant":
            raise ConfigError(f"{at}.{key}={value!r}: a {fields['role']} message never has loss; remove {key} from it")
    if len({bool(value) for value in flags.values()}) > 1:
        raise ConfigError(f"{at}: {' and '.join(flags)} contradict each other; keep one of them")
    silent = fields["role"] == "assistant" and any(not value for value in flags.values())
    return {key: value for key, value in fields.items() if key not in FLAGS} | ({"weight": 0} if silent else {})


def refuse_unknown_keys(messages: Sequence[Message], template: str) -> None:
    """ConfigError for a key of a message that neither the package nor the chat template obeys."""
    for index, message in enumerate(messages):
        for key in set(message) - {*OBEYED}:
            if not _names(template, key):
                raise ConfigError(
                    f"message {index} ({message['role']}) has the key {key!r}, which has no effect: the chat template "
                    f"does not read it; remove it from the data{did_you_mean(key, (*OBEYED, 'train'))}"
                )


def _names(template: str, key: str) -> bool:
    """Tell whether a template reads a key of messages."""
    return re.search(rf"""(\.|['"]){re.escape(key)}\b""", template) is not None


@dataclass
class TemplateForm:
    """Form of messages that a chat template takes, found by rendering stand-ins."""

    name: str
    """Name of the tokenizer, for errors."""
    template: str
    render: Callable[[list[Any]], str]
    """Render messages. ConfigError if the template refuses them."""
    _written: set[tuple[Any, ...]] = field(default_factory=set)
    _writes: dict[tuple[str, str], bool] = field(default_factory=dict)
    """By key and role."""
    _joins: dict[tuple[str, ...], bool] = field(default_factory=dict)
    """By the roles of messages at the beginning."""

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with roles and keys that the template reads. ConfigError for what it would leave out."""
        refuse_unknown_keys(messages, self.template)
        fitted: list[Message] = []
        for message in messages:
            role = message["role"]
            role = "system" if role == "developer" and not self._writes_developer else role
            fitted.append(cast(Message, {self._key(key): value for key, value in message.items()} | {"role": role}))
        return fitted

    def writes(self, key: str, role: str) -> bool:
        """Tell whether the template writes the text of a key of messages of a role."""
        if (key, role) not in self._writes:
            said: dict[str, Any] = {"role": role, "content": "?", key: STAND_IN}
            asked: dict[str, Any] = {"role": "user", "content": "?"}
            tried = [[said], [said, asked]] if role != "assistant" else [[asked, said], [asked, said, asked]]
            self._writes[key, role] = any(STAND_IN in self._tried(messages) for messages in tried)
        return self._writes[key, role]

    def joined(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Messages of which those of roles system and developer at the beginning are one, of the first one's role and
        with empty lines between their texts, where the template does not write each of them."""
        first = list(itertools.takewhile(lambda one: one["role"] in INSTRUCTING, messages))
        roles = tuple(one["role"] for one in first)
        if len(roles) > 1 and roles not in self._joins:
            self._joins[roles] = False  # while it is tried
            tried = [{"role": role, "content": f"{STAND_IN}_{number}_"} for number, role in enumerate(roles)]
            text = self._tried([*tried, {"role": "user", "content": "?"}])
            self._joins[roles] = any(one["content"] not in text for one in tried)
        if not self._joins.get(roles):
            return list(messages)
        content = "\n\n".join(filter(None, (one.get("content", "").strip() for one in first)))
        return [{**first[0], "content": content}, *messages[len(first) :]]

    def with_arguments(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages with arguments of tool calls as the template takes them: mappings, or JSON text."""
        if not any("tool_calls" in message for message in messages) or not self._wants_text:
            return [dict(message) for message in messages]
        return [
            {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else dict(message)
            for message in messages
        ]

    def check_written(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """ConfigError if the template leaves out a content or a call of a prompt, by stand-ins, once for each shape.

        Contents of earlier assistant turns are left to the template: it drops thoughts.
        """
        shape = tuple((m["role"], bool(text_of(m).strip()), len(m.get("tool_calls", ()))) for m in messages)
        if not shape or shape in self._written:
            return
        try:
            text = self.render([_stand_in(message, index) for index, message in enumerate(messages)])
        except ConfigError:
            return  # the messages themselves may be fine, and are rendered next
        for index, (role, has_content, calls) in enumerate(shape):
            if has_content and role != "assistant" and f"{STAND_IN}_{index}_" not in text:
                raise ConfigError(
                    f"chat template of {self.name} leaves out the content of message {index} (role {role}) of roles "
                    f"{[one for one, _, _ in shape]}; {REMEDY}"
                )
            if any(f"{STAND_IN}_{index}_{number}_" not in text for number in range(calls)):
                raise ConfigError(f"chat template of {self.name} leaves out tool calls of message {index}; {REMEDY}")
        self._written.add(shape)

    @cached_property
    def _writes_developer(self) -> bool:
        """Tell whether messages of role developer stay as they are: written, or no better as system messages."""
        asked = {"role": "user", "content": "?"}
        return STAND_IN in self._tried([{"role": "developer", "content": STAND_IN}, asked]) or STAND_IN not in (
            self._tried([{"role": "system", "content": STAND_IN}, asked])
        )

    @cached_property
    def _wants_text(self) -> bool:
        """Tell whether arguments of calls must be JSON text: as mappings they are refused, or written as Python."""
        arguments = {STAND_IN: STAND_IN}
        written = [self._tried(_calling(form)) for form in (arguments, json.dumps(arguments))]
        proper = STAND_IN in written[0] and str(arguments) not in written[0]
        return not proper and json.dumps(arguments) in written[1]

    def _key(self, key: str) -> str:
        """Name of a key in the template: that of thinking differs."""
        if key not in THINKING or _names(self.template, key):
            return key
        return next((other for other in THINKING if _names(self.template, f"message.{other}")), key)

    def _tried(self, messages: list[Any]) -> str:
        try:
            return self.render(messages)
        except ConfigError:
            return ""


def _calling(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": f"{STAND_IN}_name", "arguments": arguments}
    call = {"type": "function", "id": "call00000", "function": function}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _stand_in(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    stood = {key: value for key, value in message.items() if key not in THINKING}
    if text_of(message).strip():
        stood["content"] = f"{STAND_IN}_{index}_"
    if "tool_calls" in message:
        stood["tool_calls"] = [
            {**call, "function": {**call["function"], "name": f"{STAND_IN}_{index}_{number}_"}}
            for number, call in enumerate(message["tool_calls"])
        ]
    return stood


def check_turn_written(message: Mapping[str, Any], span: str, where: str) -> bool:
    """Check that the text of a trained turn holds its content and the names of its calls; True if it lacks thinking.

    ConfigError that begins with `where` for what is missing.
    """
    *thoughts, answer = re.split(r"</?think>", message.get("content", ""))
    if not _holds(span, answer):
        raise ConfigError(f"{where} leaves out the content {answer.strip()[:60]!r} of an assistant turn; {REMEDY}")
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    for name in names:
        if span.count(name) < names.count(name):
            raise ConfigError(f"{where} leaves out a call of {name} in an assistant turn; {REMEDY}")
    return not all(_holds(span, thought) for thought in (*thoughts, *(message.get(key, "") for key in THINKING)))


def check_tools_written(tools: Tools | None, text: str, name: str) -> None:
    """ConfigError if the rendered text lacks the name of a tool."""
    if any(tool["function"]["name"] not in text for tool in tools or ()):
        raise ConfigError(
            f"tools: chat template of {name} does not write them into the prompt; use a model and a template for tool "
            "calls (model.chat_template), or describe them in dataset.system"
        )


def _holds(text: str, part: str) -> bool:
    return part.strip() in text or squeezed(part) in squeezed(text)


def from_wire(messages: Any, pictures: RowPictures) -> list[Message]:
    """Messages of a request of the OpenAI chat API. ConfigError for what is no conversation that ends before an
    assistant turn. `pictures`: reader of the pictures in them."""
    if not isinstance(messages, list):
        raise ConfigError("messages must be a list")
    # A turn that says nothing comes back with null.
    silent = {"content": ""}
    present = [
        silent | {k: v for k, v in m.items() if v is not None} if isinstance(m, Mapping) else m for m in messages
    ]
    checked = checked_messages(present, "messages", pictures)
    if checked[-1]["role"] == "assistant":
        raise ConfigError("messages must end before the assistant turn to sample")
    return checked


def to_wire(message: Message) -> dict[str, Any]:
    """Assistant message as the API returns it."""
    calls = [_as_text(call) for call in message.get("tool_calls", ())]
    content = message.get("content") or (None if calls else "")
    return {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}


def plain_text(messages: Sequence[Message]) -> str:
    """Concatenate the contents. ConfigError for messages that hold more than text."""
    refuse_unknown_keys(messages, "")
    for index, message in enumerate(messages):
        extra = [key for key in ("tool_calls", "tool_call_id", "name", "weight", *THINKING) if key in message]
        if extra or not isinstance(message.get("content"), str):
            what = f"has {extra[0]}" if extra else "has no text content"
            raise ConfigError(f"message {index} {what}; {PLAIN}")
    return "".join(message["content"] for message in messages)


def only_text(messages: Sequence[Message], role: str) -> str:
    """Text of the only message of a plain prompt (role `user`) or answer (`assistant`). ConfigError for others: their
    contents would be one text without roles."""
    roles = [message["role"] for message in messages]
    if roles != [role]:
        what = "prompt" if role == "user" else "answer"
        raise ConfigError(f"the {what} has messages of roles {', '.join(roles) or 'none'}; {PLAIN}")
    return plain_text(messages)


def any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Pattern of any of these texts."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def replaced(value: Any, pattern: re.Pattern[str], stand_ins: Mapping[str, str]) -> Any:
    """Value with stand-ins in its texts."""
    if isinstance(value, str):
        return pattern.sub(lambda match: stand_ins[match.group()], value)
    if isinstance(value, Mapping):
        return {key: replaced(item, pattern, stand_ins) for key, item in value.items()}
    return [replaced(item, pattern, stand_ins) for item in value] if isinstance(value, list | tuple) else value


def strings_in(value: Any) -> Iterator[str]:
    """Texts of a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def parts_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parts of a message with pictures; none of one that is text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def prompt_digest(messages: Sequence[Mapping[str, Any]], tools: Tools | None = None) -> str:
    """Digest of what a prompt says: roles, texts, calls, pictures by their content, and tools. Rows with equal ones ask
    the model the same, so that their outcomes are not independent."""
    keyed = [
        {
            **message,
            "content": [
                {"image": digest(part["image"].content())} if part["type"] == "image" else part for part in parts
            ],
        }
        if (parts := parts_of(message))
        else dict(message)
        for message in messages
    ]
    return digest(typed_text([keyed, tools]))


def pictures_in(messages: Sequence[Mapping[str, Any]]) -> list[Picture]:
    """Pictures of messages, in order."""
    return [part["image"] for one in messages for part in parts_of(one) if part["type"] == "image"]
