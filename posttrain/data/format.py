"""Dataset formats: from a dict row to a training sequence or a prompt, by columns or templates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from posttrain.config import DatasetSection, SequenceSection
from posttrain.data.chat import Masked, Renderer
from posttrain.data.columns import (
    IMAGE_COLUMNS,
    SYSTEM_COLUMNS,
    TOOL_COLUMNS,
    Row,
    column_system,
    column_tools,
    fill,
    no_column,
    obeys,
    refuse_meanings,
    standard_row,
    template_columns,
    value_of,
)
from posttrain.data.messages import (
    Message,
    Remarks,
    Tools,
    checked_messages,
    checked_tools,
    is_same,
    looks_like_messages,
    text_of,
)
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.data.pictures import RowPictures

SHORTEST_REPEAT = 4
"""Minimum length of a prompt whose repetition at the start of an answer is no accident."""
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
LossOn = Literal["all", "answers", "last"]
"""Tokens with loss: all of a sequence, completions and assistant turns, or only the last of these."""


@dataclass(frozen=True, eq=False)
class TokenizedExample:
    """Tokenized training sequence. The first token has no context and never has loss."""

    tokens: Int[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]
    images: Int[np.ndarray, " T"] | None = None
    """Number of the image whose feature stands at each token, from 1; 0: text. None: without pictures."""
    grids: Int[np.ndarray, "I 2"] | None = None
    """Rows and columns of the images' tokens."""


def use_chat(section: DatasetSection, tokenizer: Tokenizer, columns: Sequence[str]) -> bool:
    """Tell whether rows use the chat template: `section.chat`, else as the model was trained, or if one exists and
    rows are not plain `text`. The column `messages` holds conversations, which only a template can write."""
    templates = section.prompt is not None or section.completion is not None
    plain = not templates and "text" in columns and not {"messages", "prompt"} & set(columns)
    if plain and section.chat:
        raise ConfigError("dataset.chat is true, but the column text is plain; give messages, or prompt and completion")
    if section.chat is not None:
        return section.chat
    if not templates and "messages" in columns:
        return tokenizer.chat_template is not None
    return tokenizer.chats and not plain


def loss_on(section: SequenceSection) -> LossOn:
    return "all" if section.train_on_prompt else "last" if section.last_turn_only else "answers"


def tokenize_example(row: Row, section: DatasetSection, renderer: Renderer, loss: LossOn) -> list[TokenizedExample]:
    """Tokens and loss mask of a row: from templates, `messages`, `prompt` with `completion`, or `text`.

    One sequence, or one for each assistant turn if the chat template rewrites earlier turns. Raises `ConfigError` if
    columns are missing or a value has the wrong type.
    """
    kind = _kind(section, list(row))
    if kind != "text" and renderer.chat != use_chat(section, renderer.tokenizer, list(row)):
        raise ConfigError("the first row is plain text and this one is not; set dataset.chat for all rows")
    prompt, answer, tools = training_conversation(row, section, renderer)
    messages = [*prompt, *answer]
    if kind == "text":
        if section.system is not None:
            raise ConfigError(
                "dataset.system has no place in the plain column text; give messages, or prompt and completion"
            )
        if loss == "last":
            raise ConfigError(
                "last_turn_only has no effect on the plain column text; give messages, or prompt and completion"
            )
        sequences = [renderer.text(_string(row, "text"))]
    elif renderer.chat or kind == "messages":
        sequences = renderer.conversations(messages, first=_first(messages, len(prompt), loss), tools=tools)
    else:
        sequences = [renderer.answer(prompt, answer, tools)]
    if loss == "all" and any("weight" in message for message in messages):
        raise ConfigError("weight: 0 of a message has no effect with train_on_prompt, which trains on everything")
    if loss == "all" and len(sequences) > 1:
        raise ConfigError(
            f"train_on_prompt: chat template of {renderer.tokenizer.name} rewrites earlier turns, so that each turn is "
            "a sequence whose prompt repeats them; remove it, or set model.chat_template to one that keeps them"
        )
    return [_example(masked, loss, renderer.tokenizer) for masked in sequences]


