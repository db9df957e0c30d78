"""Dataset formats: from a dict row to a training sequence or a prompt, by columns or templates."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from jaxtyping import Bool, Int

from posttrain.config import DatasetSection, SequenceSection
from posttrain.data.chat import Masked, Message, Renderer, plain_text
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError, did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool")
Row = Mapping[str, Any]
LossOn = Literal["all", "answers", "last"]
"""Tokens with loss: all of a sequence, completions and assistant turns, or only the last of these."""


@dataclass(frozen=True, eq=False)
class TokenizedExample:
    """Tokenized training sequence. The first token has no context and never has loss."""

    tokens: Int[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]


def use_chat(section: DatasetSection, tokenizer: Tokenizer, columns: Sequence[str]) -> bool:
    """Tell whether rows use the chat template: `section.chat`, else if one exists and rows are not plain `text`."""
    templates = section.prompt is not None or section.completion is not None
    plain = not templates and "text" in columns and not {"messages", "prompt"} & set(columns)
    if plain and section.chat:
        raise ConfigError("dataset.chat is true, but the column text is plain; give messages, or prompt and completion")
    return section.chat if section.chat is not None else tokenizer.chat_template is not None and not plain


def loss_on(section: SequenceSection) -> LossOn:
    return "all" if section.train_on_prompt else "last" if section.last_turn_only else "answers"


def tokenize_example(row: Row, section: DatasetSection, renderer: Renderer, loss: LossOn) -> TokenizedExample:
    """Tokens and loss mask of a row: from templates, `messages`, `prompt` with `completion`, or `text`.

    Raises `ConfigError` if columns are missing or a value has the wrong type.
    """
    kind = _kind(section, list(row))
    tools = row.get("tools")
    if kind == "text":
        if section.system is not None:
            raise ConfigError(
                "dataset.system has no place in the plain column text; give messages, or prompt and completion"
            )
        if loss == "last":
            raise ConfigError(
                "last_turn_only has no effect on the plain column text; give messages, or prompt and completion"
            )
        masked = renderer.text(_string(row, "text"))
    elif kind == "messages":
        messages = _with_system(checked_messages(row["messages"], "messages"), section)
        masked = renderer.conversation(messages, first=_first(messages, 0, loss), tools=tools)
    else:
        prompt, answer = prompt_messages(row, section), answer_messages(row, section.completion, "completion")
        masked = render_answer(prompt, answer, renderer, tools, loss)
    tokens = np.asarray(masked.tokens, np.int32)
    mask = np.arange(len(tokens)) > 0 if loss == "all" else np.asarray(masked.mask, bool)
    return TokenizedExample(tokens, mask)


def prompt_messages(row: Row, section: DatasetSection) -> list[Message]:
    """Prompt messages of a row: a plain string is one user message."""
    value = _value(row, section.prompt, "prompt")
    messages = [_message("user", value)] if isinstance(value, str) else checked_messages(value, "prompt")
    if messages[-1]["role"] == "assistant":
        raise ConfigError("the prompt ends with an assistant message; it must end before the reply")
    return _with_system(messages, section)


def prompt_is_text(row: Row, section: DatasetSection) -> bool:
    """Tell whether the row's prompt is a string; reward functions then get completions as strings, else as message
    lists."""
    return isinstance(_value(row, section.prompt, "prompt"), str)


def fill(template: str, row: Row) -> str:
    """Fill a template with columns (`str.format`). Braces in values are literal; `{{` and `}}` are literal braces in
    the template.

        >>> fill("Q: {question}", {"question": "Is {x} a set?"})
        'Q: Is {x} a set?'
    """
    parts = []
    for literal, column, format_spec, conversion in _parse(template):
        parts.append(literal)
        if column is not None:
            value = _column(row, column, f"template {template!r}")
            formatter = string.Formatter()
            try:
                parts.append(formatter.format_field(formatter.convert_field(value, conversion), format_spec or ""))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"template {template!r}: column {column!r} cannot be formatted: {error}") from error
    return "".join(parts)


def template_columns(template: str) -> list[str]:
    """Column names in a template. Raises `ConfigError` for unmatched braces."""
    return [column for _, column, _, _ in _parse(template) if column is not None]


def _parse(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"template {template!r}: {error}; write {{{{ and }}}} for literal braces") from error
    if any(column == "" for _, column, _, _ in parts):
        raise ConfigError(
            f"template {template!r} has empty braces; name a column in them, or write {{{{}}}} for literal ones"
        )
    return parts


def _kind(section: DatasetSection, columns: Sequence[str]) -> str:
    if section.prompt is not None or section.completion is not None:
        return "prompt"
    if "messages" in columns:
        return "messages"
    if "prompt" in columns and "completion" in columns:
        return "prompt"
    if "text" in columns:
        return "text"
    raise ConfigError(
        f"the row has columns {', '.join(columns)}; SFT needs messages, or prompt and completion, or text, "
        'or templates such as prompt: "{question}", completion: "{answer}"'
    )


def _first(messages: Sequence[Message], first: int, loss: LossOn) -> int:
    """Number of the first message that may have loss."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return max(first, turns[-1]) if turns and loss == "last" else first