class Conversation(NamedTuple):
    """Messages before an answer, those of the answer, and the tools that the prompt describes."""

    prompt: list[Message]
    answer: list[Message]
    tools: Tools | None = None


def training_conversation(row: Row, section: DatasetSection, renderer: Renderer) -> Conversation:
    """Conversation of a training row, whose answer has loss; without messages for a plain text. ConfigError for what
    has no place, and for columns that are not obeyed."""
    kind, pictures = _kind(section, list(row)), row_pictures(row, section, renderer)
    if kind == "text":
        said = [*TOOL_COLUMNS, *SYSTEM_COLUMNS, "history", *(IMAGE_COLUMNS if pictures is not None else ())]
        if beside := [name for name in said if obeys(name, row, section)]:
            raise ConfigError(
                f"the column {beside[0]} has no place beside the plain column text; give messages, or prompt and "
                "completion, or remove it"
            )
        refuse_meanings(row, section, trained=True)
        _remark_json(_string(row, "text"), renderer.remarks)
        return Conversation([], [])
    if kind == "messages":
        said_by_all = _with_system(checked_messages(row["messages"], "messages", pictures), row, section)
        conversation = Conversation([], said_by_all if pictures is None else pictures.placed(said_by_all))
    else:
        prompt, answer = prompt_messages(row, section, pictures), answer_messages(row, section.completion, "completion")
        prompt = prompt if pictures is None else pictures.placed(prompt)
        conversation = spoken(prompt, answer, "completion", renderer.remarks)
    return with_tools(conversation, row, section, renderer)


def prompt_conversation(
    row: Row, section: DatasetSection, renderer: Renderer, *, trained: bool = False, read: Collection[str] = ()
) -> Conversation:
    """Conversation of a row with a prompt alone, with its pictures; one to sample from without a system message begins
    with that of the model's training. `trained`, `read`: see `refuse_meanings`."""
    pictures = row_pictures(row, section, renderer)
    prompt = prompt_messages(row, section, pictures)
    if not trained and renderer.chat:
        prompt = with_default_system(prompt, renderer.tokenizer)
    prompt = prompt if pictures is None else pictures.placed(prompt)
    return with_tools(Conversation(prompt, []), row, section, renderer, trained=trained, read=read)


def with_tools(
    conversation: Conversation,
    row: Row,
    section: DatasetSection,
    renderer: Renderer,
    *,
    trained: bool = True,
    read: Collection[str] = (),
) -> Conversation:
    """Conversation with the tools of its row, of columns or of a key of its messages. ConfigError for different ones,
    and for columns and names of messages that nothing obeys; see `refuse_meanings`."""
    refuse_meanings(row, section, trained=trained, read=read)
    for column in (*SYSTEM_COLUMNS, "history"):
        if obeys(column, row, section):
            renderer.remarks.add(column, f"the column {column} is read as part of the prompt")
    tools = column_tools(row, section)
    parts: list[list[Message]] = []
    for messages in (conversation.prompt, conversation.answer):
        kept: list[Message] = []
        for number, message in enumerate(messages):
            role = message["role"]
            if "name" in message and role != "tool" and renderer.chat and not renderer.writes_key("name", role):
                raise ConfigError(
                    f"message {number} ({role}) has a name, {message['name']!r}, which the chat template of "
                    f"{renderer.tokenizer.name} does not write; remove it, or write it into the content"
                )
            # Tools that stand in a message, as some data has them, are those of the conversation.
            lifted = [key for key in TOOL_COLUMNS if key in message and not renderer.writes_key(key, role)]
            for key in lifted:
                described = checked_tools(dict(message)[key], f"message {number}: {key}")
                if described is not None and tools is not None and described != tools:
                    raise ConfigError(
                        f"message {number} ({role}) describes other tools in {key} than the row or an earlier message; "
                        "a conversation has one list of tools"
                    )
                tools = tools if described is None else described
            rest: Any = {key: value for key, value in message.items() if key not in lifted}
            kept.append(rest if lifted else message)
            _remark_json(message.get("content", ""), renderer.remarks)
        parts.append(kept)
    prompt, answer = parts
    return Conversation(prompt, answer, tools)


def _remark_json(content: Any, remarks: Remarks) -> None:
    """Remark about a text that looks like messages: outside of the columns messages and conversations it is a text."""
    if isinstance(content, str) and looks_like_messages(content):
        remarks.add(
            "json",
            f"a text looks like a JSON list of messages, and is read as text: {content[:40]!r}; messages as JSON text "
            "stand in a column messages or conversations",
        )


def _example(masked: Masked, loss: LossOn, tokenizer: Tokenizer) -> TokenizedExample:
    tokens, mask = np.asarray(masked.tokens, np.int32), np.asarray(masked.mask, bool)
    if masked.images is None:
        return TokenizedExample(tokens, np.arange(len(tokens)) > 0 if loss == "all" else mask)
    if loss == "all":
        mask = (np.arange(len(tokens)) > 0) & ~np.isin(tokens, tokenizer.image_ids)
    return TokenizedExample(tokens, mask, np.asarray(masked.images, np.int32), np.asarray(masked.grids, np.int32))


def row_pictures(row: Row, section: DatasetSection, renderer: Renderer) -> RowPictures | None:
    """Pictures of a row, by columns that no template names; None for a model without images, which does not read the
    columns: that is a remark."""
    names = [name for name in IMAGE_COLUMNS if obeys(name, row, section)]
    if not renderer.tokenizer.has_images:
        if section.image_marker is not None:
            raise ConfigError(f"dataset.image_marker: the model of {renderer.tokenizer.name} takes no images")
        if names:
            renderer.remarks.add("images", f"the column {names[0]} is not read: the model takes no images")
        return None
    from posttrain.data.pictures import RowPictures

    found = section.path.found
    folder = section.path.folder if found is None else found if found.is_dir() else found.parent
    if not names and (column := _names_a_picture(row, section, folder)) is not None:
        raise ConfigError(
            f"column {column!r} names a picture ({row[column]}); only the columns image and images are read: rename it"
        )
    return RowPictures({name: row[name] for name in names}, folder, section.image_marker)


def refuse_pictures(row: Row, section: DatasetSection, renderer: Renderer) -> None:
    """ConfigError for pictures in columns of a row whose reader takes none, while the model does."""
    pictures = row_pictures(row, section, renderer)
    if section.image_marker is not None or (pictures is not None and pictures.left):
        raise ConfigError(
            "the row has pictures, which labelled steps do not take; remove the columns images, image, and "
            "dataset.image_marker"
        )


def prompt_messages(row: Row, section: DatasetSection, pictures: RowPictures | None = None) -> list[Message]:
    """Prompt messages of a row: a plain string is one user message, after the columns `system` and `history`.

    `pictures`: those of the row, which others than readers of images refuse.
    """
    value = _value(row, section.prompt, "prompt")
    listed = [_message("user", value)] if isinstance(value, str) else value
    messages = listed if pictures is None and listed is not value else checked_messages(listed, "prompt", pictures)
    if messages[-1]["role"] == "assistant":
        raise ConfigError("the prompt ends with an assistant message; it must end before the reply")
    return _with_system([*_history(row, section), *messages], row, section)


def prompt_is_text(row: Row, section: DatasetSection) -> bool:
    """Tell whether the row's prompt is a string; reward functions then get completions as strings, else as message
    lists."""
    return isinstance(_value(row, section.prompt, "prompt"), str)


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


def answer_messages(row: Row, template: str | None, column: str, pictures: RowPictures | None = None) -> list[Message]:
    """Messages of an answer: a plain string is one assistant message. `pictures`: those of a prompt that the answer may
    repeat."""
    value = _value(row, template, column)
    return [_message("assistant", value)] if isinstance(value, str) else checked_messages(value, column, pictures)


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
        value = value_of(
            row, columns[0], f"dataset.{column}={source!r}" if template else f"dataset.{column} (by default)"
        )
        if isinstance(value, list | tuple | np.ndarray):
            return list(value)
        if isinstance(value, Mapping) and {"role", "from"} & set(value):
            return [value]
        if template is None and not isinstance(value, str):
            raise ConfigError(
                f"column {column!r} holds a {type(value).__name__}; it must be a string or a message list"
            )
    return fill(source, row)