def answer_messages(row: Row, template: str | None, column: str) -> list[Message]:
    """Messages of an answer: a plain string is one assistant message."""
    value = _value(row, template, column)
    return [_message("assistant", value)] if isinstance(value, str) else checked_messages(value, column)


def render_answer(
    prompt: Sequence[Message],
    answer: Sequence[Message],
    renderer: Renderer,
    tools: Any = None,
    loss: LossOn = "answers",
) -> Masked:
    """Render prompt and answer with loss on the answer, or only on its last turn."""
    if not renderer.chat:
        return renderer.completion(plain_text(prompt), plain_text(answer))
    messages = [*prompt, *answer]
    return renderer.conversation(messages, first=_first(messages, len(prompt), loss), tools=tools)


def _value(row: Row, template: str | None, column: str) -> str | list[Any]:
    """Text of a template or column; a message list if the column, or the template's only field, holds one."""
    source = f"{{{column}}}" if template is None else template
    columns = template_columns(source)
    if template is None and column not in row:
        example = "{question}" if column == "prompt" else "{answer}"
        raise ConfigError(
            f"dataset.{column} (by default): {no_column(column, row)}; "
            f"give dataset.{column}, a template over the columns such as {example!r}"
        )
    if source == f"{{{columns[0] if columns else ''}}}":
        value = _column(
            row, columns[0], f"dataset.{column}={source!r}" if template else f"dataset.{column} (by default)"
        )
        if isinstance(value, list | tuple | np.ndarray):
            return list(value)
        if template is None and not isinstance(value, str):
            raise ConfigError(
                f"column {column!r} holds a {type(value).__name__}; it must be a string or a message list"
            )
    return fill(source, row)


def no_column(column: str, row: Row) -> str:
    """Error text for a missing column: the existing columns, and a similar name if there is one."""
    return f"no column {column!r} among {', '.join(row)}{did_you_mean(column, row)}"


def _column(row: Row, column: str, where: str) -> Any:
    if column not in row:
        raise ConfigError(f"{where}: {no_column(column, row)}")
    if row[column] is None:
        raise ConfigError(f"{where}: column {column!r} is null; remove such rows")
    return row[column]


def _string(row: Row, column: str) -> str:
    value = _column(row, column, "plain text")
    if not isinstance(value, str):
        raise ConfigError(f"column {column!r} holds a {type(value).__name__}; it must be a string")
    return value


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _with_system(messages: list[Message], section: DatasetSection) -> list[Message]:
    if section.system is None:
        return messages
    if messages[0]["role"] == "system":
        raise ConfigError("dataset.system is set, but the row brings a system message; remove one of them")
    return [_message("system", section.system), *messages]


def checked_messages(value: Any, column: str) -> list[Message]:
    """Message list with known roles, and content or tool calls in each. ConfigError for anything else."""
    if not isinstance(value, list | tuple | np.ndarray) or len(value) == 0:
        raise ConfigError(f"column {column!r} must hold a non-empty list of messages; it holds {str(value)[:60]!r}")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ConfigError(f"{column}[{index}] must be a message with role and content; it is {str(message)[:80]!r}")
        if message["role"] not in ROLES:
            role = str(message["role"])
            raise ConfigError(
                f"{column}[{index}].role={role!r}: use one of {', '.join(ROLES)}{did_you_mean(role, ROLES)}"
            )
        if message.get("content") is None and not message.get("tool_calls"):
            raise ConfigError(f"{column}[{index}] has neither content nor tool_calls; it has {', '.join(message)}")
    return [cast(Message, dict(message)) for message in value]