def _string(row: Row, column: str) -> str:
    value = value_of(row, column, "plain text")
    if not isinstance(value, str):
        raise ConfigError(f"column {column!r} holds a {type(value).__name__}; it must be a string")
    return value


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _with_system(messages: list[Message], row: Row, section: DatasetSection) -> list[Message]:
    """Messages after the system message of the section, or of a column for it."""
    texts = [text for text in (section.system, column_system(row, section)) if text]
    begins = messages[0]["role"] in ("system", "developer")
    if len(texts) + begins > 1:
        where = "dataset.system is set, but the row" if section.system else "the row has a column for it, and also"
        raise ConfigError(f"{where} brings a system message; remove one of them")
    return [_message("system", texts[0]), *messages] if texts else messages


def with_default_system(messages: list[Message], tokenizer: Tokenizer) -> list[Message]:
    """Messages after the system message that the model was trained with, if they bring none."""
    if tokenizer.system is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [_message("system", tokenizer.system), *messages]


def _history(row: Row, section: DatasetSection) -> list[Message]:
    """Messages of the column `history`: earlier turns as pairs of a question and an answer."""
    pairs = row.get("history") if obeys("history", row, section) else None
    if pairs is None:
        return []
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ConfigError(
            f"column 'history' holds {str(pairs)[:60]!r}; it must be a list of pairs of a question and an answer; "
            "rename it if it is something else"
        )
    return [_message(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]


def _names_a_picture(row: Row, section: DatasetSection, folder: Path) -> str | None:
    """Column of a row without messages that holds the path of a picture and is part of no template."""
    if any(isinstance(value, list | tuple | np.ndarray) for value in row.values()):
        return None
    from posttrain.data.pictures import is_path

    paths = {name: Path(value) for name, value in row.items() if isinstance(value, str) and is_path(value)}
    named = (name for name, path in paths.items() if path.suffix.lower() in IMAGE_SUFFIXES)
    return next((name for name in named if obeys(name, row, section) and (folder / paths[name]).is_file()), None)


def check_columns(row: Row, section: DatasetSection, *, chat: bool) -> None:
    """ConfigError for a row of Alpaca's columns that has no chat template to be rendered by."""
    if not chat and section.prompt is None and "instruction" in row and standard_row(row)[1] is not None:
        raise ConfigError(
            "the row has columns instruction and output, and no chat template; give the form of the prompt in "
            'dataset.prompt, such as "{instruction}\\n{input}\\n", and dataset.completion'
        )


def spoken(prompt: list[Message], answer: list[Message], column: str, remarks: Remarks) -> Conversation:
    """Prompt and answer without the prompt that some datasets repeat in front of it, with its system message.

    ConfigError for an answer that begins with another role than assistant, and with another system message. A text that
    begins with that of the prompt is a remark.
    """
    begins = answer[0]["role"] in ("system", "developer")
    own, said = prompt[0]["role"] in ("system", "developer"), answer[begins:]
    asked = prompt[own:]
    repeats = [n for n in range(len(asked), 0, -1) if len(said) > n and all(map(is_same, asked[-n:], said))]
    # An answer that begins with the assistant repeats a prompt only as a whole.
    if repeats and (repeats[0] == len(asked) or said[0]["role"] != "assistant"):
        said = said[repeats[0] :]
        if begins and own and not is_same(prompt[0], answer[0]):
            raise ConfigError(f"{column} begins with another system message than the prompt; give one of them")
        prompt = [answer[0], *prompt] if begins and not own else prompt
    elif begins:
        said = answer
    if not said or said[0]["role"] != "assistant":
        role = said[0]["role"] if said else answer[-1]["role"]
        raise ConfigError(
            f"{column} begins with a {role} message after the prompt; it must begin with an assistant message, or "
            "repeat the prompt before it"
        )
    asks = text_of(prompt[-1]).strip()
    if len(asks) >= SHORTEST_REPEAT and said[0].get("content", "").lstrip().startswith(asks):
        remarks.add(column, f"{column} begins with the text of the prompt {asks[:40]!r}, which is then written twice")
    return Conversation(prompt, said)
